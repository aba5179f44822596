"""The nodes' own network test: three of them on this machine, and strangers at their door."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

from tests.conftest import ROOT
from tests.until import free_port, until

SCRIPT = ROOT / "src" / "corral" / "node" / "network_probe.py"
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def start(order: dict[str, Any], me: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps({**order, "me": me}).encode())
    process.stdin.close()
    return process


def answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    with process:
        assert process.stdout is not None
        found: dict[str, Any] = json.loads(process.stdout.read())
    return found


def make_order(limit_s: float = 60.0) -> dict[str, Any]:
    peers = [[f"n{i}", address, free_port(address)] for i, address in enumerate(ADDRESSES)]
    return {"peers": peers, "token": "word", "limit_s": limit_s, "stream_s": 0.02}


def test_every_pair_measures_once() -> None:
    order = make_order()
    found = [answer(process) for process in [start(order, me) for me in range(3)]]
    for me, report in enumerate(found):
        assert {row["reach"] for row in report["peers"].values()} == {"ok"}
        for other in range(3):
            if other != me:
                assert ("rtt_s" in report["peers"][f"n{other}"]) == (other > me)
    row = found[0]["peers"]["n1"]
    assert row["rtt_s"] > 0
    assert row["there_bps"] > 0
    assert row["back_bps"] > 0


def test_a_node_that_never_came_is_refused_and_holds_nobody() -> None:
    order = make_order()
    found = [answer(process) for process in [start(order, me) for me in (0, 1)]]
    assert found[0]["peers"]["n2"]["reach"] == "refused"
    assert found[0]["peers"]["n1"]["reach"] == "ok"
    assert found[1]["peers"]["n0"]["reach"] == "ok"


def test_a_stranger_learns_nothing() -> None:
    order = make_order()
    process = start(order, 0)
    _, address, port = order["peers"][0]

    def connect() -> socket.socket | None:
        assert process.poll() is None
        try:
            return socket.create_connection((address, port), 30)
        except ConnectionRefusedError:
            return None

    caller = until(connect, "its listening")
    assert caller is not None
    with caller:
        body = json.dumps({"token": "guess", "what": "hello"}).encode()
        caller.sendall(len(body).to_bytes(4, "big") + body)
        assert caller.recv(100) == b""
    process.kill()
    with process:
        pass


def test_an_address_that_is_not_ours_is_an_error() -> None:
    order = make_order()
    order["peers"][0][1] = "203.0.113.7"
    assert "error" in answer(start(order, 0))

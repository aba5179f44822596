"""How well nodes reach each other: every node runs this at the same time and talks to every other one.

First each node connects to all others, which shows what a firewall refuses or swallows, in both directions. Then each
pair measures, the lower number asking: the time of a small message there and back, and the rate of a stream in each
direction. A node is in one measurement at a time; one that is asked meanwhile says so and is asked again, so that no
order must be kept between them and nobody waits for a node that is dead.

What to do comes as one JSON object on stdin (it holds the word by which the nodes know each other): me, peers
[[name, address, port], …], token, limit_s, stream_s. Standard library only, Python 3.8 or later, nothing of corral.
"""

import hmac
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Set, Tuple

Json = Dict[str, Any]
CONNECT_S = 3.0
PINGS = 20
PIECE = bytes(1 << 18)


class Wire:
    """One node's part."""

    def __init__(self, order: Json) -> None:
        self.me = int(order["me"])
        self.peers: List[List[Any]] = order["peers"]
        self.token = str(order["token"])
        self.until = time.monotonic() + float(order["limit_s"])
        self.stream_s = float(order["stream_s"])
        self.busy = threading.Lock()
        self.touched = time.monotonic()  # when a peer last spoke to us
        self.heard: Set[Tuple[str, int]] = set()
        self.rows: Dict[str, Json] = {}

    # --- being asked

    def listen(self) -> None:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((self.peers[self.me][1], self.peers[self.me][2]))
        server.listen(128)
        threading.Thread(target=self.serve, args=(server,), daemon=True).start()

    def serve(self, server: socket.socket) -> None:
        while True:
            caller, _ = server.accept()
            threading.Thread(target=self.answer, args=(caller,), daemon=True).start()

    def answer(self, caller: socket.socket) -> None:
        try:
            with caller:
                caller.settimeout(CONNECT_S + self.stream_s)
                hello = read_line(caller)
                if not hmac.compare_digest(str(hello.get("token", "")), self.token):
                    return  # somebody else: tell him nothing
                self.touched = time.monotonic()
                who = (str(hello.get("what")), int(hello.get("me", -1)))
                if who[0] == "hello":
                    send_line(caller, {"ok": True})
                    self.heard.add(who)
                elif self.busy.acquire(False):
                    try:
                        send_line(caller, {"ok": True})
                        self.measured(caller)
                        self.heard.add(who)
                    finally:
                        self.busy.release()
                        self.touched = time.monotonic()
                else:
                    send_line(caller, {"ok": False})
        except (OSError, ValueError, TypeError, RecursionError):
            pass  # the asking side reports it

    def measured(self, caller: socket.socket) -> None:
        for _ in range(PINGS):
            caller.sendall(read_exactly(caller, 1))
        send_line(caller, {"bytes": drain(caller)})
        stream(caller, self.stream_s)

    # --- asking

    def call(self, peer: int, what: str) -> socket.socket:
        _, address, port = self.peers[peer]
        wire = socket.create_connection((address, port), CONNECT_S, (self.peers[self.me][1], 0))
        wire.settimeout(CONNECT_S + self.stream_s)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_line(wire, {"token": self.token, "what": what, "me": self.me})
        return wire

    def reach(self, peer: int) -> None:
        """Connect once; a refusal may only mean that the peer has not started yet."""
        row = self.rows[self.peers[peer][0]]
        began = time.monotonic()
        patience = min(self.until, began + 5.0)
        while True:
            try:
                with self.call(peer, "hello") as wire:
                    read_line(wire)
                row["reach"] = "ok"
                return
            except socket.timeout:
                row["reach"] = "timeout"
                return
            except ConnectionRefusedError:
                row["reach"] = "refused"
            except (OSError, ValueError) as error:
                row["reach"] = getattr(error, "strerror", None) or str(error) or "closed"
            if time.monotonic() > patience:
                return
            time.sleep(0.1)

    def measure(self, peer: int) -> Optional[Json]:
        """One measurement, or None when the peer is in another one."""
        with self.call(peer, "measure") as wire:
            if not read_line(wire).get("ok"):
                return None
            times = []
            for _ in range(PINGS):
                began = time.perf_counter()
                wire.sendall(b"p")
                read_exactly(wire, 1)
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            stream(wire, self.stream_s)
            there = read_line(wire)["bytes"] * 8 / (time.perf_counter() - began)
            began = time.perf_counter()
            back = drain(wire) * 8 / (time.perf_counter() - began)
            middle = sorted(times)[len(times) // 2]
            return {"rtt_s": middle, "there_bps": there, "back_bps": back}

    def run(self) -> Json:
        self.rows = {str(peer[0]): {"reach": ""} for i, peer in enumerate(self.peers) if i != self.me}
        self.listen()
        others = [i for i in range(len(self.peers)) if i != self.me]
        seekers = [threading.Thread(target=self.reach, args=(i,), daemon=True) for i in others]
        for seeker in seekers:
            seeker.start()
        for seeker in seekers:
            seeker.join(max(0.0, self.until - time.monotonic()))
        mine = [i for i in others if i > self.me and self.rows[self.peers[i][0]]["reach"] == "ok"]
        while mine and time.monotonic() + 2 * self.stream_s < self.until:
            random.shuffle(mine)
            mine = [i for i in mine if not self.attempt(i)]
            if mine:
                time.sleep(random.uniform(0.002, 0.02))  # noqa: S311 - not to meet again
        self.wait_for_others(others)
        return {"peers": self.rows}

    def wait_for_others(self, others: List[int]) -> None:
        """Until all have asked what they had to ask, or nobody has asked for longer than anybody waits in between."""
        expected = {("hello", i) for i in others} | {("measure", i) for i in others if i < self.me}
        quiet_s = CONNECT_S + 2 * self.stream_s
        while not expected <= self.heard and time.monotonic() < min(self.until, self.touched + quiet_s):
            time.sleep(0.02)

    def attempt(self, peer: int) -> bool:
        """Whether nothing is left to do with this peer."""
        if time.monotonic() + 2 * self.stream_s > self.until or not self.busy.acquire(False):
            return False
        try:
            found = self.measure(peer)
        except (OSError, ValueError) as error:
            self.rows[self.peers[peer][0]]["error"] = str(error) or "closed"
            return True
        finally:
            self.busy.release()
        if found is not None:
            self.rows[self.peers[peer][0]].update(found)
        return found is not None


def send_line(wire: socket.socket, body: Json) -> None:
    data = json.dumps(body).encode()
    wire.sendall(struct.pack("!I", len(data)) + data)


def read_exactly(wire: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = wire.recv(count - len(data))
        if not piece:
            raise OSError("the connection was closed")
        data += piece
    return data


def read_line(wire: socket.socket) -> Json:
    (length,) = struct.unpack("!I", read_exactly(wire, 4))
    if length > 4096:
        raise ValueError("not one of ours")
    body = json.loads(read_exactly(wire, length).decode("utf-8", "replace"))
    return body if isinstance(body, dict) else {}


def stream(wire: socket.socket, seconds: float) -> None:
    """Send zeros for a while; then a one, which ends it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        wire.sendall(PIECE)
    wire.sendall(b"\1")


def drain(wire: socket.socket) -> int:
    buffer = bytearray(1 << 20)
    count = 0
    while True:
        got = wire.recv_into(buffer)
        if not got:
            raise OSError("the connection was closed")
        count += got
        if buffer[got - 1]:
            return count


def main() -> None:
    order = json.loads(sys.stdin.read())
    try:
        report = Wire(order).run()
    except OSError as error:
        report = {"peers": {}, "error": "%s" % error}
    print(json.dumps(report))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

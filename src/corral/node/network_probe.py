"""How well nodes reach each other: every node runs this at the same time and connects to every other one.

First each node connects to all others, which shows what a firewall rejects or drops, in both directions. Then each
pair measures, started by the lower number: the round-trip time of a small message, and the rate of a stream in each
direction. A node takes part in one measurement at a time; a busy node says so and is asked again later, so that the
nodes need no common order and none waits for a dead one.

The request is one JSON object on stdin, because it holds the token by which the nodes know each other: me, peers
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


class NetworkProbe:
    """One node's part."""

    def __init__(self, request: Json) -> None:
        self.me = int(request["me"])
        self.peers: List[List[Any]] = request["peers"]
        self.token = str(request["token"])
        self.until = time.monotonic() + float(request["limit_s"])
        self.stream_s = float(request["stream_s"])
        self.busy = threading.Lock()
        self.touched = time.monotonic()  # when a peer last sent something
        self.heard: Set[Tuple[str, int]] = set()
        self.rows: Dict[str, Json] = {}

    # --- answering

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
                hello = read_message(caller)
                if not hmac.compare_digest(str(hello.get("token", "")), self.token):
                    return  # not one of the nodes: gets no answer
                self.touched = time.monotonic()
                who = (str(hello.get("what")), int(hello.get("me", -1)))
                if who[0] == "hello":
                    send_message(caller, {"ok": True})
                    self.heard.add(who)
                elif self.busy.acquire(False):
                    try:
                        send_message(caller, {"ok": True})
                        self.take_part(caller)
                        self.heard.add(who)
                    finally:
                        self.busy.release()
                        self.touched = time.monotonic()
                else:
                    send_message(caller, {"ok": False})
        except (OSError, ValueError, TypeError, RecursionError):
            pass  # the asking side reports it

    def take_part(self, caller: socket.socket) -> None:
        for _ in range(PINGS):
            caller.sendall(read_exactly(caller, 1))
        send_message(caller, {"bytes": drain(caller)})
        stream(caller, self.stream_s)

    # --- asking

    def call(self, peer: int, what: str) -> socket.socket:
        _, address, port = self.peers[peer]
        connection = socket.create_connection((address, port), CONNECT_S, (self.peers[self.me][1], 0))
        connection.settimeout(CONNECT_S + self.stream_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_message(connection, {"token": self.token, "what": what, "me": self.me})
        return connection

    def reach(self, peer: int) -> None:
        """Connect once; a refused connection may only mean that the peer has not started yet."""
        row = self.rows[self.peers[peer][0]]
        began = time.monotonic()
        deadline = min(self.until, began + 5.0)
        while True:
            try:
                with self.call(peer, "hello") as connection:
                    read_message(connection)
                row["reach"] = "ok"
                return
            except socket.timeout:
                row["reach"] = "timeout"
                return
            except ConnectionRefusedError:
                row["reach"] = "refused"
            except (OSError, ValueError) as error:
                row["reach"] = getattr(error, "strerror", None) or str(error) or "closed"
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def measure(self, peer: int) -> Optional[Json]:
        """One measurement, or None when the peer is busy with another one."""
        with self.call(peer, "measure") as connection:
            if not read_message(connection).get("ok"):
                return None
            times = []
            for _ in range(PINGS):
                began = time.perf_counter()
                connection.sendall(b"p")
                read_exactly(connection, 1)
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            stream(connection, self.stream_s)
            there = read_message(connection)["bytes"] * 8 / (time.perf_counter() - began)
            began = time.perf_counter()
            back = drain(connection) * 8 / (time.perf_counter() - began)
            middle = sorted(times)[len(times) // 2]
            return {"rtt_s": middle, "there_bps": there, "back_bps": back}

    def run(self) -> Json:
        self.rows = {str(peer[0]): {"reach": ""} for i, peer in enumerate(self.peers) if i != self.me}
        self.listen()
        others = [i for i in range(len(self.peers)) if i != self.me]
        connecting = [threading.Thread(target=self.reach, args=(i,), daemon=True) for i in others]
        for thread in connecting:
            thread.start()
        for thread in connecting:
            thread.join(max(0.0, self.until - time.monotonic()))
        mine = [i for i in others if i > self.me and self.rows[self.peers[i][0]]["reach"] == "ok"]
        while mine and time.monotonic() + 2 * self.stream_s < self.until:
            random.shuffle(mine)
            mine = [i for i in mine if not self.attempt(i)]
            if mine:
                time.sleep(random.uniform(0.002, 0.02))  # noqa: S311 - not to collide again
        self.wait_for_others(others)
        return {"peers": self.rows}

    def wait_for_others(self, others: List[int]) -> None:
        """Answer until all others have measured, or none has been heard for longer than the pauses between two
        requests.
        """
        expected = {("hello", i) for i in others} | {("measure", i) for i in others if i < self.me}
        quiet_s = CONNECT_S + 2 * self.stream_s
        while not expected <= self.heard and time.monotonic() < min(self.until, self.touched + quiet_s):
            time.sleep(0.02)

    def attempt(self, peer: int) -> bool:
        """Whether nothing is left to do with this peer."""
        if time.monotonic() + 2 * self.stream_s > self.until or not self.busy.acquire(False):
            return False
        try:
            measured = self.measure(peer)
        except (OSError, ValueError) as error:
            self.rows[self.peers[peer][0]]["error"] = str(error) or "closed"
            return True
        finally:
            self.busy.release()
        if measured is not None:
            self.rows[self.peers[peer][0]].update(measured)
        return measured is not None


def send_message(connection: socket.socket, body: Json) -> None:
    data = json.dumps(body).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise OSError("the connection was closed")
        data += piece
    return data


def read_message(connection: socket.socket) -> Json:
    (length,) = struct.unpack("!I", read_exactly(connection, 4))
    if length > 4096:
        raise ValueError("not a message of this probe")
    body = json.loads(read_exactly(connection, length).decode("utf-8", "replace"))
    return body if isinstance(body, dict) else {}


def stream(connection: socket.socket, seconds: float) -> None:
    """Send zeros for a while, then a one, which ends the stream."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection.sendall(PIECE)
    connection.sendall(b"\1")


def drain(connection: socket.socket) -> int:
    buffer = bytearray(1 << 20)
    count = 0
    while True:
        got = connection.recv_into(buffer)
        if not got:
            raise OSError("the connection was closed")
        count += got
        if buffer[got - 1]:
            return count


def main() -> None:
    request = json.loads(sys.stdin.read())
    try:
        report = NetworkProbe(request).run()
    except OSError as error:
        report = {"peers": {}, "error": "%s" % error}
    print(json.dumps(report))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

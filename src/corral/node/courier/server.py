"""The courier's own server: a depot's files over HTTP, to whoever has the token."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import os
import re
import socket
import threading
import time
from typing import Any, List, Tuple

from .depot import Depot, Item
from .talk import Json


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    depot: Depot
    token: str

    def allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self.token}".encode()):
            return True
        self.refuse(401)
        return False

    def refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def do_GET(self) -> None:
        """`/files/NUMBER`, with `Range: bytes=FROM-` or `FROM-TO`."""
        if not self.allowed():
            return None
        matched = re.fullmatch(r"/files/(\d{1,9})", self.path)
        if not matched or int(matched.group(1)) >= len(self.depot.items):
            return self.refuse(404)
        item = self.depot.items[int(matched.group(1))]
        start, end = 0, item.size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            start, end = int(wanted.group(1)), min(item.size, int(wanted.group(2) or item.size) + 1)
        if item.kind != "file" or start > end or (wanted and start >= item.size):
            return self.refuse(416 if wanted else 404)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{item.size}")
        return self.body([(item, start, end)])

    def do_POST(self) -> None:
        """`/pack` with a list of numbers: those files, one after the other."""
        if not self.allowed():
            return None
        try:
            numbers = json.loads(self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 1 << 20)))
            items = [self.depot.items[int(number)] for number in numbers if int(number) >= 0]
        except (ValueError, TypeError, IndexError):
            return self.refuse(400)
        if self.path != "/pack" or any(item.kind != "file" for item in items):
            return self.refuse(404)
        self.send_response(200)
        return self.body([(item, 0, item.size) for item in items])

    def body(self, spans: List[Tuple[Item, int, int]]) -> None:
        self.send_header("Content-Length", str(sum(end - start for _, start, end in spans)))
        self.end_headers()
        self.wfile.flush()
        try:
            for item, start, end in spans:
                self.depot.send(self.connection, item, start, end, 600)
        except OSError:  # the receiver left, or what was promised did not come: it will ask again
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, depot: Depot, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), type("Bound", (Handler,), {"depot": depot, "token": token}))

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def start_server(address: str, depot: Depot, token: str) -> Json:
    """Where others reach this courier."""
    address = address or own_address()
    try:
        server = Server(address, depot, token)
    except OSError:  # the others' name for this node is not an address of its own (NAT)
        server = Server("0.0.0.0", depot, token)  # noqa: S104
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"address": address, "port": int(server.server_address[1])}


def own_address() -> str:
    """The address by which ssh came here, or the one this node would send from."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4:
        return words[2]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def end_when_idle(depot: Depot, idle_s: float) -> None:
    def watch() -> None:
        while time.monotonic() - depot.active_s < idle_s:
            time.sleep(min(1.0, idle_s / 4))
        os._exit(75)

    threading.Thread(target=watch, daemon=True).start()

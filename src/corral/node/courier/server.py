"""The courier's own server: a depot's files over HTTP, to whoever signs with the token."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import socket
import threading
import time
from typing import Any, Dict, List, Set, Tuple

from .files import CourierFiles, Item
from .protocol import Json, SignatureVerifier

PENDING_S = 10.0  # for a stranger to say who he is
MOST_PENDING = 64  # strangers at once; one more, and the one who has been silent longest goes
MOST_OPEN = 256
LONGEST_BODY = 64 << 10


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = PENDING_S
    depot: CourierFiles
    doorkeeper: SignatureVerifier
    server: "Server"

    def allowed(self, body: bytes = b"") -> bool:
        given, span = self.headers.get("Authorization", ""), self.headers.get("Range", "")
        if self.doorkeeper.admits(given, self.command, self.path, span, body):
            self.server.known(self.connection)
            self.connection.settimeout(120)
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
        if self.depot.closed:
            return self.refuse(503)
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
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch("[0-9]{1,6}", length) or int(length) > LONGEST_BODY:
            return self.refuse(413)
        body = self.rfile.read(int(length))
        if not self.allowed(body):
            return None
        try:
            items = [self.depot.items[int(number)] for number in json.loads(body) if int(number) >= 0]
        except (ValueError, TypeError, IndexError, RecursionError):
            return self.refuse(400)
        if self.path != "/pack" or any(item.kind != "file" for item in items):
            return self.refuse(404)
        if self.depot.closed:
            return self.refuse(503)
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
    """Takes strangers for a few seconds, so many at once, and whoever has signed a request for as long as it asks."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, depot: CourierFiles, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.lock = threading.Lock()
        self.pending: Dict[socket.socket, float] = {}  # since when; the oldest first
        self.open: Set[socket.socket] = set()
        super().__init__(
            (address, 0), type("Bound", (Handler,), {"depot": depot, "doorkeeper": SignatureVerifier(token)})
        )

    def get_request(self) -> Tuple[socket.socket, Any]:
        try:
            found: Tuple[socket.socket, Any] = super().get_request()
        except OSError:  # no descriptor left: the caller waits outside, and nobody turns in circles meanwhile
            time.sleep(0.1)
            raise
        return found

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.pending[request] = time.monotonic()
            self.open.add(request)
            late = [next(iter(self.pending))] if len(self.pending) > MOST_PENDING else []
            late = [request] if len(self.open) > MOST_OPEN else late
            for stranger in late:
                self.show_out(stranger)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        with self.lock:
            began = time.monotonic() - PENDING_S
            for stranger in [one for one, since in self.pending.items() if since < began]:
                self.show_out(stranger)

    def show_out(self, stranger: socket.socket) -> None:
        """Its thread finds the connection ended, and closes it."""
        self.pending.pop(stranger, None)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_RDWR)

    def known(self, request: socket.socket) -> None:
        with self.lock:
            self.pending.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self.pending.pop(request, None)
            self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def start_server(address: str, depot: CourierFiles, token: str) -> Json:
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


def end_when_idle(depot: CourierFiles, idle_s: float) -> None:
    def watch() -> None:
        while time.monotonic() - depot.active_s < idle_s:
            time.sleep(min(1.0, idle_s / 4))
        os._exit(75)

    threading.Thread(target=watch, daemon=True).start()

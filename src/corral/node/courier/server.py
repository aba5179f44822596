"""The courier's HTTP server: sends files to whoever signs its requests with the token."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import socket
import threading
import time
from typing import Any, List, Set, Tuple

from ..authentication import UnverifiedConnections
from .files import CourierFiles, Item
from .protocol import Json, SignatureVerifier

UNVERIFIED_S = 10.0  # to sign a request
MOST_UNVERIFIED = 64
MOST_OPEN = 256
LONGEST_BODY = 64 << 10


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = UNVERIFIED_S
    files: CourierFiles
    verifier: SignatureVerifier
    server: "Server"

    def allowed(self, body: bytes = b"") -> bool:
        header, span = self.headers.get("Authorization", ""), self.headers.get("Range", "")
        if self.verifier.accepts(header, self.command, self.path, span, body):
            self.server.unverified.remove(self.connection)
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
        if not matched or int(matched.group(1)) >= len(self.files.items):
            return self.refuse(404)
        if self.files.closed:
            return self.refuse(503)
        item = self.files.items[int(matched.group(1))]
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
            items = [self.files.items[int(number)] for number in json.loads(body) if int(number) >= 0]
        except (ValueError, TypeError, IndexError, RecursionError):
            return self.refuse(400)
        if self.path != "/pack" or any(item.kind != "file" for item in items):
            return self.refuse(404)
        if self.files.closed:
            return self.refuse(503)
        self.send_response(200)
        return self.body([(item, 0, item.size) for item in items])

    def body(self, spans: List[Tuple[Item, int, int]]) -> None:
        self.send_header("Content-Length", str(sum(end - start for _, start, end in spans)))
        self.end_headers()
        self.wfile.flush()
        try:
            for item, start, end in spans:
                self.files.send(self.connection, item, start, end, 600)
        except OSError:  # the receiver left, or the promised bytes did not come: it will ask again
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """Keeps a limited number of unverified connections for a few seconds, and verified ones until they end."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, files: CourierFiles, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.lock = threading.Lock()
        self.unverified = UnverifiedConnections(MOST_UNVERIFIED, UNVERIFIED_S)
        self.open: Set[socket.socket] = set()
        super().__init__(
            (address, 0), type("BoundHandler", (Handler,), {"files": files, "verifier": SignatureVerifier(token)})
        )

    def get_request(self) -> Tuple[socket.socket, Any]:
        try:
            accepted: Tuple[socket.socket, Any] = super().get_request()
        except OSError:  # no descriptor left: the caller waits, and this loop must not spin meanwhile
            time.sleep(0.1)
            raise
        return accepted

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.open.add(request)
            crowded = len(self.open) > MOST_OPEN
        if crowded:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread closes it
        else:
            self.unverified.add(request)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        self.unverified.expire()

    def shutdown_request(self, request: Any) -> None:
        self.unverified.remove(request)
        with self.lock:
            self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def start_server(address: str, files: CourierFiles, token: str) -> Json:
    """Start serving; the address and port where others reach this courier."""
    address = address or own_address()
    try:
        server = Server(address, files, token)
    except OSError:  # the address that others use for this node is not one of its own (NAT)
        server = Server("0.0.0.0", files, token)  # noqa: S104
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"address": address, "port": int(server.server_address[1])}


def own_address() -> str:
    """The address by which ssh came here, or the one this node would send from."""
    ssh = os.environ.get("SSH_CONNECTION", "").split()
    if len(ssh) == 4:
        return ssh[2]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def end_when_idle(files: CourierFiles, idle_s: float) -> None:
    def watch() -> None:
        while time.monotonic() - files.active_s < idle_s:
            time.sleep(min(1.0, idle_s / 4))
        os._exit(75)

    threading.Thread(target=watch, daemon=True).start()

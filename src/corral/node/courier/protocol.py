"""The courier's protocol: one JSON object per line on standard input and output, signed requests between couriers.

Every request is signed with the token, which itself is never sent. An eavesdropper learns no token, and cannot send a
request again: each carries a nonce that is accepted once. Responses need no signature, because files are checked by
hashes that came another way; they are not secret, either.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import sys
import threading
import time
from typing import IO, Any, Dict, Iterator, Optional, Set

from ..authentication import sign

Json = Dict[str, Any]
SCHEME = "Corral-HMAC-SHA256"
MOST_NONCES = 1 << 20  # of one courier's life; each stands for a file or a pack of files


class CourierError(Exception):
    """One sentence for the user."""


_out_lock = threading.Lock()


def send_event(event: str, **fields: Any) -> None:
    with _out_lock:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def read_line(stream: IO[bytes]) -> Optional[Json]:
    line = stream.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def messages(stream: IO[bytes]) -> Iterator[Json]:
    """What the caller sends after its request, until it ends or says so."""
    while True:
        message = read_line(stream)
        if message is None or message["do"] == "end":
            return
        yield message


class Progress:
    """Counts bytes from any thread, and sends an event with done and total at most twice a second."""

    def __init__(self, event: str, total: int) -> None:
        self.event, self.total, self.done, self.sent_s = event, total, 0, 0.0
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if time.monotonic() - self.sent_s < 0.5:
                return
            self.sent_s = time.monotonic()
        send_event(self.event, done=self.done, total=self.total)


def proof(token: str, nonce: str, method: str, path: str, span: str, body: bytes) -> str:
    """The signature of a request."""
    digest = hashlib.sha256(body).digest()
    return sign(token.encode(), "corral courier 1", nonce, method, path, span, digest).hex()


def authorization(token: str, method: str, path: str, span: str = "", body: bytes = b"") -> str:
    """The header of a request; `span` is its `Range`."""
    nonce = os.urandom(16).hex()
    return f"{SCHEME} {nonce}:{proof(token, nonce, method, path, span, body)}"


class SignatureVerifier:
    """Accepts each valid signature once."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.seen: Set[str] = set()
        self.lock = threading.Lock()

    def accepts(self, header: str, method: str, path: str, span: str, body: bytes) -> bool:
        match = re.fullmatch(SCHEME + " ([0-9a-f]{32}):([0-9a-f]{64})", header)
        if not match:
            return False
        nonce, signature = match.groups()
        if not hmac.compare_digest(signature, proof(self.token, nonce, method, path, span, body)):
            return False
        with self.lock:
            if nonce in self.seen or len(self.seen) >= MOST_NONCES:
                return False
            self.seen.add(nonce)
        return True

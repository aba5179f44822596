"""How a courier is spoken to: one JSON object per line, in and out.

How couriers know each other: every request is signed with the token, which itself never travels.

Whoever listens on the wire learns no token, and can send no request again: each carries a number that is taken once.
What comes back needs no signature: files are judged by hashes that came another way. It is not secret, either.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import struct
import sys
import threading
import time
from typing import IO, Any, Callable, Dict, Optional, Set

Json = Dict[str, Any]


class TroubleError(Exception):
    """One sentence for the user."""


_out_lock = threading.Lock()


def tell(event: str, **fields: Any) -> None:
    with _out_lock:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def read_line(stream: IO[bytes]) -> Optional[Json]:
    line = stream.readline()
    return json.loads(line) if line.endswith(b"\n") else None


class Pace:
    """Calls `say` with the numbers at most twice a second, from whichever thread."""

    def __init__(self, say: Callable[[int, int], None], total: int) -> None:
        self.say, self.total, self.done, self.told_s = say, total, 0, 0.0
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if time.monotonic() - self.told_s < 0.5:
                return
            self.told_s = time.monotonic()
        self.say(self.done, self.total)


SCHEME = "Corral-HMAC-SHA256"
MOST_NONCES = 1 << 20  # of one courier's life; each stands for a file or a pack of files


def proof(token: str, nonce: str, method: str, path: str, span: str, body: bytes) -> str:
    """The signature; every field with its length before it, so that no two requests read the same."""
    fields = [b"corral courier 1", nonce.encode(), method.encode(), path.encode(), span.encode(),
              hashlib.sha256(body).digest()]  # fmt: skip
    message = b"".join(struct.pack("!I", len(field)) + field for field in fields)
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


def authorization(token: str, method: str, path: str, span: str = "", body: bytes = b"") -> str:
    """The header of a request; `span` is its `Range`."""
    nonce = os.urandom(16).hex()
    return f"{SCHEME} {nonce}:{proof(token, nonce, method, path, span, body)}"


class SignatureVerifier:
    """Judges signatures, each once."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.seen: Set[str] = set()
        self.lock = threading.Lock()

    def admits(self, header: str, method: str, path: str, span: str, body: bytes) -> bool:
        found = re.fullmatch(SCHEME + " ([0-9a-f]{32}):([0-9a-f]{64})", header)
        if not found:
            return False
        nonce, given = found.groups()
        if not hmac.compare_digest(given, proof(self.token, nonce, method, path, span, body)):
            return False
        with self.lock:
            if nonce in self.seen or len(self.seen) >= MOST_NONCES:
                return False
            self.seen.add(nonce)
        return True

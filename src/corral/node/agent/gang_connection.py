"""One connection between two agents of a gang: a greeting in which both prove the token, then signed lines.

Whoever can reach the port may say anything to it, so before the proof there is a limit on time, on bytes and on how
many may be there at once. The proofs are HMACs over fields with their lengths, both random numbers among them; they
also make the key of this one connection, with which every later line is signed together with its place in the
conversation. So nobody in between can say something in another's name, leave a line out, or say one again. What is
said is not secret. What it means is checked by `read_standing` and `read_order`: an agent may be broken, too.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.

Whether this node's own cable is the one that is cut: who loses all others has probably lost itself.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import socket
import struct
import threading
import time
from typing import Any, Dict, List, Optional, Union

from ..states import Reason

Json = Dict[str, Any]
GREETING_S = 5.0
GREETING_BYTES = 1024
LINE_BYTES = 64 << 10
MOST_STRANGERS = 32
LONGEST_TEXT = 2000
RESERVED = ("t", "kind", "rank", "elapsed_s", "state", "reason", "text")  # an event's own fields
COUNTS = ("done", "total", "percent")


def proof(key: bytes, *fields: Union[str, int, bytes]) -> bytes:
    """An HMAC over fields, each with its length before it: no two lists of fields read the same."""
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in ("corral gang 1", *fields)]
    message = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return hmac.new(key, message, hashlib.sha256).digest()


class Strangers:
    """Connections that have not proved anything yet; when there are too many, the oldest goes."""

    def __init__(self, most: int = MOST_STRANGERS) -> None:
        self._most, self._lock = most, threading.Lock()
        self._waiting: List[socket.socket] = []

    def admit(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.append(connection)
            if len(self._waiting) > self._most:
                with contextlib.suppress(OSError):
                    self._waiting.pop(0).shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def known(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._waiting:
                self._waiting.remove(connection)


class Line:
    """A connection that carries one JSON object per line, with a limit on how long a line may be and take."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket, self._timeout_s = connection, timeout_s
        self._socket.settimeout(timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._key, self._role, self._sent, self._received = b"", "", 0, 0

    # the greeting

    def greet_member(self, token: bytes) -> int:
        """As the head: the rank of whoever called, once it has proved that it is one."""
        until = time.monotonic() + min(GREETING_S, self._timeout_s)
        mine = os.urandom(16).hex()
        self._say({"nonce": mine})
        hello = self._hear(until)
        rank, theirs = hello.get("rank"), hello.get("nonce")
        if type(rank) is not int or not isinstance(theirs, str):
            raise ValueError("a stranger")
        self._check(hello, proof(token, "member", rank, mine, theirs))
        self._say({"proof": proof(token, "head", rank, mine, theirs).hex()})
        self._key, self._role = proof(token, "session", rank, mine, theirs), "head"
        return rank

    def greet_head(self, token: bytes, rank: int) -> bool:
        """As a member: whether whoever answers is the head."""
        until = time.monotonic() + min(GREETING_S, self._timeout_s)
        theirs, mine = self._hear(until).get("nonce"), os.urandom(16).hex()
        if not isinstance(theirs, str):
            return False
        self._say({"rank": rank, "nonce": mine, "proof": proof(token, "member", rank, theirs, mine).hex()})
        try:
            self._check(self._hear(until), proof(token, "head", rank, theirs, mine))
        except ValueError:
            return False
        self._key, self._role = proof(token, "session", rank, theirs, mine), "member"
        return True

    def _check(self, said: Json, wanted: bytes) -> None:
        if not hmac.compare_digest(str(said.get("proof")).encode("utf-8", "replace"), wanted.hex().encode()):
            raise ValueError("a stranger")

    def _say(self, body: Json) -> None:
        self._socket.sendall(json.dumps(body).encode() + b"\n")

    def _hear(self, until: float) -> Json:
        return _object(self._line(GREETING_BYTES, until))

    # afterwards

    def send(self, body: Json) -> None:
        text = json.dumps(body).encode()
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(proof(self._key, self._role, self._sent, text).hex().encode() + b" " + text + b"\n")
        self._sent += 1

    def receive(self) -> Json:
        """The next line, which only the other side can have written, and only as this one in the row."""
        signature, _, text = self._line(LINE_BYTES, time.monotonic() + self._timeout_s).partition(b" ")
        other = "member" if self._role == "head" else "head"
        if not hmac.compare_digest(signature, proof(self._key, other, self._received, text).hex().encode()):
            raise ValueError("a line that the other side did not write")
        self._received += 1
        return _object(text)

    def _line(self, most: int, until: float) -> bytes:
        while b"\n" not in self._rest:
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            data = self._socket.recv(4096)
            if not data or len(self._rest) > most:
                raise OSError("the connection was closed")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        if len(line) > most:
            raise OSError("a line that is too long")
        return line

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _object(text: bytes) -> Json:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


# ------------------------------------------------------------------------------------------------- what was said
def read_standing(said: Json) -> Json:
    """How a member stands: the fields that the head reads, each of its type."""
    found: Json = {name: _text(said.get(name)) for name in ("state", "phase")}
    found["running"] = said.get("running") is True
    found.update((name, _seconds(said.get(name), 1e9)) for name in ("quiet_s", "still_s"))
    found.update((name, said[name]) for name in COUNTS if _is_count(said.get(name)))
    found["ended"] = _ended(said["ended"]) if isinstance(said.get("ended"), dict) else None
    return found


def read_order(said: Json) -> Json:
    """What the head orders."""
    head = said.get("head")
    found: Json = {"epoch": said["epoch"] if _is_count(said.get("epoch")) else 0, "run": said.get("run") is True}
    found["end"] = None if said.get("end") is None else _reason(said["end"])
    found["text"] = _text(said.get("text"))
    found["head"] = {"state": _text(head.get("state"))} if isinstance(head, dict) else {}
    return found


def _ended(said: Json) -> Json:
    details = said.get("details")
    kept = details.items() if isinstance(details, dict) else ()
    return {
        "epoch": said["epoch"] if _is_count(said.get("epoch")) else 0,
        "reason": _reason(said.get("reason")),
        "text": _text(said.get("text")),
        "ago_s": _seconds(said.get("ago_s"), 0.0),
        "details": {
            name: _text(value) if isinstance(value, str) else value
            for name, value in kept
            if name not in RESERVED and (isinstance(value, (str, bool)) or value is None or _is_count(value))
        },
    }


def _reason(value: Any) -> str:
    known = {reason.value for reason in Reason}
    return value if isinstance(value, str) and value in known else Reason.ENGINE_EXITED.value


def _text(value: Any) -> str:
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""


def _is_count(value: Optional[Any]) -> bool:
    return type(value) is int and -(1 << 60) < value < 1 << 60


def _seconds(value: Any, otherwise: float) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return min(1e9, max(0.0, float(value))) if good else otherwise

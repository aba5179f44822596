"""One connection between two agents of a gang: a handshake in which both prove the token, then signed messages.

Anybody who can reach the port may send anything to it. So before the proof there is a limit on time, on bytes and on
the number of connections. The proofs are HMACs over both random numbers; they also give the key of this one
connection, which signs every later message together with its number. So nobody in between can forge a message, leave
one out, or send one again. Messages are not secret. `read_status` and `read_order` check their content, because an
agent may be broken, too.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import socket
import time
from typing import Any, Dict, Optional, Union

from ..authentication import sign
from ..states import Reason

Json = Dict[str, Any]
HANDSHAKE_S = 5.0
HANDSHAKE_BYTES = 1024
MESSAGE_BYTES = 64 << 10
MOST_UNVERIFIED = 32
LONGEST_TEXT = 2000
RESERVED = ("t", "kind", "rank", "elapsed_s", "state", "reason", "text")  # an event's own fields
COUNTS = ("done", "total", "percent")


def proof(key: bytes, *fields: Union[str, int, bytes]) -> bytes:
    return sign(key, "corral gang 1", *fields)


class GangConnection:
    """Carries one JSON object per line, with a limit on the length of a line and on the time it may take."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket, self._timeout_s = connection, timeout_s
        self._socket.settimeout(timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""
        self._key, self._role, self._sent, self._received = b"", "", 0, 0

    # ------------------------------------------------------------------------------------------------- the handshake
    def accept_member(self, token: bytes) -> int:
        """As the head: the rank of the caller, once it has proved the token."""
        until = time.monotonic() + min(HANDSHAKE_S, self._timeout_s)
        mine = os.urandom(16).hex()
        self._send_unsigned({"nonce": mine})
        hello = self._receive_unsigned(until)
        rank, theirs = hello.get("rank"), hello.get("nonce")
        if type(rank) is not int or not isinstance(theirs, str):
            raise ValueError("no member of this gang")
        self._verify(hello, proof(token, "member", rank, mine, theirs))
        self._send_unsigned({"proof": proof(token, "head", rank, mine, theirs).hex()})
        self._key, self._role = proof(token, "session", rank, mine, theirs), "head"
        return rank

    def join_head(self, token: bytes, rank: int) -> bool:
        """As a member: whether the other end is the head."""
        until = time.monotonic() + min(HANDSHAKE_S, self._timeout_s)
        theirs, mine = self._receive_unsigned(until).get("nonce"), os.urandom(16).hex()
        if not isinstance(theirs, str):
            return False
        self._send_unsigned({"rank": rank, "nonce": mine, "proof": proof(token, "member", rank, theirs, mine).hex()})
        try:
            self._verify(self._receive_unsigned(until), proof(token, "head", rank, theirs, mine))
        except ValueError:
            return False
        self._key, self._role = proof(token, "session", rank, theirs, mine), "member"
        return True

    def _verify(self, message: Json, expected: bytes) -> None:
        if not hmac.compare_digest(str(message.get("proof")).encode("utf-8", "replace"), expected.hex().encode()):
            raise ValueError("no member of this gang")

    def _send_unsigned(self, message: Json) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive_unsigned(self, until: float) -> Json:
        return _object(self._line(HANDSHAKE_BYTES, until))

    # --------------------------------------------------------------------------------------------- after the
    # handshake
    def send(self, message: Json) -> None:
        text = json.dumps(message).encode()
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(proof(self._key, self._role, self._sent, text).hex().encode() + b" " + text + b"\n")
        self._sent += 1

    def receive(self) -> Json:
        """The next message, which only the other side can have written, and only as this one in the order."""
        signature, _, text = self._line(MESSAGE_BYTES, time.monotonic() + self._timeout_s).partition(b" ")
        other = "member" if self._role == "head" else "head"
        if not hmac.compare_digest(signature, proof(self._key, other, self._received, text).hex().encode()):
            raise ValueError("a line that the other side did not write")
        self._received += 1
        return _object(text)

    def _line(self, most: int, until: float) -> bytes:
        while b"\n" not in self._unread:
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            data = self._socket.recv(4096)
            if not data or len(self._unread) > most:
                raise OSError("the connection was closed")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        if len(line) > most:
            raise OSError("a line that is too long")
        return line

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _object(text: bytes) -> Json:
    message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


# ------------------------------------------------------------------------------------------------------ the messages
def read_status(message: Json) -> Json:
    """A member's status: the fields that the head reads, each of its type."""
    status: Json = {name: _text(message.get(name)) for name in ("state", "phase")}
    status["running"] = message.get("running") is True
    status.update((name, _seconds(message.get(name), 1e9)) for name in ("quiet_s", "still_s"))
    status.update((name, message[name]) for name in COUNTS if _is_count(message.get(name)))
    status["ended"] = _read_end(message["ended"]) if isinstance(message.get("ended"), dict) else None
    return status


def read_order(message: Json) -> Json:
    """An order of the head, likewise."""
    head = message.get("head")
    return {
        "epoch": _count(message.get("epoch")),
        "run": message.get("run") is True,
        "end": None if message.get("end") is None else _reason(message["end"]),
        "text": _text(message.get("text")),
        "head": {"state": _text(head.get("state"))} if isinstance(head, dict) else {},
    }


def _read_end(message: Json) -> Json:
    details = message.get("details")
    items = details.items() if isinstance(details, dict) else ()
    return {
        "epoch": _count(message.get("epoch")),
        "reason": _reason(message.get("reason")),
        "text": _text(message.get("text")),
        "ago_s": _seconds(message.get("ago_s"), 0.0),
        "details": {
            name: _text(value) if isinstance(value, str) else value
            for name, value in items
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


def _count(value: Any) -> int:
    return int(value) if _is_count(value) else 0


def _seconds(value: Any, default: float) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return min(1e9, max(0.0, float(value))) if good else default

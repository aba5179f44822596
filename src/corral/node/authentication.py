"""What agents and couriers share to know each other by a token that is never sent.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import socket
import struct
import threading
import time
from typing import Dict, Union


def sign(key: bytes, *fields: Union[str, int, bytes]) -> bytes:
    """An HMAC over fields, each preceded by its length, so that no two lists of fields have the same signature."""
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    message = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return hmac.new(key, message, hashlib.sha256).digest()


class UnverifiedConnections:
    """Connections whose other end has proved nothing yet: at most `most` of them, each for `limit_s` at most.

    A connection is cut off by a shutdown; the thread that serves it then closes it.
    """

    def __init__(self, most: int, limit_s: float = math.inf) -> None:
        self._most, self._limit_s = most, limit_s
        self._lock = threading.Lock()
        self._since: Dict[socket.socket, float] = {}  # the oldest first

    def add(self, connection: socket.socket) -> None:
        """One more; the oldest is cut off when there are too many."""
        with self._lock:
            self._since[connection] = time.monotonic()
            if len(self._since) > self._most:
                self._cut_off(next(iter(self._since)))

    def remove(self, connection: socket.socket) -> None:
        """Verified, or closed."""
        with self._lock:
            self._since.pop(connection, None)

    def expire(self) -> None:
        """Cut off those that have had their time."""
        with self._lock:
            before = time.monotonic() - self._limit_s
            for connection in [one for one, since in self._since.items() if since < before]:
                self._cut_off(connection)

    def _cut_off(self, connection: socket.socket) -> None:
        del self._since[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

"""A gateway hands its listening socket to the process that takes its place: no connection is refused or reset.

The running gateway listens on a Unix socket beside its address file. Its successor connects and gets the listening
socket with the names of what is served. It reads its fleets and keys, accepts clients, and says so; only then the
first one stops accepting, answers those that are connected to it, and ends. Closing its copy of the socket leaves the
connections that wait on it to the other. A successor that ends before it says so changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Sequence
from pathlib import Path

from corral.base.errors import ConflictError
from corral.base.untrusted import parse_json
from corral.node.row_socket import at_short_name

ANSWER_S = 10.0
MOST_BYTES = 1 << 16
READY = b"1"


def handover_listener(path: Path) -> socket.socket:
    """The Unix socket at which a successor asks; for this user only."""
    path.unlink(missing_ok=True)  # of a process that was killed
    made = socket.socket(socket.AF_UNIX)
    at_short_name(str(path.parent), path.name, made.bind)
    path.chmod(0o600)
    made.listen(4)
    made.setblocking(False)
    return made


async def offer(asked: socket.socket, listener: int, names: Sequence[str]) -> None:
    """Give the descriptor of the listening socket to whoever asks; returns once another process accepts clients."""
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(asked)
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            socket.send_fds(connection, [json.dumps(list(names)).encode()], [listener])
            if await loop.sock_recv(connection, 1) == READY:
                return


class Takeover:
    """The socket of a running gateway, as its successor gets it."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(ANSWER_S)
        try:
            at_short_name(str(path.parent), path.name, self._connection.connect)
            data, descriptors, _, _ = socket.recv_fds(self._connection, MOST_BYTES, 1)
            self.listener = socket.socket(fileno=descriptors[0])
        except (OSError, IndexError) as error:
            raise ConflictError(
                f"the running gateway does not hand over its address: {error}.", "End it, then start this one."
            ) from error
        served = parse_json(data, "the answer of the running gateway")
        if set(served) != set(names):
            text = " ".join(map(str, served))
            raise ConflictError(
                f"the running gateway serves {text}, not {' '.join(names)}.",
                f"Name all that it serves: corral gateway --take-over {text}",
            )

    def complete(self) -> None:
        """This process accepts clients: the other one need not."""
        self._connection.sendall(READY)
        self._connection.close()

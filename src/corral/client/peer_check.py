"""Who is at the other end of a connection within this machine, asked before a key is sent through it.

Any user of the machine can take the port of a server that is away; `base/owners.py` says which users are trusted.
Connections that open at the same time share one reading of the kernel's list, which can be long.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from corral.base.owners import TRUST_USERS, trusted_users, user_name
from corral.client.errors import StrangerError
from corral.node.sockets import is_local, peer_owners, tcp_sockets

Address = tuple[str, int]
Question = tuple[Address, Address, "asyncio.Future[set[int]]"]


class PeerCheck:
    """Checks the connections to one server, in one event loop."""

    def __init__(self, where: str) -> None:
        self._where, self._trusted = where, trusted_users()
        self._questions: list[Question] = []
        self._reading: asyncio.Task[None] | None = None

    async def check(self, transport: asyncio.BaseTransport) -> None:
        """Refuse a connection that another user accepted, or that was lost; nothing was sent through it."""
        await self._refuse_strangers(transport)
        if transport.is_closing():
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    async def _refuse_strangers(self, transport: asyncio.BaseTransport) -> None:
        connection: socket.socket | None = transport.get_extra_info("socket")
        try:
            if connection is None or not is_local(connection):
                return
            ours, theirs = connection.getsockname()[:2], connection.getpeername()[:2]
        except OSError:  # it is closed already: nothing will be sent
            return
        answer: asyncio.Future[set[int]] = asyncio.get_running_loop().create_future()
        self._questions.append((ours, theirs, answer))
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read_table())
        strangers = await answer - self._trusted
        if strangers:
            raise _refusal(self._where, min(strangers))

    async def _read_table(self) -> None:
        batch: list[Question] = []
        try:
            while self._questions:
                batch, self._questions = self._questions, []
                table = await asyncio.to_thread(tcp_sockets, batch[0][1][1])  # all are of one port
                for ours, theirs, answer in batch:
                    if not answer.done():
                        answer.set_result(peer_owners(ours, theirs, table))
        except BaseException:
            for _, _, answer in (*batch, *self._questions):
                answer.cancel()
            raise
        finally:
            self._reading = None


def _refusal(where: str, uid: int) -> StrangerError:
    user = user_name(uid)
    return StrangerError(
        f"the port of {where} is held by another user of this machine ({user}); no key was sent.",
        f"Is the server running? If {user} runs it for you, set {TRUST_USERS}={uid}.",
    )

"""Who is at the other end of a connection within this machine, asked before a key is sent through it.

The port of a server that is away can be taken by any user of the machine. Trusted are this user, root, and the users
named in `CORRAL_TRUST_USERS` (names or numbers, with commas between): for a server that somebody else runs.
Connections that open at the same time are judged by one look, because the kernel's list can be long.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pwd
import socket

from corral.client.errors import StrangerError
from corral.node.tcp_table import owners_of, stays_here, tcp_sockets

TRUST_USERS = "CORRAL_TRUST_USERS"
Address = tuple[str, int]
Question = tuple[Address, Address, "asyncio.Future[set[int]]"]


class PeerCheck:
    """Judges the connections to one server, in one event loop."""

    def __init__(self, where: str) -> None:
        self._where, self._trusted = where, _trusted()
        self._questions: list[Question] = []
        self._looking: asyncio.Task[None] | None = None

    async def check(self, transport: asyncio.BaseTransport) -> None:
        """Refuse a connection that a stranger took, or that was lost meanwhile: nothing was sent through it."""
        await self._refuse_strangers(transport)
        if transport.is_closing():
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    async def _refuse_strangers(self, transport: asyncio.BaseTransport) -> None:
        connection: socket.socket | None = transport.get_extra_info("socket")
        try:
            if connection is None or not stays_here(connection):
                return
            ours, theirs = connection.getsockname()[:2], connection.getpeername()[:2]
        except OSError:  # it is closed already: nothing will be sent
            return
        answer: asyncio.Future[set[int]] = asyncio.get_running_loop().create_future()
        self._questions.append((ours, theirs, answer))
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        strangers = await answer - self._trusted
        if strangers:
            raise _refusal(self._where, min(strangers))

    async def _look(self) -> None:
        asked: list[Question] = []
        try:
            while self._questions:
                asked, self._questions = self._questions, []
                found = await asyncio.to_thread(tcp_sockets, asked[0][1][1])  # all are of one port
                for ours, theirs, answer in asked:
                    if not answer.done():
                        answer.set_result(owners_of(ours, theirs, found))
        except BaseException:
            for _, _, answer in (*asked, *self._questions):
                answer.cancel()
            raise
        finally:
            self._looking = None


def _refusal(where: str, uid: int) -> StrangerError:
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"number {uid}"
    return StrangerError(
        f"the port of {where} is held by another user of this machine ({user}); no key was sent.",
        f"Is the server running? If {user} runs it for you, set {TRUST_USERS}={uid}.",
    )


def _trusted() -> set[int]:
    found = {0, os.getuid(), os.geteuid()}
    for word in os.environ.get(TRUST_USERS, "").split(","):
        name = word.strip()
        if name.isascii() and name.isdigit():
            found.add(int(name))
        elif name:
            try:
                found.add(pwd.getpwnam(name).pw_uid)
            except KeyError:
                continue  # nobody of that name can hold a port
    return found

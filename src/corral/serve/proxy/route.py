"""Where one request may go, and who is told of its answer: the seam between the relay and what stands behind it.

A chain of successors is one route for every request (`Members`); a gateway makes one for each, from its key, model
and prompt.
"""

from __future__ import annotations

from typing import Protocol

from corral.client.http1 import Headers
from corral.serve.proxy.member import Member, Waiter
from corral.serve.proxy.request import Request


class MemberChooser(Protocol):
    """Chooses members for a request. Times: `choose` and `other` take the loop's, `moves` the monotonic clock."""

    def choose(self, now_s: float) -> Member | None:
        """Who takes the request now; it counts as that member's until `leaves`."""

    def other(self, member: Member, now_s: float) -> bool:
        """Whether somebody else is ready."""

    def parts(self, request: Request, member: Member) -> list[bytes | bytearray]:
        """What is sent to a member."""

    def wait(self, waiter: Waiter) -> None:
        """Wake this request when something changes."""

    def forget(self, waiter: Waiter) -> None: ...

    def crowded(self) -> bool:
        """Whether members are ready and only full: such a wait ends by itself."""

    def standing(self) -> str:
        """All members in words."""

    def all_failed(self) -> str:
        """What became of each member when all have failed; empty while one is left, or none is known yet."""

    def answers(self, member: Member, status: int, headers: Headers) -> bytes:
        """The head of an answer goes to the client; header lines to add."""

    def moves(self, now_s: float, data: list[bytes]) -> None:
        """Bytes of the answer's body arrived."""

    def leaves(self, member: Member) -> None:
        """The request is no longer the member's: answered, or on its way to another."""

    def ends(self, status: int, whole: bool) -> None:
        """The request is over; `whole`: a whole answer was passed on."""

    def last_words(self, message: str) -> bytes:
        """What a client reads at the end of an answer that breaks off; empty where nothing can be said."""

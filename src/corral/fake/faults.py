"""Faults on demand: what goes wrong, and for which requests.

A fault is written `KIND[:key=value,…]`. Which requests it hits is decided from the server's seed, the request's
content and the request's number, never from a clock or a random source, so a run can be repeated.

    status   answer with an HTTP error          code=500, retry_after=SECONDS, message=TEXT
    reset    TCP reset                          when=before|mid
    cut      end of file before the answer ends clean=1 closes the chunked body properly, but without [DONE]
    error    error chunk inside a 200 stream    (HTTP 500 when the answer is not streamed)
    abort    finish_reason "abort" with 200
    hang     no bytes                           when=before|mid
    slow     everything takes longer            factor=10
    split    the bytes arrive in tiny pieces    bytes=7
    garbage  something that is not JSON, with 200
    zero     a finished answer without a token
    length   a wrong number of tokens           factor=0.5
    die      the process ends                   code=0
    flap     refuses connections for a while    down=SECONDS, period=SECONDS
    health   /health answers 503

Which requests (completions and chat only): `p=0.1` (by content; a retry of the same content is drawn anew),
`every=N`, `after=N` (all later than the Nth), `first=N`, `match=TEXT` (in the prompt), `times=N` (N in all),
`per=N` (N for the same content, so that retries then succeed). Conditions are combined with and. `at=N` is the
token before which a mid-answer fault strikes (default: half of the answer).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from corral.base.errors import UsageError
from corral.base.record import nearest

KINDS = (
    "status", "reset", "cut", "error", "abort", "hang", "slow", "split",
    "garbage", "zero", "length", "die", "flap", "health",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and the requests it hits."""

    kind: str
    p: float = 1.0
    every: int = 0
    after: int = 0
    first: int = 0
    match: str = ""
    times: int = 0
    per: int = 0
    at: int = -1
    code: int = -1
    retry_after: float = 0.0
    message: str = "fault on demand"
    when: str = "before"
    clean: int = 0
    factor: float = 0.0
    bytes: int = 7
    down: float = 1.0
    period: float = 5.0

    def spec(self) -> str:
        """The fault as it would be written on the command line."""
        defaults = {f.name: f.default for f in fields(self)}
        given = [f"{k}={getattr(self, k)}" for k, v in defaults.items() if k != "kind" and getattr(self, k) != v]
        return self.kind + (":" + ",".join(given) if given else "")


_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


def parse_fault(text: str) -> Fault:
    """Read `KIND[:key=value,…]`, naming what is valid when it is not."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        guess = nearest(kind, KINDS, 1)
        hint = f"Did you mean {guess[0]!r}? " if guess else ""
        raise UsageError(f"there is no fault {kind!r}.", f"{hint}Known faults: {', '.join(KINDS)}.")
    readers = {f.name: _READERS[str(f.type)] for f in fields(Fault) if f.name != "kind"}
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        name, _, value = pair.partition("=")
        if name not in readers:
            raise UsageError(f"the fault {kind!r} has no setting {name!r}.", f"Known: {', '.join(readers)}.")
        try:
            values[name] = readers[name](value)
        except ValueError:
            raise UsageError(f"the fault setting {pair!r} cannot be read.", "Give a number.") from None
    if values.get("when", "before") not in ("before", "mid"):
        raise UsageError(f"the fault setting when={values['when']} is unknown.", "Use when=before or when=mid.")
    return Fault(kind, **values)


@dataclass(slots=True)
class FaultBook:
    """The faults in force, and how often each struck."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    fired: list[int] = field(default_factory=list)
    _by_content: dict[tuple[int, int], int] = field(default_factory=dict)

    def set(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        self.fired = [0] * len(self.faults)
        self._by_content.clear()

    def of_kind(self, kind: str) -> Fault | None:
        """The first fault of a server-wide kind."""
        return next((f for f in self.faults if f.kind == kind), None)

    def choose(self, ordinal: int, content: int, prompt: bytes) -> Fault | None:
        """The fault for the `ordinal`-th request (from 1), if any."""
        for i, fault in enumerate(self.faults):
            if fault.kind in ("flap", "health") or not self._hits(i, fault, ordinal, content, prompt):
                continue
            self.fired[i] += 1
            if fault.p < 1 or fault.per:
                self._by_content[i, content] = self._by_content.get((i, content), 0) + 1
            return fault
        return None

    def _hits(self, i: int, fault: Fault, ordinal: int, content: int, prompt: bytes) -> bool:
        if (fault.every and ordinal % fault.every) or ordinal <= fault.after:
            return False
        if (fault.first and ordinal > fault.first) or (fault.times and self.fired[i] >= fault.times):
            return False
        if fault.match and fault.match.encode() not in prompt:
            return False
        struck = self._by_content.get((i, content), 0)
        if fault.per and struck >= fault.per:
            return False
        return fault.p >= 1 or zlib.crc32(b"%d,%d,%d,%d" % (self.seed, i, content, struck)) < fault.p * 2**32

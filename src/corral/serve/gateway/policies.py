"""Which member gets a request: each policy chooses among the members that have room for it. Pure.

`prefix`: the member with the highest of (twice the prompt tokens that it need not compute) minus (work that it has
outstanding), both in tokens. A beginning that nearly every request has counts for no member, so that a common system
prompt does not draw all requests to the member that saw it first. A member that got more than its share of the last
requests is gradually avoided, as far as the members have a request each on average: a hot prefix then spreads before
its holder is full, and conversations on an idle fleet stay where they are. Among equals, the member that has computed
least so far.

Requests for an adapter go to few members, always the same: each has to load it, and has room for few. A hash of both
names orders the members for each adapter; a further one is taken where those before it have much more work than the
mean. Among those that are left the policy chooses.

`newest`: the last of the members, which are in order of age: `corral proxy` moves on to a successor with it.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from corral.base.errors import UsageError
from corral.base.record import nearest
from corral.serve.gateway.prompt import Holdings, RoutedPrompt, SharedBeginnings


class RoutableMember(Protocol):
    """A member, as a policy sees it."""

    work_tokens: float  # outstanding, relative to its speed
    recent: float  # requests of late, on a scale of the policy's own
    holdings: Holdings


M = TypeVar("M", bound=RoutableMember)


class Policy(Protocol):
    """Chooses among members that can all take the request; there is at least one."""

    def choose(self, members: Sequence[M], prompt: RoutedPrompt) -> M: ...


OUTPUT_WEIGHT = 4.0  # a token of an answer takes a step of its own; those of a prompt are computed together
SAVED = 2.0  # what a saved token weighs beside one of work: this request waits less, and so do those behind it
EVEN = 1.05  # of its share of the last requests: chance alone makes such differences
STEEPNESS = 12.0  # prompts that a share of twice the mean weighs
MEMORY = 64  # requests of each member that count as the last ones
FEW = 16  # requests of each member, before which shares are chance
LARGEST = 1e200
MOST_RECENT = 1e5  # requests: more than `MEMORY` of each member of the largest fleet


BUSIER = 1.5  # times the mean work, beyond which another member is taken for an adapter


class NamedMember(RoutableMember, Protocol):
    """The same, told apart by its name."""

    name: str


N = TypeVar("N", bound=NamedMember)


def few_for(adapter: str, members: Sequence[N], prompt: RoutedPrompt) -> Sequence[N]:
    """The members that an adapter's requests go to now, of those that have room."""
    order = sorted(members, key=lambda one: _place(adapter, one.name))
    most = BUSIER * sum(one.work_tokens for one in members) / len(members) + prompt.tokens + prompt.output_tokens
    busy = next((at for at, one in enumerate(order) if one.work_tokens <= most), 0)
    return order[: busy + 1]


@functools.lru_cache(maxsize=1 << 16)
def _place(adapter: str, member: str) -> bytes:
    return hashlib.blake2b(f"{adapter}/{member}".encode(), digest_size=8).digest()


class PrefixPolicy:
    """Saved prefill minus outstanding work."""

    def __init__(self) -> None:
        self.shared = SharedBeginnings()
        self._chosen = 0
        self._weight = 1.0  # of the next request: it grows, so that the past fades without being touched
        self._divided_by = 1.0  # when it last began anew

    def choose(self, members: Sequence[M], prompt: RoutedPrompt) -> M:
        best = self._best(members, prompt)
        self._chosen += 1
        self._weight *= 1 + 1 / (MEMORY * len(members))
        best.recent += self._weight
        if self._weight > LARGEST:
            self._divided_by, self._weight = self._weight, 1.0
        return best

    def _best(self, members: Sequence[M], prompt: RoutedPrompt) -> M:
        blocks = prompt.blocks
        count = len(members)
        shared = self.shared.note(blocks, count)
        common = prompt.tokens_until(shared)
        recent = work = 0.0
        most = MOST_RECENT * self._weight
        for member in members:
            if member.recent > most:  # from before the weight began anew, whoever could take requests then
                member.recent /= self._divided_by
            recent += member.recent
            work += member.work_tokens
        share = EVEN * recent / count
        known = share and work and self._chosen > FEW * count
        busy = min(1.0, work / count / (OUTPUT_WEIGHT * prompt.output_tokens + 1)) if known else 0.0
        weight = STEEPNESS * prompt.tokens * busy / share if known else 0.0
        best, highest = members[0], float("-inf")
        for member in members:
            depth = member.holdings.depth(blocks) if blocks else 0
            saved = prompt.tokens_until(depth) - common if depth > shared else 0.0
            score = SAVED * saved - member.work_tokens
            if weight and member.recent > share:
                score -= weight * (member.recent - share)
            if score > highest or (score == highest and member.holdings.clock < best.holdings.clock):
                best, highest = member, score
        return best


class LeastWorkPolicy:
    """The least work outstanding, in tokens."""

    def choose(self, members: Sequence[M], prompt: RoutedPrompt) -> M:
        return min(members, key=lambda one: (one.work_tokens, one.holdings.clock))


class RoundRobinPolicy:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, members: Sequence[M], prompt: RoutedPrompt) -> M:
        self._turn += 1
        return members[self._turn % len(members)]


class RandomPolicy:
    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 - balances load

    def choose(self, members: Sequence[M], prompt: RoutedPrompt) -> M:
        return self._random.choice(members)


class NewestPolicy:
    """The newest member, as long as it accepts requests."""

    def choose(self, members: Sequence[M], prompt: RoutedPrompt) -> M:
        return members[-1]


NEWEST = "newest"
POLICIES: dict[str, Callable[[], Policy]] = {
    "prefix": PrefixPolicy,
    "least-work": LeastWorkPolicy,
    "round-robin": RoundRobinPolicy,
    "random": RandomPolicy,
}  # those that people choose with --route


def make_policy(name: str) -> Policy:
    if name == NEWEST:
        return NewestPolicy()
    if name not in POLICIES:
        guess = nearest(name, list(POLICIES), 1)
        hint = f"Did you mean {guess[0]!r}?" if guess else f"Known: {', '.join(POLICIES)}."
        raise UsageError(f"there is no routing policy {name!r}.", hint)
    return POLICIES[name]()

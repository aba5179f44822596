"""The keys that a running gateway accepts: their limits, and what each has used.

`used_by_keys` asks the gateways of this home's fleets for the same.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from corral.base.errors import CorralError
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from corral.client.http1 import Headers
from corral.serve.fleet.record import all_fleets, held_gateways
from corral.serve.gateway.keys import digest_of


class Bucket:
    """A token bucket: an amount per minute, and no more than a minute's worth at once."""

    __slots__ = ("_level", "_per_s", "_stamp_s", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._per_s = per_minute / 60
        self._level, self._stamp_s = float(per_minute), now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until that much may be spent; what is more than a minute's worth waits for a full bucket."""
        self._level = min(float(self.per_minute), self._level + (now_s - self._stamp_s) * self._per_s)
        self._stamp_s = now_s
        return max(0.0, (min(amount, self.per_minute) - self._level) / self._per_s)

    def spend(self, amount: float) -> None:
        """May leave a debt, when an answer was longer than expected; a negative amount gives back."""
        self._level -= amount


@dataclass(frozen=True)
class KeyGrant:
    """A key that is valid now, and what it is good for."""

    name: str
    digest: bytes
    models: frozenset[str] | None = None  # served names, and for their own models fleets and deployments; None: all
    rpm: int | None = None
    tpm: int | None = None
    source: str = ""  # the fleet or deployment whose own key it is: good for all that it serves, and for nothing else


@dataclass(eq=False)
class KeyUser:
    """A key in use."""

    grant: KeyGrant
    requests_bucket: Bucket | None = None
    tokens_bucket: Bucket | None = None
    limited: int = 0  # requests refused by a limit
    served: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by model and member: see `count`

    @property
    def name(self) -> str:
        return self.grant.name

    @property
    def is_limited(self) -> bool:
        """Whether it is not good for every server."""
        return self.grant.models is not None or bool(self.grant.source)

    def may_use(self, model: str, source: str, own_model: str) -> bool:
        """Whether it is good for a model that a fleet or deployment serves beside, or as, its own."""
        models = self.grant.models
        if self.grant.source:
            return source == self.grant.source
        return models is None or model in models or (model == own_model and source in models)

    def may_use_name(self, model: str) -> bool:
        """Whether it is good for a model that no server has at this moment."""
        return self.grant.models is None or model in self.grant.models

    def wait_s(self, tokens: float, now_s: float) -> tuple[float, str]:
        """How long a request of that many tokens must wait for the key's limits, and for which of them."""
        for bucket, amount, name in (
            (self.requests_bucket, 1.0, "requests"),
            (self.tokens_bucket, tokens, "tokens"),
        ):
            if bucket and (wait := bucket.wait_s(amount, now_s)) > 0:
                return wait, f"{bucket.per_minute:,} {name} per minute"
        return 0.0, ""

    def spend(self, tokens: float) -> None:
        if self.requests_bucket:
            self.requests_bucket.spend(1)
        if self.tokens_bucket:
            self.tokens_bucket.spend(tokens)

    def correct(self, tokens: float) -> None:
        if self.tokens_bucket:
            self.tokens_bucket.spend(tokens)

    def count(self, model: str, member: str, prompt: float, output: float, whole: bool) -> None:
        """Requests answered and failed, tokens read and written."""
        found = self.served.setdefault((model, member), [0.0, 0.0, 0.0, 0.0])
        found[0 if whole else 1] += 1
        found[2] += prompt
        found[3] += output


class KeyTable:
    """The keys by their digests."""

    def __init__(self) -> None:
        self._users: dict[bytes, KeyUser] = {}

    def update(self, grants: Iterable[KeyGrant], now_s: float) -> None:
        """Replace the keys by those that are valid now; one whose limits did not change keeps its counts."""
        found: dict[bytes, KeyUser] = {}
        for grant in grants:
            user = self._users.get(grant.digest)
            if user is None:
                user = KeyUser(grant)
                user.requests_bucket, user.tokens_bucket = _buckets(grant, now_s)
            elif user.grant != grant:
                if (grant.rpm, grant.tpm) != (user.grant.rpm, user.grant.tpm):
                    user.requests_bucket, user.tokens_bucket = _buckets(grant, now_s)
                user.grant = grant
            found[grant.digest] = user
        self._users = found

    def find(self, headers: Headers) -> KeyUser | None:
        """The user of a request's key. Hashes are compared, so that timing reveals nothing about a key."""
        digest = digest_of(offered_key(headers))
        user = self._users.get(digest)
        return user if user is not None and hmac.compare_digest(user.grant.digest, digest) else None

    def knows(self, user: KeyUser) -> bool:
        """Whether its key is still valid."""
        return self._users.get(user.grant.digest) is user

    def all(self) -> list[KeyUser]:
        return list(self._users.values())


def offered_key(headers: Headers) -> bytes:
    """A bearer token, or `x-api-key` as Anthropic's SDK sends it."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return b""


def _buckets(grant: KeyGrant, now_s: float) -> tuple[Bucket | None, Bucket | None]:
    return (
        Bucket(grant.rpm, now_s) if grant.rpm else None,
        Bucket(grant.tpm, now_s) if grant.tpm else None,
    )


STATUS_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class KeyUse:
    """What a key has used at all gateways together since they started."""

    answered: int = 0
    failed: int = 0
    limited: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def plus(self, other: dict[str, Any]) -> KeyUse:
        names = [one.name for one in fields(self)]
        return KeyUse(*(getattr(self, name) + int(other.get(name) or 0) for name in names))


def used_by_keys() -> dict[str, KeyUse]:
    """By the key's name; a gateway that does not answer is left out."""
    used: dict[str, KeyUse] = {}
    urls: set[str] = set()
    for folder in all_fleets():
        for address in held_gateways(folder).values():
            if address.url in urls:
                continue
            urls.add(address.url)
            with contextlib.suppress(RequestError, CorralError, OSError, ValueError, TypeError):
                page = Client(Endpoint(address.url, "", str(folder.key))).page_sync(
                    "/gateway/status", timeout_s=STATUS_TIMEOUT_S
                )
                for one in page.json()["keys"]:
                    used[one["name"]] = used.get(one["name"], KeyUse()).plus(one)
    return used

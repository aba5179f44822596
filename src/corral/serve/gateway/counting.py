"""What each key of a client has used, asked of the gateways that run on this machine's fleets."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from corral.base.errors import CorralError
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from corral.serve.fleet.record import all_fleets, held_gateways

ASK_S = 3.0


@dataclass(frozen=True)
class KeyUse:
    """Since the gateways started, of all of them together."""

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
    found: dict[str, KeyUse] = {}
    asked: set[str] = set()
    for folder in all_fleets():
        for address in held_gateways(folder).values():
            if address.url in asked:
                continue
            asked.add(address.url)
            with contextlib.suppress(RequestError, CorralError, OSError, ValueError, TypeError):
                page = Client(Endpoint(address.url, "", str(folder.key))).page_sync(
                    "/gateway/status", timeout_s=ASK_S
                )
                for one in page.json()["keys"]:
                    found[one["name"]] = found.get(one["name"], KeyUse()).plus(one)
    return found

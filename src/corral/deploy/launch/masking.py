"""A launch as it may be shown: values of variables that are named like secrets are left out.

What starts the engines has them; a dry run is for eyes, terminals and tickets.
"""

from __future__ import annotations

import re
from dataclasses import replace

from corral.deploy.launch.render import LaunchSpec

MASK = "****"
_WORDS = "API_?KEY|KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?"
_SECRET = re.compile(rf"(^|_)({_WORDS})($|_)", re.IGNORECASE)
_PLACE = re.compile(r"_(FILE|PATH|DIR|MODE|URL)$", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret, and not the place of one."""
    return bool(_SECRET.search(name)) and not _PLACE.search(name)


def masked(spec: LaunchSpec) -> LaunchSpec:
    """The same launch without the values of secrets, wherever they stand."""
    found = {value for rank in spec.ranks for name, value in rank.env.items() if is_secret_name(name) and value}
    ranks = tuple(
        replace(
            rank,
            env={name: MASK if is_secret_name(name) else _without(value, found) for name, value in rank.env.items()},
            argv=tuple(_without(word, found) for word in rank.argv),
        )
        for rank in spec.ranks
    )
    return replace(spec, ranks=ranks, script=_without(spec.script, found))


def _without(text: str, secrets: set[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text

"""Secrets are left out of what is shown: command lines, reports and dry runs are read by others too.

The name of a variable (`HF_TOKEN=…`) or of a flag (`--hf-token …`, `--hf-token=…`) tells them. A path or
an address (`CORRAL_KEY_FILE`) is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MASK = "****"
_SECRETS = "API_?KEY|KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?"
_SECRET = re.compile(rf"(^|_)({_SECRETS})($|_)", re.IGNORECASE)
_REFERENCE = re.compile(r"_(FILE|PATH|DIR|MODE|URL|IDS)$", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a variable or a flag of this name holds a secret, and not a path or an address."""
    name = name.lstrip("-").replace("-", "_")
    return bool(_SECRET.search(name)) and not _REFERENCE.search(name)


def masked_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """Arguments without the values of secrets; a flag may take several."""
    shown: list[str] = []
    secret = first = False  # whether words belong to a flag of a secret, and this is the first of them
    for word in argv:
        if secret and not word.startswith("--" if first else "-"):
            shown.append(MASK)
            first = False
            continue
        *names, _ = word.split("=")
        at = next((number for number, name in enumerate(names) if is_secret_name(name)), None)
        shown.append(word if at is None else "=".join([*names[: at + 1], MASK]))
        secret = first = word.startswith("-") and not names and is_secret_name(word)
    return tuple(shown)


def secrets_in(argv: Sequence[str]) -> set[str]:
    """The values that `masked_argv` leaves out."""
    pairs = zip(argv, masked_argv(argv), strict=True)
    return {word[len(shown) - len(MASK) :] for word, shown in pairs if word != shown} - {""}


def without(text: str, secrets: Iterable[str]) -> str:
    """The text without secrets, wherever they are in it."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text

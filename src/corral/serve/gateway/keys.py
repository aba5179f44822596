"""The file of clients' keys: each with its models and its limits. Only hashes are kept.

Every gateway of this home accepts them, beside the key of each fleet or deployment that it serves.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import ConflictError, NotFoundError, UsageError
from corral.base.files import make_private_dir
from corral.base.home import gateway_dir
from corral.base.lock import FileLock, exclusive_lock, wait_notice
from corral.base.record import load_json, nearest, save_record

LONGEST_NAME = 64


@dataclass(frozen=True)
class ClientKey:
    """One client's key, as kept on disk."""

    name: str
    digest: str  # SHA-256 of the key, in hex
    created_s: float
    rpm: int | None = None  # requests a minute
    tpm: int | None = None  # tokens a minute, prompts and answers
    models: tuple[str, ...] = ()  # served names, or names of fleets and deployments; none: all


@dataclass(frozen=True)
class _KeyFile:
    keys: tuple[ClientKey, ...] = ()


def keys_file() -> Path:
    return gateway_dir() / "keys.json"


def digest_of(key: bytes) -> bytes:
    """The hash of a key; keys are random and long, so one round is enough."""
    return hashlib.sha256(key).digest()


def read_keys() -> tuple[ClientKey, ...]:
    try:
        return load_json(_KeyFile, keys_file()).keys
    except FileNotFoundError:
        return ()


def add_key(name: str, rpm: int | None = None, tpm: int | None = None, models: tuple[str, ...] = ()) -> str:
    """Make a key; it is returned once, and stored only as a hash."""
    if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        raise UsageError(f"{name!r} cannot be the name of a key.", f"Use 1 to {LONGEST_NAME} printable characters.")
    key = secrets.token_urlsafe(32)
    with _lock():
        before = read_keys()
        if any(one.name == name for one in before):
            raise ConflictError(
                f"there is already a key called {name!r}.",
                f"Choose another name, or remove it first: corral gateway key remove {name}",
            )
        _write((*before, ClientKey(name, digest_of(key.encode()).hex(), time.time(), rpm, tpm, models)))
    return key


def remove_key(name: str) -> None:
    """Remove a key; gateways refuse it within seconds."""
    with _lock():
        before = read_keys()
        after = tuple(one for one in before if one.name != name)
        if after == before:
            known = [one.name for one in before]
            guesses = nearest(name, known) or known
            raise NotFoundError(
                f"there is no key called {name!r}.",
                f"Known: {', '.join(guesses)}."
                if guesses
                else "No keys have been made yet: `corral gateway key add NAME`.",
            )
        _write(after)


def _write(keys: tuple[ClientKey, ...]) -> None:
    save_record(keys_file(), _KeyFile(keys))


def _lock() -> FileLock:
    make_private_dir(gateway_dir())
    return exclusive_lock(gateway_dir() / "keys.lock", wait_notice("the keys"))

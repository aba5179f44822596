"""The engines' locks: every package of an engine with its hash, for each platform and Python it runs on.

The locks ship with Corral and are resolved by `tools/lock_engines.py`. PyTorch's CPU wheels lie on an index of their
own and are locked by file (`torch-cpu.json`). Which platforms are locked as a whole was checked against the package
index by `tools/check_engine_locks.py`, and is kept in `locked.json`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from importlib import resources

from corral.base.errors import EngineError, UsageError
from corral.base.record import from_json

PINNED_VERSION = "0.32.0"
FLAVOURS = ("cpu", "cuda")


@dataclass(frozen=True)
class LockedFor:
    """One platform and Python that an engine's lock was checked for."""

    flavour: str
    platform: str  # x86_64 | aarch64
    python: str
    packages: int
    glibc: str  # the oldest that all wheels take
    missing: tuple[str, ...] = ()  # packages without a locked file there


@dataclass(frozen=True)
class TorchCpu:
    """PyTorch's CPU wheels, by file."""

    requirement: str
    sha256: dict[str, str]

    def lock_for(self, platform: str, python: str) -> str:
        """The requirement with its hash on one platform (`aarch64`) and Python (`3.12`)."""
        tag = f"-cp{python.replace('.', '')}-"
        for file, digest in self.sha256.items():
            if tag in file and file.endswith(f"_{platform}.whl"):
                return f"{self.requirement} --hash=sha256:{digest}\n"
        known = ", ".join(sorted({file.split("-")[2].replace("cp3", "3.") for file in self.sha256}))
        raise EngineError(
            f"the CPU engine's PyTorch is not locked for Python {python} on {platform}.",
            f"Use Python {known} on x86_64 or aarch64.",
        )


def _read(name: str) -> str:
    return (resources.files("corral") / "data" / "engines" / name).read_text(encoding="utf-8")


def lock_text(flavour: str, version: str = PINNED_VERSION) -> str:
    """The lock of an engine, as pip reads it."""
    file = resources.files("corral") / "data" / "engines" / f"{flavour}-{version}.lock"
    if flavour not in FLAVOURS or not file.is_file():
        raise UsageError(
            f"there is no engine {flavour}-{version}.",
            "Known: " + ", ".join(f"{known}-{PINNED_VERSION}" for known in FLAVOURS) + ".",
        )
    return file.read_text(encoding="utf-8")


@functools.cache
def torch_cpu() -> TorchCpu:
    return from_json(TorchCpu, json.loads(_read("torch-cpu.json")))


def locked() -> list[LockedFor]:
    """What the locks were checked for; nothing of a lock that has changed since."""
    found = []
    for flavour, part in json.loads(_read("locked.json")).items():
        if part["lock_sha256"] == hashlib.sha256(lock_text(flavour).encode()).hexdigest():
            found += [from_json(LockedFor, {"flavour": flavour, **row}) for row in part["rows"]]
    return found

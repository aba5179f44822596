"""The engines' locks: every package of an engine with its hash, for each platform and Python it runs on; and that of
lm-evaluation-harness.

The locks ship with Corral and are resolved by `tools/lock_engines.py`. PyTorch's CPU wheels lie on an index of their
own and are locked by file (`torch-cpu.json`). Which platforms are locked as a whole was checked against the package
index by `tools/check_engine_locks.py`, and is kept in `locked.json`.

Packages are looked for where this machine's pip looks (`Sources`): clusters and companies set mirrors, wheel folders
and certificates in pip's configuration, and a tool that ignores it fails where pip works. It is read through `pip
config list`, the only documented way.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from importlib import resources

from corral.base.errors import CorralError, EngineError, UsageError
from corral.base.record import from_json
from corral.base.shell import run
from corral.engines import PINNED_VERSION

FLAVOURS = ("cpu", "cuda")
HARNESS = "lm-eval"  # lm-evaluation-harness: no engine, installed as one
VERSIONS = {**dict.fromkeys(FLAVOURS, PINNED_VERSION), HARNESS: "0.4.13"}


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


def lock_text(flavour: str, version: str = "") -> str:
    """The lock of an engine, or of the harness, as pip reads it; without a version the pinned one."""
    version = version or VERSIONS.get(flavour, "")
    file = resources.files("corral") / "data" / "engines" / f"{flavour}-{version}.lock"
    if flavour not in VERSIONS or not file.is_file():
        known = ", ".join(f"{name}-{pinned}" for name, pinned in VERSIONS.items())
        raise UsageError(f"there is no engine {flavour}-{version}.", f"Known: {known}.")
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


@dataclass(frozen=True)
class Sources:
    """Indexes, wheel folders and trust, as pip would use them."""

    index: str = ""
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    certificate: str = ""
    no_index: bool = False

    def as_arguments(self) -> list[str]:
        """What `uv pip install` takes as arguments only."""
        return ["--no-index"] if self.no_index else []

    def as_environment(self) -> dict[str, str]:
        """The rest, for uv's environment: an address may hold a password, and everybody sees arguments."""
        found = {
            "UV_DEFAULT_INDEX": self.index,
            "UV_INDEX": " ".join(self.extra_indexes),
            "UV_FIND_LINKS": ",".join(self.find_links),
            "UV_INSECURE_HOST": " ".join(self.trusted_hosts),
            "SSL_CERT_FILE": self.certificate,
        }
        return {name: value for name, value in found.items() if value}


def parse_sources(listing: str) -> Sources:
    """Read the output of `pip config list`; a more specific section wins over `global`, the environment over all."""
    rank = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, separator, quoted = line.partition("=")
        section, _, key = name.rpartition(".")
        if not separator or section not in rank:
            continue
        try:
            value = str(ast.literal_eval(quoted))
        except (ValueError, SyntaxError):
            continue
        if rank[section] >= found.get(key, (-1, ""))[0]:
            found[key] = (rank[section], value)
    values = {key: value for key, (_, value) in found.items()}
    return Sources(
        index=values.get("index-url", ""),
        extra_indexes=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        certificate=values.get("cert", ""),
        no_index=values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
    )


@functools.cache
def read_sources() -> Sources:
    """pip's configuration on this machine: of a pip beside Corral (`uv tool install` leaves it out), or of the Python
    that Corral's environment was made from; without any pip, its variables."""
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", sys.executable))):
        with contextlib.suppress(CorralError):
            done = run([python, "-P", "-m", "pip", "config", "list"], timeout_s=30)
            if done.code == 0:
                return parse_sources(done.stdout)
    options = {name[4:].lower().replace("_", "-"): v for name, v in os.environ.items() if name.startswith("PIP_")}
    return parse_sources("".join(f":env:.{name}={value!r}\n" for name, value in options.items()))

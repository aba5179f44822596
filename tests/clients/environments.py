"""Environments with other people's clients at the versions of pins.toml, kept in .scratch/clients/.

`python -m tests.clients.environments` (`make client-packages`) installs them before the tests, whose time is limited.
A client that has no such version in the package index, or no wheel for this platform, is written down with uv's
reason, and its tests are skipped. Anything else that goes wrong is a failure.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import uv

from corral.base.lock import exclusive_lock
from corral.engines.locks import read_sources
from tests.conftest import ROOT
from tests.integration.conftest import corral_of
from tests.skips import CLIENTS

PINS = tomllib.loads((ROOT / "tests" / "clients" / "pins.toml").read_text())
GROUP_OF = {
    re.split(r"[\[=]", client)[0]: (group, client) for group, told in PINS.items() for client in told["clients"]
}
ATTEMPTS = 3  # uv keeps what it has downloaded
SLOW_INDEX = {"UV_HTTP_TIMEOUT": "300", "UV_HTTP_RETRIES": "5"}
UNAVAILABLE = re.compile(r"No solution found|Failed to build|no wheels with a matching|has no usable wheels")


@dataclass(frozen=True)
class Environment:
    """One installed environment, and why some of its clients are not in it."""

    folder: Path
    missing: dict[str, str]

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)


@functools.cache
def environment(group: str, engine: Path) -> Environment:
    """The environment of a group, installed unless it is there as a whole."""
    told = PINS[group]
    known = hashlib.sha256(json.dumps([told, sys.version, str(engine)]).encode()).hexdigest()[:8]
    folder = CLIENTS / f"{group}-{known}"
    CLIENTS.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(CLIENTS / f".{group}.lock", lambda who: print(f"waiting for {who}")):
        record = folder / "missing.json"
        if not record.exists() or record.read_text() != "{}":
            for old in CLIENTS.glob(f"{group}-*"):
                shutil.rmtree(old)
            _run("venv", "--quiet", "--python", sys.executable, str(folder))
            missing = _fill(folder, told["clients"])
            if told.get("elsewhere"):
                (site,) = folder.glob("lib/python3*/site-packages")
                (site / "engine.pth").write_text(f"{next(engine.glob('lib/python3*/site-packages'))}\n")
            record.write_text(json.dumps(missing))
        return Environment(folder, json.loads(record.read_text()))


def _fill(folder: Path, clients: list[str]) -> dict[str, str]:
    """Install all at once; where that cannot be, one after the other. What could not be installed, and why."""
    if not _install(folder, clients):
        return {}
    missing: dict[str, str] = {}
    for client in clients:
        present = [one for one in clients[: clients.index(client)] if one not in missing]
        if why := _install(folder, [*present, client]):
            missing[client] = why
    return missing


def _install(folder: Path, clients: list[str]) -> str:
    """Install; uv's reason where an index has no such version, or no wheel for this platform."""
    overrides = folder / "elsewhere.txt"
    overrides.write_text("torch; sys_platform == 'never'\n")  # gigabytes that API clients do without
    for _ in range(ATTEMPTS):
        done = _run("pip", "install", "--quiet", "--no-progress", "--python", str(folder / "bin" / "python"),
                    "--index-strategy", "unsafe-best-match", "--overrides", str(overrides),
                    *read_sources().as_arguments(), *clients, check=False)  # fmt: skip
        if not done.returncode or UNAVAILABLE.search(done.stderr):
            break
    if done.returncode and not UNAVAILABLE.search(done.stderr):
        raise AssertionError(f"uv could not install {clients}: {done.stderr}")
    return " ".join(done.stderr.split())[:400] if done.returncode else ""


def _run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **SLOW_INDEX, **read_sources().as_environment()}
    return subprocess.run([uv.find_uv_bin(), *words], env=env, capture_output=True, text=True, check=check)


def main() -> None:
    engine = corral_of().engine
    for group in PINS:
        made = environment(group, engine)
        print(f"{made.folder}", *(f"without {client}: {why}" for client, why in made.missing.items()), sep="\n  ")


if __name__ == "__main__":
    main()

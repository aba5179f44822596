"""The engine in a conda environment of the user's own: made where there is none, and filled from the engine's lock.

The packages are those of `corral engine install`, every file by its hash; conda brings only Python. The environment
stays the user's: Corral never removes it, and installs into none that belongs to somebody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import AccessError, EngineError, NotFoundError, UsageError
from corral.base.files import write_atomic
from corral.base.shell import run
from corral.engines import environments
from corral.engines.locks import lock_text, locked

CONDA_HOMES = ("miniforge3", "mambaforge", "miniconda3", "anaconda3")  # below a home folder, or /opt
CREATE_S = 1800.0
PYTHON = "3.12"  # of a new environment
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
VLLM = "import importlib.metadata as m; print(m.version('vllm'))"


@dataclass(frozen=True)
class CondaEngine:
    """A conda environment that holds vLLM now."""

    env: str  # as the user named it
    prefix: str
    flavour: str
    version: str  # of vLLM, as the environment says
    python: str
    made: bool  # whether there was none before
    seconds: float


def find_conda() -> str:
    """The conda, mamba or micromamba of this machine."""
    homes = [Path.home() / name for name in CONDA_HOMES] + [Path("/opt") / name for name in ("conda", *CONDA_HOMES)]
    tried = [os.environ.get("CONDA_EXE", "")]
    tried += [shutil.which(name) or "" for name in ("conda", "mamba", "micromamba")]
    tried += [os.environ.get("MAMBA_EXE", ""), *(str(home / "bin" / "conda") for home in homes)]
    for found in tried:
        if found and os.access(found, os.X_OK):
            return found
    raise NotFoundError(
        "there is no conda, mamba or micromamba on this machine.",
        "On a cluster load its module first (module load python, or miniforge); or install Miniforge.",
    )


def install_into_conda(env: str, flavour: str, version: str, progress: Callable[[str], None]) -> CondaEngine:
    """Make the environment where there is none, and install the locked engine into it."""
    if not re.fullmatch(r"(?!-)[^\s:'\"]{1,400}", env):
        raise UsageError(f"{env!r} is not the name of a conda environment.", "Write conda:NAME or conda:/PREFIX.")
    text, began = lock_text(flavour, version), time.monotonic()
    conda = find_conda()
    prefix = _prefix(conda, env)
    made = prefix is None
    if prefix is None:
        progress(f"making the conda environment {env}")
        prefix = _create(conda, env)
    python = _python_of(prefix, flavour)
    _refuse_foreign(prefix)
    locks = prefix / "share" / "corral"
    locks.mkdir(parents=True, exist_ok=True)
    lock = locks / "requirements.lock"
    write_atomic(lock, text, 0o644)
    environments.fill(prefix, lock, flavour, version, python, progress)
    done = run([str(prefix / "bin" / "python"), "-c", VLLM], 120).or_raise(f"vLLM is not in {prefix}")
    took_s = round(time.monotonic() - began, 1)
    return CondaEngine(env, str(prefix), flavour, done.stdout.strip(), python, made, took_s)


def _as_path(env: str) -> Path | None:
    """The folder that an environment given as a path means; None for one given by its name."""
    return Path(env).expanduser().absolute() if env.startswith(("/", "~", ".")) else None


def _prefix(conda: str, env: str) -> Path | None:
    """The environment's folder; None where there is no such environment."""
    if named := _as_path(env):
        return named if (named / "bin" / "python").exists() else None
    done = run([conda, "env", "list", "--json"], 120).or_raise(f"{conda} does not work")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        known = [Path(folder) for folder in json.loads(done.stdout)["envs"]]
        return next((folder for folder in known if folder.name == env and folder.parent.name == "envs"), None)
    raise EngineError(f"{conda} env list --json did not say which environments there are.", "Try it by hand.")


def _create(conda: str, env: str) -> Path:
    named = _as_path(env)
    where = ["--prefix", str(named)] if named else ["--name", env]
    channel = ["--override-channels", "--channel", "conda-forge"]
    done = run([conda, "create", "--yes", "--quiet", *where, *channel, f"python={PYTHON}"], CREATE_S)
    found = None if done.code else _prefix(conda, env)
    if found is None:
        said = done.last_line[:300] or "it said nothing"
        raise EngineError(
            f"conda could not make the environment {env}: {said}", f"Try it: conda create -n {env} python"
        )
    return found


def _python_of(prefix: Path, flavour: str) -> str:
    """The environment's Python, where the engine is locked for it."""
    python = run([str(prefix / "bin" / "python"), "-c", VERSION], 60).or_raise(f"Python in {prefix}").stdout.strip()
    known = sorted({row.python for row in locked() if row.flavour == flavour and row.platform == platform.machine()})
    if known and python not in known:
        raise EngineError(
            f"{prefix} has Python {python}, and the {flavour} engine is locked for {', '.join(known)}.",
            f"Name another environment: one that is not there is made, with Python {PYTHON}.",
        )
    return python


def _refuse_foreign(prefix: Path) -> None:
    if prefix.stat().st_uid != os.getuid() or not os.access(prefix, os.W_OK):
        raise AccessError(
            f"{prefix} belongs to another user, and nothing is installed into it.",
            "Make one of your own: conda create --name NAME --clone OTHER, or name one that is not there yet.",
        )

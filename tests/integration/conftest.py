"""Real vLLM on the CPU: one installed engine and few started servers for the whole tier.

The engine and the converted default model live in `.scratch/` of the checkout, so that a second run starts at once;
on a clean checkout they are installed by Corral itself, as for any user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corral.engines import environments as engines
from tests import until
from tests.conftest import ROOT
from tests.tiny_llama import make_tiny_llama

KEPT = Path(os.environ.get("CORRAL_TEST_HOME", ROOT / ".scratch" / "test-home"))
DEFAULT_MODEL = "default_model"  # the home of whoever has those tests: any worker may get the first file
FAST = ("--set", "eager=true")
# An engine stays on the cores that it is bound to, its first thread on the first of them: left alone, every engine of
# this machine computes on the same core. The default model has that one; the small ones, which gain nothing from a
# second thread, share the last.
BOUND = "VLLM_CPU_OMP_THREADS_BIND"
LAST_CORE = str(max(os.sched_getaffinity(0)))
OF_THE_USER = ("HF_", "VLLM_", "OPENAI_", "XDG_", "SLURM_")
# Begun first, so that no worker is alone with a long one at the end (`--no-loadscope-reorder` keeps this order). What
# is not named here is short.
LONG_FIRST = (DEFAULT_MODEL, "multi_node", "batch_ray_data", "batch", "serving", "bench", "engines", "console")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@dataclass
class Corral:
    """Runs `corral` as a user does."""

    env: dict[str, str]
    home: Path

    def run(self, *arguments: str, check: bool = True, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s)
        assert not check or done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    @property
    def engine(self) -> Path:
        """Where the engine of today's pins lies."""
        return self.home / "engines" / Path(engines.expected("cpu").path).name

    def json(self, *arguments: str, check: bool = True) -> Any:
        return json.loads(self.run(*arguments, "--json", check=check).stdout)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port() -> str:
    """A port that nobody uses: 8000 is everybody's first choice, and tests may run side by side."""
    return str(until.free_port())


def corral_of(whose: str = DEFAULT_MODEL) -> Corral:
    """Corral in an empty home that shares the kept engine, models and compile cache; on all cores, as for anybody.

    The default model's home is always in the same place: vLLM finds compiled code by the model's folder too.
    """
    home = KEPT.with_name(f"{KEPT.name}s") / whose
    shutil.rmtree(home, ignore_errors=True)
    (home / "corral").mkdir(parents=True)
    for name in ("engines", "models", "cache"):
        (KEPT / name).mkdir(parents=True, exist_ok=True)
        (home / "corral" / name).symlink_to(KEPT / name)
    env = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_USER)}
    return Corral({**env, "HOME": str(home), "CORRAL_HOME": str(home / "corral")}, home / "corral")


@pytest.fixture(scope="session")
def corral() -> Iterator[Corral]:
    asked_by = os.environ["PYTEST_CURRENT_TEST"]  # a worker's first test: with `loadfile` it has the whole file
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    command = corral_of(DEFAULT_MODEL if f"test_{DEFAULT_MODEL}.py" in asked_by else worker)
    command.env[BOUND] = LAST_CORE
    command.run("engine", "install", "cpu")
    yield command
    command.run("down", "--all", check=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")

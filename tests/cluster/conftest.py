"""Real sshd, SLURM and containers, with stand-in engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_llama import make_tiny_llama

# Begun first, so that no worker is alone with a long one at the end (`--no-loadscope-reorder` keeps this order); they
# wait for time limits of jobs, for nodes that SLURM gives up, for TCP. What is not named here is short.
LONG_FIRST = ("slurm_handover", "ssh", "slurm_batch", "slurm", "slurm_fleet", "slurm_hand", "containers", "testbed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")

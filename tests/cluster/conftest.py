"""Real sshd, SLURM and containers, with stand-in engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_llama import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")

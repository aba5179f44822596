"""Every test has a home of its own; nothing of the user's environment reaches it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - hooks of every tier

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def clean_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CORRAL_HOME", str(home / "corral"))
    for name in list(os.environ):
        if name.startswith(("HF_", "VLLM_", "OPENAI_", "XDG_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return home

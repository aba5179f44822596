"""Every test has a home of its own; nothing of the user's environment reaches it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - hooks of every tier

ROOT = Path(__file__).parent.parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what follows `&` so, and it is inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test was run again: its second try says nothing of the first."""
    for first in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first try of {first.nodeid}")
        terminalreporter.write_line(first.longreprtext[-3000:])


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Places for homes; `mktemp` for each would read a folder of thousands every time."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / f"home{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def clean_home(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    home = next(homes)
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CORRAL_HOME", str(home / "corral"))
    for name in list(os.environ):
        if name.startswith(("HF_", "VLLM_", "OPENAI_", "XDG_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return home

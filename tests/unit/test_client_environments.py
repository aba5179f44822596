"""The tier `clients`: what cannot be installed is told from what goes wrong, and every row of the table is tried."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from corral.cli.client_lines import CLIENTS
from tests.clients import environments
from tests.clients.runs import CALLED, TYPED, Calls

NO_VERSION = "error: No solution found when resolving dependencies\n  cause: there is no version of b==2"


def installing(patch: pytest.MonkeyPatch, said: str) -> None:
    """uv refuses whatever has b."""

    def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, int("b==2" in words), "", said if "b==2" in words else "")

    patch.setattr(environments, "_run", run)


def test_a_client_that_the_index_lacks_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installing(monkeypatch, NO_VERSION)
    missing = environments._fill(tmp_path, ["a==1", "b==2", "c==3"])
    assert list(missing) == ["b==2"]
    assert "there is no version of b==2" in missing["b==2"]


def test_an_index_that_does_not_answer_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installing(monkeypatch, "error: Request failed after 3 retries")
    with pytest.raises(AssertionError, match="Request failed"):
        environments._fill(tmp_path, ["a==1", "b==2"])


def test_every_row_of_the_table_is_tried() -> None:
    rows = {run.row for run in (*CALLED, *TYPED)} | {run.behind for run in CALLED}
    assert rows >= set(CLIENTS) - {"aider"}  # which pins nearly a hundred packages


def test_every_client_is_pinned_and_every_call_has_a_client() -> None:
    for told in environments.PINS.values():
        assert all("==" in client for client in told["clients"])
    tried = {run.client or run.row for run in (*CALLED, *TYPED)} | {
        run.behind for run in CALLED if isinstance(run, Calls)
    }
    assert tried >= set(environments.GROUP_OF) - {"langchain", "langgraph", "transformers"}  # used by others' calls

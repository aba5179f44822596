"""`corral.batch` and `llm.down()`: a notebook needs no shell."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import corral
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from tests.unit.conftest import Corral


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": n, "prompt": f"row {n}"}) + "\n" for n in range(8)))
    return path


def test_a_batch_runs_and_continues(rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with FakeServer(FakeOptions()) as server:
        done = corral.batch(rows, output, url=server.url, max_tokens=3)
        assert (done.summary.fine, done.summary.failed) == (8, 0)
        assert len(output.read_text().splitlines()) == 8
        again = corral.batch(rows, output, url=server.url, max_tokens=3)
    assert again.summary.fine == 0


def test_a_batch_runs_where_an_event_loop_does(rows: Path, tmp_path: Path) -> None:
    async def cell() -> int:
        return corral.batch(rows, tmp_path / "out.jsonl", url=server.url, max_tokens=3).summary.fine

    with FakeServer(FakeOptions()) as server:
        assert asyncio.run(cell()) == 8


def test_a_misspelt_parameter_is_told(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(corral.CorralError, match="temperatur"):
        corral.batch(rows, tmp_path / "out.jsonl", url="http://127.0.0.1:1", temperatur=1)


def test_down_ends_what_was_found_running(answering: Corral, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answering("up", str(answering.model), "--name", "found").code == 0
    llm = corral.connect("found")
    assert llm.complete("San", max_tokens=2).text
    llm.down()
    assert answering("status", "found", "--json").json()["state"] == "stopped"


def test_down_of_a_server_of_others_is_refused() -> None:
    with (
        FakeServer(FakeOptions()) as server,
        pytest.raises(corral.CorralError, match="no deployment of yours answers"),
    ):
        corral.connect(url=server.url).down()

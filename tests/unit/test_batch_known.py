"""Batches are found again: each leaves a note in the home."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from corral.base.home import batches_dir
from corral.use.batch.core.folder import known_outputs, note_output


def begun(output: Path) -> Path:
    """A batch as far as a list looks at it."""
    folder = output.with_name(output.name + ".corral")
    folder.mkdir(parents=True)
    (folder / "job.json").write_text("{}")
    note_output(output)
    return output


def test_a_batch_is_found_by_the_path_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begun(Path("answers of 東京.jsonl"))
    assert known_outputs() == [tmp_path / "answers of 東京.jsonl"]
    note_output(Path("answers of 東京.jsonl"))
    assert len(list(batches_dir().iterdir())) == 1


def test_a_batch_that_is_gone_is_not_listed(tmp_path: Path) -> None:
    one, other = begun(tmp_path / "one.jsonl"), begun(tmp_path / "other.jsonl")
    shutil.rmtree(tmp_path / "one.jsonl.corral")
    assert known_outputs() == [other]
    assert one not in known_outputs()


def test_what_is_no_note_is_passed_over(tmp_path: Path) -> None:
    found = begun(tmp_path / "one.jsonl")
    (batches_dir() / "noise").write_bytes(b"\xff\xfe\x00")
    (batches_dir() / "folder").mkdir()
    assert known_outputs() == [found]


def test_without_a_batch_there_is_nothing() -> None:
    assert known_outputs() == []


def test_a_home_that_cannot_be_written_hinders_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "file"))
    note_output(tmp_path / "one.jsonl")
    assert known_outputs() == []

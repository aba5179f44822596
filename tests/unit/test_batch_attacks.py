"""Attacks on what a batch reads and writes: neighbours who read its results, damaged disks, rows made to do harm."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.batch.batch import carry_out
from corral.batch.core.run import Quiet, RunSummary
from corral.batch.core.runner import RunnerSettings
from corral.batch.job import BatchOrder
from corral.batch.serving import Where
from corral.fake import FakeOptions, FakeServer
from tests.testbed import NOT_ROOT

QUICK = RunnerSettings(backoff_s=0.01, longest_backoff_s=0.05, drain_s=1.0)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(answer_tokens=(2, 6), max_model_len=512)) as made:
        yield made


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Whatever is not made private on purpose can be read by everybody."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def rows_in(place: Path, count: int) -> Path:
    path = place / "in.jsonl"
    path.write_text("".join(json.dumps({"id": f"r{n}", "prompt": f"Row {n}"}) + "\n" for n in range(count)))
    return path


def batch(server: FakeServer, source: Path, output: Path, **more: Any) -> RunSummary:
    order = BatchOrder(input=str(source), output=str(output), **more)
    return carry_out(order, Where(urls=(server.url,)), QUICK, Quiet(), signals=False).summary


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Who may read the results

FORMS = ["o.jsonl", "o.jsonl.gz", "o.jsonl.zst", "o.csv", "o.csv.gz", "o.parquet"]


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("name", FORMS)
def test_an_output_is_for_its_owner_alone_also_after_it_was_made_again(
    server: FakeServer, tmp_path: Path, name: str
) -> None:
    source, output = rows_in(tmp_path, 6), tmp_path / name
    source.write_text(source.read_text() + "{}\n")  # one that goes to the error file
    errors = tmp_path / f"{name.removesuffix('.jsonl')}.errors.jsonl"
    assert batch(server, source, output, skip_bad=True).state == "done"
    assert (mode(output), mode(errors)) == (0o600, 0o600)
    source.write_text(source.read_text().replace("Row 3", "Another row 3"))
    assert batch(server, source, output, skip_bad=True, force=True).fine == 1  # the old files are rewritten
    assert (mode(output), mode(errors)) == (0o600, 0o600)


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("name", ["o.jsonl", "o.csv.gz"])
def test_who_could_read_an_output_before_still_can(server: FakeServer, tmp_path: Path, name: str) -> None:
    source, output = rows_in(tmp_path, 4), tmp_path / name
    output.touch()
    output.chmod(0o640)
    assert batch(server, source, output).state == "done"
    assert mode(output) == 0o640
    output.chmod(0o644)  # published by hand, and then made again
    source.write_text(source.read_text().replace("Row 3", "Another row 3"))
    batch(server, source, output, force=True)
    assert mode(output) == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason=NOT_ROOT)  # to give a file to another group
def test_a_groups_right_to_read_goes_to_that_group_alone(server: FakeServer, tmp_path: Path) -> None:
    source, output = rows_in(tmp_path, 2), tmp_path / "o.csv"
    output.touch()
    os.chown(output, -1, 4242)
    output.chmod(0o640)
    batch(server, source, output)
    assert (output.stat().st_gid, mode(output)) == (4242, 0o640)


def test_beginning_anew_does_not_empty_what_a_link_leads_to(server: FakeServer, tmp_path: Path) -> None:
    source, precious, output = rows_in(tmp_path, 2), tmp_path / "precious", tmp_path / "o.jsonl"
    precious.write_text("kept\n")
    output.symlink_to(precious)
    assert batch(server, source, output, force=True).state == "done"
    assert precious.read_text() == "kept\n"

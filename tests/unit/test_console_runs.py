"""The Runs view's backend: saved runs and the rows of batches, by what is listed and by nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from corral.base.errors import NotFoundError, UsageError
from corral.console.runs import batch_list, batch_page, batch_rows, comparison, run_list, run_page
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two runs, a sweep, and a batch of which some rows failed, made by the commands a user types."""
    folder = tmp_path_factory.mktemp("runs")
    env = {"CORRAL_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin", "HOME": str(folder)}

    def corral(*words: str) -> None:
        done = subprocess.run([sys.executable, "-m", "corral", *words], env=env, cwd=folder, capture_output=True,
                              text=True, timeout=300)  # fmt: skip
        assert done.returncode in (0, 1), done.stderr

    rows = [{"prompt": f"row {n} " + ("cursed" if n % 5 == 0 else "fine"), "id": f"r{n}"} for n in range(20)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = ("--input-len", "16", "--output-len", "8", "--num-prompts", "24")
    with FakeServer(FakeOptions(control=True)) as server:
        where = ("--url", server.url)
        for name in ("one", "two"):
            corral("bench", "run", *where, "--concurrency", "4", "--name", name, *lengths)
        corral("bench", "sweep", *where, "--concurrency", "1,8", "--name", "sweep", *lengths)
        server.set_faults("status:code=400,match=cursed")
        corral("batch", "run", "in.jsonl", "-o", "out.jsonl", *where)
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(home / "home"))


def test_runs_are_listed_and_shown_with_their_curves() -> None:
    assert {one.name for one in run_list()} == {"one", "two", "sweep"}
    page = run_page("one")
    assert page["kind"] == "run"
    assert page["completed"] == 24
    assert len(page["distribution"]["ttft"]) == len(page["distribution"]["percent"])
    assert page["distribution"]["ttft"] == sorted(page["distribution"]["ttft"])
    assert len(page["timeline"]["tokens_per_s"]) == len(page["timeline"]["concurrency"])


def test_a_sweep_has_a_point_for_each_load() -> None:
    page = run_page("sweep")
    assert page["kind"] == "sweep"
    assert [point["concurrency"] for point in page["points"]] == [1, 8]
    assert run_page(page["points"][1]["name"])["concurrency"] == 8


def test_two_runs_are_compared() -> None:
    found = comparison("one", "two")
    names = {row["name"] for row in found["figures"]}
    assert {"output_throughput", "median_ttft_ms"} <= names
    assert {row["verdict"] for row in found["figures"]} <= {"noise", "better", "worse"}
    with pytest.raises(UsageError, match="not one load"):
        comparison("one", "sweep")


@pytest.mark.parametrize(
    "name", ["", "..", "../..", "/etc", "one/../two", "nothing", "sweep/..", "sweep/x/y", "last"]
)
def test_only_what_is_listed_is_read(name: str) -> None:
    with pytest.raises(NotFoundError):
        run_page(name)


def test_failures_of_a_batch_are_grouped_by_their_cause(home: Path) -> None:
    output = str(home / "out.jsonl")
    assert [(one["output"], one["rows"], one["failed"]) for one in batch_list()] == [(output, 20, 4)]
    page = batch_page(output)
    assert [group.count for group in page["failures"]] == [4]
    [group] = page["failures"]
    assert group.lines == (1, 6, 11, 16)
    assert group.ids == ("r0", "r5", "r10", "r15")
    failed = batch_rows({"output": output, "failed": "1", "code": group.code, "like": group.message})["rows"]
    assert {row.id for row in failed} == set(group.ids)
    assert all("cursed" in row.question and row.error for row in failed)


def test_rows_come_in_pages_with_question_and_answer(home: Path) -> None:
    output = str(home / "out.jsonl")
    first = batch_rows({"output": output, "count": "10"})["rows"]
    second = batch_rows({"output": output, "at": "10", "count": "10"})["rows"]
    assert len({row.id for row in (*first, *second)}) == 16
    assert all(row.answer and row.finish_reason and "fine" in row.question for row in first)


@pytest.mark.parametrize("given", [{"count": "0"}, {"count": "1000"}, {"at": "-1"}, {"at": "x"}])
def test_a_page_that_is_none_is_refused(home: Path, given: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        batch_rows({"output": str(home / "out.jsonl"), **given})


def test_a_batch_that_left_no_note_is_not_read(home: Path) -> None:
    with pytest.raises(NotFoundError):
        batch_page("/etc/passwd")
    with pytest.raises(NotFoundError):
        batch_rows({"output": str(home / "in.jsonl")})

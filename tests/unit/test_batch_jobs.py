"""Several runners on one batch: each row once, whoever dies; joining, leaving, refusing; as if one had done it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.base.processes import Identity
from corral.deploy.deployment.state import Reason
from corral.deploy.targets.base import JobState
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.ledger import Ledger, LedgerEntry
from corral.use.batch.core.records import FAILED, FINE
from corral.use.batch.core.table import Table
from corral.use.batch.inspect import inspect
from corral.use.batch.jobs import QueuedState
from corral.use.batch.parts import (
    BlockFeed,
    Division,
    Others,
    Participant,
    all_parts,
    block_size,
    claim_path,
    runners_of,
)
from tests.batch_harness import Nursery, Reins, control, fake_server, torment_several, write_rows
from tests.until import until

ANSWERS = ("--answer-tokens", "4-16")
FAULTS = ("status:code=503,p=0.02", "status:code=500,p=0.02", "reset:p=0.02", "cut:p=0.02", "abort:p=0.02")


def batch(url: str, rows: Path, output: Path, *more: str) -> list[str]:
    return ["batch", str(rows), "-o", str(output), "--url", url, "--backoff", "0.01", "--attempts", "50", *more]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "corral", *argv], capture_output=True, text=True, timeout=120)


def start(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "corral", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def nurseries(tmp_path: Path) -> Iterator[list[Nursery]]:
    made = [Nursery(tmp_path / "nursery.log") for _ in range(3)]
    yield made
    for one in made:
        one.close()


def test_sixty_kills_among_three_runners_lose_and_double_nothing(tmp_path: Path, nurseries: list[Nursery]) -> None:
    rows, output, calm = tmp_path / "rows.jsonl", tmp_path / "out.jsonl", tmp_path / "calm.jsonl"
    write_rows(rows, 3000)
    with fake_server(*ANSWERS) as url:
        assert run(*batch(url, rows, calm, "--ordered")).returncode == 0
        control(url, "faults", {"faults": list(FAULTS)})
        argv = batch(url, rows, output, "--ordered", "--jobs", "3", "--concurrency", "4")
        ended, codes = torment_several(nurseries, argv, output, 60, random.Random(3), Reins(url, 3000, 60))
    assert codes == [0, 0, 0], (tmp_path / "nursery.log").read_text()[-3000:]
    assert ended.fruitful >= 20, f"the kills must hit a job that is under way: {ended}"
    assert 0 < ended.before_last < 3000
    assert output.read_bytes() == calm.read_bytes()
    left = sorted(path.name for path in Path(f"{output}.corral").iterdir() if not path.match("damaged.*"))
    assert left == ["events.jsonl", "job.json", "ledger", "results.jsonl", "rows.index", "state.json"]


def held_blocks(output: Path) -> int:
    blocks = inspect(str(output)).blocks
    return blocks.held if blocks else 0


def test_a_killed_runner_is_named_also_after_an_orderly_end_before(tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 2000)
    with fake_server(*ANSWERS) as url:
        control(url, "pace", {"ttft_s": 0.2})
        first = start(*batch(url, rows, output, "--concurrency", "4"))
        until(lambda: output_begun(output) and inspect(str(output)).fine > 0, "some rows done")
        assert run("batch", "cancel", str(output)).returncode == 0
        first.communicate()
        assert inspect(str(output)).state == "cancelled"
        second = start("batch", "resume", str(output))
        until(lambda: inspect(str(output)).state == "running", "it goes on")
        second.kill()
        second.communicate()
        standing = inspect(str(output))
        assert (standing.state, standing.runners) == ("interrupted", ())
        assert f"process {second.pid} on {socket.gethostname()}, is gone" in standing.reason
        shown = run("batch", "status", str(output)).stdout
        assert "continue  corral batch resume" in shown


def output_begun(output: Path) -> bool:
    return (Path(f"{output}.corral") / "job.json").is_file()


def elsewhere(path: Path, silent_s: float) -> None:
    """A lock of a process on another machine that has not touched it for so long."""
    holder = Identity(pid=77, host="n2", boot_id="other", start_ticks=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(vars(holder)))
    os.utime(path, (time.time() - silent_s, time.time() - silent_s))


def test_a_runner_elsewhere_that_is_silent_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 200)
    with fake_server(*ANSWERS) as url:
        control(url, "pace", {"ttft_s": 0.2})
        runner = start(*batch(url, rows, output, "--concurrency", "4"))
        until(lambda: output_begun(output) and inspect(str(output)).fine > 0, "some rows done")
        runner.kill()
        runner.communicate()
    lock = BatchFolder(output).lock
    elsewhere(lock, 5)
    assert (inspect(str(output)).state, inspect(str(output)).reason) == ("running", "")
    elsewhere(lock, 60)
    standing = inspect(str(output))
    assert standing.state == "running"
    assert "process 77 on n2 has been silent for 6" in standing.reason
    elsewhere(lock, 300)
    assert "process 77 on n2, is gone" in inspect(str(output)).reason
    over = QueuedState("41", "d", JobState.FAILED, "job 41 failed", "", True, False, Reason.JOB_FAILED)
    monkeypatch.setattr("corral.use.batch.inspect.queued_states", lambda folder: [over])
    elsewhere(lock, 25)  # its job has ended: nobody waits two minutes
    standing = inspect(str(output))
    assert (standing.state, standing.runners, standing.reason) == ("interrupted", (), "job 41 failed")


def test_runners_join_are_counted_shown_and_stopped_together(tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 2000)
    with fake_server(*ANSWERS) as url:
        control(url, "pace", {"ttft_s": 0.05})
        argv = batch(url, rows, output, "--jobs", "2", "--concurrency", "4")
        runners = [start(*argv) for _ in range(2)]
        until(lambda: len(runners_of(BatchFolder(output))) == 2, "two runners")
        until(lambda: len(list(BatchFolder(output).blocks.glob("0*"))) >= 2, "two blocks claimed")
        until(lambda: inspect(str(output)).fine > 20, "some rows done")
        control(url, "pace", {"ttft_s": 3.0})  # it must not end while it is looked at
        until(lambda: held_blocks(output) >= 2, "two blocks held")
        standing = inspect(str(output))
        assert standing.state == "running"
        assert {one.pid for one in standing.runners} == {one.pid for one in runners}
        shown = run("batch", "status", str(output)).stdout
        assert "under way, 16 rows each" in shown
        third = run(*argv)
        assert third.returncode == 4
        assert "--jobs 3" in third.stderr
        plain = run(*batch(url, rows, output, "--concurrency", "4"))
        assert plain.returncode == 4
        other = run(*batch(url, rows, output, "--jobs", "3", "--max-tokens", "3", "--force"))
        assert other.returncode == 4
        assert "cancel" in other.stderr
        assert run("batch", "cancel", str(output)).returncode == 0
        assert [runner.wait(120) for runner in runners] == [130, 130]
        for runner in runners:
            runner.communicate()
        assert inspect(str(output)).state == "cancelled"
        assert not output.exists()
        control(url, "pace", {"ttft_s": 0.0})
        done = run("batch", "resume", str(output))  # one alone finishes what two began
        assert done.returncode == 0, done.stderr
    ids = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert sorted(ids) == sorted(f"id-{n}" for n in range(2000))
    assert not BatchFolder(output).shared.exists()


def test_a_lone_batch_is_continued_by_several_and_keeps_what_it_has(tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 800)
    with fake_server(*ANSWERS) as url:
        control(url, "pace", {"ttft_s": 0.3})
        alone = start(*batch(url, rows, output, "--concurrency", "4"))
        until(lambda: output.exists() and output.stat().st_size > 2000, "results")
        alone.send_signal(signal.SIGINT)
        assert alone.wait(120) == 130
        alone.communicate()
        kept = output.read_bytes()
        control(url, "pace", {"ttft_s": 0.001})
        runners = [start(*batch(url, rows, output, "--jobs", "3", "--concurrency", "8")) for _ in range(3)]
        ends = [runner.communicate(timeout=120) for runner in runners]
        assert [runner.returncode for runner in runners] == [0, 0, 0], ends
    assert output.read_bytes().startswith(kept)
    assert len({json.loads(line)["custom_id"] for line in output.read_text().splitlines()}) == 800
    assert len(output.read_text().splitlines()) == 800


def test_a_runner_from_a_lost_host_is_replaced_after_its_silence(tmp_path: Path) -> None:
    folder, table = shared(tmp_path, 64)
    lost = Participant(folder)
    lost.join()
    elsewhere = Identity(pid=1, host="elsewhere", boot_id="", start_ticks=0)
    lost.part.holder.write_text(json.dumps(vars(elsewhere)))
    assert lost.claim(0)
    assert lost.claim(1)
    assert runners_of(folder) == [elsewhere]
    commit(lost, table, range(16))
    member, feed, _ = joined(folder, table)
    assert [feed.next_row() for _ in range(33)] == [*range(32, 64), None]
    old = time.time() - 1000
    os.utime(lost.part.holder, (old, old))  # one file: all its claims grow old with it
    assert runners_of(folder) == [member_identity(member)]
    feed._not_before = 0.0
    assert [feed.next_row() for _ in range(17)] == [*range(16, 32), None]  # what it has written counts
    assert member.claims == {1, 2, 3}
    lost.leave()  # it comes back: what is not its own any more stays
    assert claim_path(folder, 1).exists()


def test_a_row_done_by_two_counts_once_and_damage_is_found(tmp_path: Path) -> None:
    folder, table = shared(tmp_path, 40)
    one, two = Participant(folder), Participant(folder)
    one.join()
    two.join()
    commit(one, table, range(25))
    commit(two, table, range(20, 40), failed={39})
    size = one.part.results.stat().st_size
    with one.part.results.open("r+b") as file:  # the disk lost the end of what it had promised
        file.truncate(size - 3)
    ledger = Ledger(folder, table)
    ledger.open()
    tally = ledger.collect(all_parts(folder))
    ledger.close()
    assert (tally.fine, tally.failed) == (39, 1)  # row 24 is lost with `one`, and there with `two`
    lines = [json.loads(line)["row"] for line in folder.results.read_text().splitlines()]
    assert sorted(lines) == list(range(39))
    again = Ledger(folder, table)
    assert again.open().fine == 39
    again.collect(all_parts(folder))  # a second time changes nothing
    again.close()
    assert len(folder.results.read_text().splitlines()) == 39


def test_one_who_is_gathered_away_notices(tmp_path: Path) -> None:
    folder, table = shared(tmp_path, 40)
    member, feed, _ = joined(folder, table)
    for path in (folder.parts, folder.blocks):
        subprocess.run(["rm", "-r", str(path)], check=True)
    assert feed.next_row() is None
    assert member.lost
    member.leave()


def test_blocks_are_many_and_small_enough() -> None:
    assert block_size(1_000_000, 4) == 1024
    assert block_size(10_000, 4) == 39
    assert block_size(10, 4) == 16
    assert Division(16, "input", "").count(33) == 3


def shared(place: Path, rows: int) -> tuple[BatchFolder, Table]:
    data = place / "rows"
    data.write_bytes(b"x" * rows)
    table = Table(data)
    for row in range(rows):
        table.add(row + 1, 7, row, 1, row + 1)
    folder = BatchFolder(place / "out.jsonl")
    folder.create()
    folder.shared.mkdir()
    return folder, table


def joined(folder: BatchFolder, table: Table) -> tuple[Participant, BlockFeed, bytearray]:
    member, done = Participant(folder), bytearray(len(table))
    member.join()
    others = Others(folder, table, member.part.name, done)
    feed = BlockFeed(folder, member, Division(16, "input", ""), range(len(table)), done, others, lambda _: None)
    return member, feed, done


def member_identity(member: Participant) -> Identity:
    return Identity(**json.loads(member.part.holder.read_text()))


def commit(member: Participant, table: Table, rows: range, failed: set[int] | None = None) -> None:
    ledger = Ledger(member.part, table)
    ledger.open()
    lines = [(row, json.dumps({"row": row}).encode() + b"\n") for row in rows]
    ledger.commit(LedgerEntry(row, FAILED if row in (failed or ()) else FINE, line) for row, line in lines)
    ledger.close()

"""Jobs that nobody recorded: found by the launch id in their names, and adopted or cancelled."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import CorralError, DataError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.base.processes import Identity, own_identity
from corral.base.record import dump_json, load_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import NO_ROOM, Reason, State
from corral.deploy.lifecycle import deployments
from corral.deploy.slurm import commands
from corral.deploy.targets.slurm import SlurmTarget
from corral.deploy.targets.slurm_job import Submitted, submit, submitted_job
from corral.node import slurm_start
from tests.fake_slurm import FakeSlurm
from tests.unit.conftest import Corral

LAUNCH = "0123456789abcdef"
LATE = '"$0.real" "$@" >/dev/null; echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    commands._cache.clear()
    commands._silent.clear()
    made = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    return made


def gone() -> Identity:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pid = ended.pid
    return replace(own_identity(), pid=pid, start_ticks=1)


def begin(name: str = "d", launch_id: str = LAUNCH, by: Identity | None = None, **options: Any) -> DeploymentFolder:
    """A deployment as `up` leaves it right before it calls sbatch."""
    record = deployments.Record(name, launch_id, "m", "m", "slurm", time.time(), by or gone(), target_options=options)
    folder = deployments.claim(record, lambda _: None)
    folder.rank(0).path.mkdir()
    folder.launch.write_text(dump_json({"launch_id": launch_id}))
    folder.script.write_text(f"#!/bin/bash\n#SBATCH --job-name=corral-{name}\n")
    folder.started.touch()
    return folder


def end(folder: DeploymentFolder) -> deployments.Status:
    commands.forget_answers()
    return deployments.stop(folder)


def test_a_jobs_name_carries_the_launch_id(slurm: FakeSlurm) -> None:
    folder = begin()
    assert submit(folder) == "1"
    assert slurm.jobs() == {"1": f"corral-d.{LAUNCH}"}
    assert commands.launch_in(f"corral-d.{LAUNCH}") == LAUNCH
    assert not [name for name in ("corral-d", "run.7", LAUNCH, "a.0123") if commands.launch_in(name)]


def test_a_job_that_was_submitted_and_not_recorded_is_adopted(slurm: FakeSlurm, corral: Corral) -> None:
    folder = begin()
    submit(folder)  # and then `up` is killed
    now = deployments.status(folder)
    assert (now.state, now.text.startswith("job 1 waits in the queue")) == (State.QUEUED, True)
    assert load_json(Submitted, folder.job).id == "1"
    assert "found by its launch id" in corral("events", "d").out
    slurm.set("1", "RUNNING")
    done = corral("down", "d")
    assert done.code == 0
    assert done.out == "d: stopped; job 1 had no record: found by its launch id\n"
    assert slurm.state("1") == "CANCELLED"
    assert corral("down", "d").out == "d: was not running\n"


def test_down_asks_slurm_before_it_says_that_nothing_ran(slurm: FakeSlurm, corral: Corral) -> None:
    folder = begin()
    slurm.silent(True)
    silent = corral("down", "d")
    assert silent.code == UnreachableError.exit_code
    assert "does not answer" in silent.err
    assert "not running" not in silent.out
    assert json.loads(corral("status", "d", "--json").out)["state"] == "unknown"
    slurm.silent(False)
    assert corral("down", "d").out == "d: was not running\n"
    assert "squeue" in slurm.called()
    assert folder.rank(0).stop.exists()  # an `sbatch` that outlives `up` may still queue a job, whose agent then ends
    submit(folder)
    assert corral("down", "d").out.startswith("d: stopped; job 1 had no record")


def test_a_job_that_has_left_the_queue_is_found_in_the_accounting(slurm: FakeSlurm) -> None:
    folder = begin()
    submit(folder)
    slurm.set("1", "NODE_FAIL")
    slurm.forget("1")
    now = deployments.status(folder)
    assert (now.state, now.reason) == (State.FAILED, Reason.NODE_LOST)


def test_a_name_whose_job_may_run_is_not_given_away(slurm: FakeSlurm) -> None:
    folder = begin()
    submit(folder)
    record = replace(load_json(deployments.Record, folder.record), launch_id="f" * 16)
    with pytest.raises(CorralError, match="'d' is already queued"):
        deployments.claim(record, lambda _: None)
    folder.job.unlink()
    slurm.silent(True)
    with pytest.raises(CorralError, match="'d' is already unknown"):
        deployments.claim(record, lambda _: None)


def started(folder: DeploymentFolder) -> None:
    """What `SlurmTarget.start` does once its files are written."""
    spec: Any = type("Spec", (), {"launch_id": LAUNCH, "files": (), "ranks": (), "script": folder.script.read_text()})
    SlurmTarget.from_options({}).start(spec, folder)


def test_a_refused_job_leaves_nothing(slurm: FakeSlurm) -> None:
    folder = begin()
    slurm.sbatch("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1")
    with pytest.raises(UsageError):
        started(folder)
    assert not folder.started.exists()
    assert "squeue" not in slurm.called()


def test_an_answer_that_came_too_late_is_looked_up_in_the_queue(slurm: FakeSlurm) -> None:
    folder = begin()
    slurm.sbatch(LATE)
    started(folder)
    assert load_json(Submitted, folder.job).id == "1"


def test_what_may_have_been_queued_keeps_its_record(slurm: FakeSlurm) -> None:
    folder = begin()
    slurm.sbatch(LATE)
    slurm.silent(True)
    with pytest.raises(UnreachableError):
        started(folder)
    assert folder.started.exists()
    slurm.silent(False)
    assert deployments.status(folder).state is State.QUEUED
    assert end(folder).state is State.STOPPED


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the disk full for records of jobs."""

    def fill() -> None:
        def refuse(path: Path, *given: Any) -> None:
            if path.name == "job.json":
                raise OSError(28, "No space left on device", str(path))
            write_atomic(path, *given)

        monkeypatch.setattr("corral.deploy.targets.slurm.write_atomic", refuse)
        monkeypatch.setattr("corral.deploy.targets.slurm_job.write_atomic", refuse)

    return fill


def test_a_full_disk_at_the_first_job_cancels_it(slurm: FakeSlurm, full: Callable[[], None]) -> None:
    folder = begin()
    full()
    with pytest.raises(OSError, match="No space"):
        started(folder)
    assert slurm.state("1") == "CANCELLED"
    assert not folder.started.exists()


def test_a_full_disk_at_a_hand_over_loses_no_job(
    slurm: FakeSlurm, full: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin(runner=["true"])
    started(folder)
    slurm.set("1", "RUNNING")
    full()
    target = deployments.target_of(load_json(deployments.Record, folder.record))
    assert isinstance(target, SlurmTarget)
    assert target.submit_successor(folder, "1") == "2"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{slurm.bin}:{os.environ['PATH']}")
    recorded = submitted_job(folder)
    assert recorded is not None
    assert recorded.id == "1"
    assert target.job_of(folder) == "2"
    slurm.set("1", "COMPLETING")
    end(folder)
    assert (slurm.state("1"), slurm.state("2")) == ("CANCELLED", "CANCELLED")


def test_ps_says_why_a_job_waits(slurm: FakeSlurm, corral: Corral) -> None:
    submit(begin())
    assert "corral: d: job 1 waits in the queue: the scheduler has not looked at it yet" in corral("ps").err


def test_a_full_disk_is_named_by_the_exit_code_of_the_runner(
    slurm: FakeSlurm, corral: Corral, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DataError("out.jsonl cannot be written: No space left on device.", errno=errno.ENOSPC)

    monkeypatch.setattr("corral.use.batch.jobs.run_in_job", full)
    runner = corral("batch", "in-job", "out.jsonl", "--deployment", "d")
    assert runner.code == NO_ROOM
    assert "No space left on device" in runner.err
    folder = begin(runner=["true"])
    submit(folder)
    slurm.set("1", "FAILED", code=str(NO_ROOM << 8))
    now = deployments.status(folder)
    assert now.reason is Reason.NO_SPACE
    assert "the disk that it writes to is full" in now.text


def test_a_job_of_an_earlier_launch_does_not_start_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "by-hand", f"corral-d.{LAUNCH}"):
        monkeypatch.setenv("SLURM_JOB_NAME", name)
        slurm_start.refuse_other_launch({"launch_id": LAUNCH}, "/home/d")
    monkeypatch.setenv("SLURM_JOB_NAME", f"corral-d.{'f' * 16}")
    with pytest.raises(SystemExit, match="is now of launch"):
        slurm_start.refuse_other_launch({"launch_id": LAUNCH}, "/home/d")

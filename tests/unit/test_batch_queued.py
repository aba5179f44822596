"""Batches in a queue, without one: the script with a runner, handing on, what is refused, where it is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import LaunchError, UnreachableError
from corral.base.processes import own_identity
from corral.base.record import load_json
from corral.deploy.lifecycle import deployments
from corral.deploy.slurm import commands
from corral.deploy.slurm.commands import SlurmJob
from corral.deploy.slurm.options import SlurmOptions
from corral.deploy.slurm.script import BatchJob, batch_script
from corral.deploy.targets.slurm import SlurmTarget
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.lab.report.batch import print_status, wait_for_jobs
from corral.use.batch import jobs
from corral.use.batch.batch import BatchResult, run_batch, saved_spec
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.run import BatchState, Quiet, RunSummary
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.inspect import inspect
from corral.use.batch.jobs import OwnDeployment, add_job, cancel_hopeless, is_queued, jobs_of
from corral.use.batch.parts import Participant, claim_path, remove_claims, runners_of
from corral.use.batch.shared import Sharing
from corral.use.batch.spec import BatchServers, BatchSpec, ModelToStart, load_record
from tests.unit.conftest import Corral, Shellcheck

RUNNER = ("env", "CORRAL_HOME=/sh are/corral", "python", "-m", "corral", "batch", "in-job", "/sh are/it's out.jsonl")


WITH_RUNNER = BatchJob("b", "t", "/home/b", SlurmOptions(nodes=2, signal_s=120, runner=RUNNER, requeue=True))


def test_the_script_ends_with_its_runner_and_takes_the_agents_down() -> None:
    script = batch_script(WITH_RUNNER)
    assert "in-job '/sh are/it'\"'\"'s out.jsonl' &" in script
    assert "CORRAL_DRAIN_S=90 " in script
    assert "#SBATCH --requeue\n" in script
    assert script.endswith('wait "$agents"\nexit "$code"\n')
    assert "runner" not in batch_script(BatchJob("b", "t", "/home/b", SlurmOptions(nodes=2)))


def test_the_script_with_a_runner_is_clean(shellcheck: Shellcheck) -> None:
    shellcheck(batch_script(WITH_RUNNER))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A finished small batch that was begun as one on SLURM."""
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"id": n, "prompt": "x"}) + "\n" for n in range(5)))
    more = {"target": "slurm", "target_options": {"partition": "gpu", "time": "1:00:00"}}
    start_model = {"model": "m", "more": more}  # as earlier versions wrote it
    with FakeServer(FakeOptions(model="m", answer_tokens=(1, 2))) as server:
        order = BatchSpec(input=str(rows), output=str(output))
        run_batch(order, BatchServers(urls=(server.url,)), RunnerSettings(), Quiet(), signals=False)
    kept = BatchFolder(output).spec
    body = json.loads(kept.read_text())
    kept.write_text(json.dumps({**body, "urls": [], "offline": start_model}))
    return output


def summary(fine: int, state: BatchState = BatchState.STOPPED) -> RunSummary:
    return RunSummary(state, 5, 0, fine, 0, 5 - fine, 1.0, 0, 0, 0, 0, 0, 0, 0)


def result(fine: int, output: Path) -> BatchResult:
    return BatchResult(summary(fine), str(output), None, "m")


class Handed(SlurmTarget):
    """Hands on without a queue."""

    after: list[str]

    def submit_successor(self, folder: Any, current: str) -> str:
        self.after = [*getattr(self, "after", []), current]
        return f"{int(current) + 1}"


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Handed:
    made = Handed(SlurmOptions())
    monkeypatch.setattr("corral.deploy.lifecycle.deployments.target_of", lambda _: made)
    record = deployments.Record("d", "l1", "m", "m", "slurm", 0.0, own_identity())
    monkeypatch.setattr(
        jobs, "load_json", lambda kind, path: record if kind is deployments.Record else load_json(kind, path)
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return made


def test_a_job_is_handed_on_as_often_as_allowed_and_only_when_it_helps(output: Path, target: Handed) -> None:
    own = OwnDeployment("d", max_jobs=2)
    folder = BatchFolder(output)
    add_job(folder, "7", "d", target)
    add_job(folder, "3", "another", target)
    none = jobs._queue_again(str(output), own, result(0, output))
    assert not none.next_job
    assert "finished no row in its time" in none.text
    done = jobs._queue_again(str(output), own, result(3, output))
    assert (done.next_job, target.after) == ("8", ["7"])
    assert [job.id for job in jobs_of(folder, "d")] == ["7", "8"]
    last = jobs._queue_again(str(output), own, result(3, output))
    assert not last.next_job
    assert "corral batch resume" in last.text


def test_where_it_runs_is_kept_and_found_again(output: Path) -> None:
    _, servers = saved_spec(str(output))
    assert servers.start_model == ModelToStart(
        "m", more=dict(servers.start_model.more if servers.start_model else {})
    )
    assert is_queued(servers)
    request = servers.start_model.request("x", target_options={"time": "2:00:00"})
    assert (request.target, request.model, request.target_options, request.patience.restarts) == (
        "slurm",
        "m",
        {"time": "2:00:00"},
        3,
    )
    assert not is_queued(BatchServers(start_model=ModelToStart("m")))


def test_resume_queues_as_many_jobs_as_before(
    output: Path, corral: Corral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(FakeOptions(model="m")) as server:
        order = BatchSpec(input=str(tmp_path / "rows.jsonl"), output=str(output))
        run_batch(order, BatchServers(urls=(server.url,), jobs=2), RunnerSettings(), Quiet(), signals=False)
    body = json.loads(BatchFolder(output).spec.read_text())
    more = {"target": "slurm", "target_options": {}}
    BatchFolder(output).spec.write_text(json.dumps({**body, "urls": [], "start_model": {"model": "m", "more": more}}))
    asked: list[int] = []

    def submit(spec: Any, servers: BatchServers, *_: object) -> jobs.SubmittedBatch:
        asked.append(servers.jobs)
        return jobs.SubmittedBatch(spec.output, 5, ("7",))

    monkeypatch.setattr(jobs, "submit", submit)
    assert corral("batch", "resume", str(output)).code == 0
    assert corral("batch", "resume", str(output), "--jobs", "3").code == 0
    assert asked == [2, 3]


def test_status_shows_jobs_and_never_calls_unknown_failed(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = load_record(str(output))
    add_job(folder, "41", "d", SlurmTarget(SlurmOptions()))
    folder.shared.mkdir()  # not put together yet
    known: dict[str, SlurmJob | None] = {"41": SlurmJob("41", "PENDING", "Priority")}
    monkeypatch.setattr(commands, "find_job", known.get)
    now = inspect(str(output))
    assert (now.state, now.jobs[0].waiting) == ("queued", True)
    assert "jobs of higher priority" in now.jobs[0].text

    def silent(id: str) -> SlurmJob:
        raise UnreachableError("no answer", "later")

    with monkeypatch.context() as patch:
        patch.setattr(commands, "find_job", silent)
        assert (inspect(str(output)).state, inspect(str(output)).jobs[0].ended) == ("unknown", None)
    known["41"] = SlurmJob("41", "CANCELLED", nodes="n1", cancelled_by="root")
    now = inspect(str(output))
    assert "was cancelled by root" in now.reason
    known["41"] = None  # SLURM forgets its jobs after some minutes
    assert "was cancelled by root" in inspect(str(output)).reason


def test_a_dead_job_stays_in_sight_beside_those_that_followed(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = load_record(str(output))
    folder.shared.mkdir()
    for id in ("41", "42", "43"):
        add_job(folder, id, "d", SlurmTarget(SlurmOptions()))
    known = {"41": SlurmJob("41", "NODE_FAIL", nodes="n1"), "42": SlurmJob("42", "COMPLETED")}
    monkeypatch.setattr(commands, "find_job", lambda id: known.get(id) or SlurmJob(id, "RUNNING", nodes="n2"))
    print_status(inspect(str(output)), as_json=False)
    said = capsys.readouterr().out
    assert "job    41 lost a node of n1" in said
    assert "job    42" not in said
    assert "job    43 runs on n2" in said


def test_a_job_that_can_never_start_is_not_waited_for(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = load_record(str(output))
    folder.shared.mkdir()
    add_job(folder, "41", "d", SlurmTarget(SlurmOptions()))
    monkeypatch.setattr(commands, "find_job", lambda id: SlurmJob(id, "PENDING", "DependencyNeverSatisfied"))
    cancelled: list[str] = []
    monkeypatch.setattr(commands, "cancel", cancelled.append)
    now = inspect(str(output))
    assert (now.jobs[0].ended, now.jobs[0].over, now.jobs[0].reason) == (False, True, "cannot_start")
    with pytest.raises(LaunchError, match="DependencyNeverSatisfied"):
        wait_for_jobs(str(output))
    cancel_hopeless(folder)
    assert cancelled == ["41"]


def test_the_next_life_takes_over_at_once(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "out.jsonl")
    folder.create()
    folder.shared.mkdir()
    lost, other = Participant(folder), Participant(folder)
    lost.join()
    other.join()
    elsewhere = {"pid": 1, "host": "elsewhere", "boot_id": "", "start_ticks": 0}
    lost.part.holder.write_text(json.dumps(elsewhere))
    assert lost.claim(0)
    assert other.claim(1)
    remove_claims(lost.part)
    assert not claim_path(folder, 0).exists()
    assert claim_path(folder, 1).exists()
    assert len(runners_of(folder)) == 1
    lost.touch()
    assert lost.lost  # were it still alive, it would see that it counts no more


def test_several_runners_do_not_each_start_a_model_here(corral: Corral, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x"}\n')
    argv = ["batch", str(rows), "-o", str(tmp_path / "o.jsonl")]
    done = corral(*argv, "--start", str(corral.model), "--jobs", "2")
    assert done.code == 2
    assert "corral up" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert corral(*argv, "--hosts", "a,b").code == 2
    assert corral(*argv, "--partition", "gpu").code == 2
    both = corral(*argv, "--start", "x", "--hosts", "a", "--partition", "gpu")
    assert "Leave one of them out" in both.err


def test_a_runner_of_a_scheduler_is_not_counted() -> None:
    assert Sharing(1, counted=False).wanted
    assert not Sharing(1).wanted

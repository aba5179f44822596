"""Jobs that follow each other: when a successor is due, that there is exactly one, and how a chain ends."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral.base.errors import ConflictError, CorralError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.base.processes import Identity, own_identity
from corral.base.record import dump_json, load_json
from corral.client.client import CHAT, Client
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import Reason, State
from corral.deploy.lifecycle import bringup, deployments
from corral.deploy.lifecycle.bringup import ClaimHooks
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.lifecycle.deployments import Record, Status, Timings
from corral.deploy.lifecycle.watching import Lines
from corral.deploy.slurm.options import SlurmOptions
from corral.deploy.slurm.script import BatchJob, batch_script
from corral.deploy.targets.base import Lease, Queue
from corral.deploy.targets.slurm import _renewer
from corral.serve.fleet import keeper
from corral.serve.fleet.chain import (
    ADOPTED,
    OldChain,
    chain_of,
    close_chain,
    first_of,
    members,
    open_chain,
    read_chain,
    read_members,
    refuse_held_name,
    successor_name,
)
from corral.serve.fleet.keeper import Keeper, keep
from corral.serve.fleet.pace import Pacer
from corral.serve.fleet.record import (
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayAddress,
    fleet_lock,
    read_fleet,
    write_fleet,
)
from corral.serve.fleet.start import bring_up_chain, create_chain, load_request
from corral.serve.fleet.steps import MemberFacts, next_steps
from corral.serve.gateway.process import proxy_process
from tests.chains import write_chain, write_old_chain
from tests.unit.conftest import Corral, Shellcheck

NOW = 1_000_000.0
LEAD_S = 1000.0
SERVING = MemberFacts("m", State.READY, last_request_s=NOW + 3600, served=True)


def chain_of_jobs(jobs: int, max_jobs: int | None = None, never_ready: bool = False) -> Fleet:
    """A chain whose newest job is alone; all before it have ended."""
    names = [successor_name("m", number) for number in range(1, jobs + 1)]
    ended = [FleetMember(name, ended=True, never_ready=never_ready) for name in names[:-1]]
    jobs_so_far = (*ended, FleetMember(names[-1]))
    return Fleet("m", "m", 1, 1, 1, 0.0, jobs_so_far, keep=True, chain=True, max_jobs=max_jobs)


ALONE = chain_of_jobs(1)
FOLLOWED = ["forget", "add"]


@pytest.mark.parametrize(
    ("changes", "chain", "acts", "says"),
    [
        ({}, ALONE, [], ""),
        ({"last_request_s": NOW + 1001}, ALONE, [], ""),
        ({"last_request_s": NOW + 1000}, ALONE, ["add"], "1 job nears its end, and a replacement takes 1000 s"),
        ({"last_request_s": NOW - 5}, ALONE, ["add"], ""),
        ({"last_request_s": NOW + 10, "state": State.DRAINING}, ALONE, ["add"], ""),
        ({"last_request_s": NOW + 10}, chain_of_jobs(3, 3), [], ""),
        ({"last_request_s": NOW + 10}, chain_of_jobs(2, 3), ["add"], ""),
        ({"last_request_s": None}, ALONE, [], ""),  # SLURM does not say when it ends
        ({"state": State.UNKNOWN, "last_request_s": None}, ALONE, [], ""),
        ({"state": State.QUEUED, "last_request_s": NOW}, ALONE, [], ""),
        ({"state": State.LOADING, "last_request_s": NOW}, ALONE, [], ""),
        ({"state": State.STOPPED, "reason": Reason.WALLTIME}, ALONE, FOLLOWED, "time limit"),
        ({"state": State.FAILED, "reason": Reason.NODE_LOST, "served": False}, ALONE, FOLLOWED, "node lost"),
        ({"state": State.FAILED, "reason": Reason.ENGINE_EXITED}, ALONE, FOLLOWED, ""),
        (
            {"state": State.FAILED, "reason": Reason.OUT_OF_MEMORY, "served": False},
            ALONE,
            ["close"],
            "never ready: out of mem",
        ),
        ({"state": State.STOPPED, "reason": Reason.REQUESTED}, ALONE, ["close"], "ended: requested"),
        ({"state": State.STOPPED, "reason": Reason.CANCELLED}, ALONE, ["close"], "cancelled"),
        (
            {"state": State.STOPPED, "reason": Reason.CANCELLED, "text": "job 7 was cancelled by ann"},
            ALONE,
            ["close"],
            "m was ended: cancelled (job 7 was cancelled by ann)",
        ),
        (
            {"state": State.QUEUED, "reason": Reason.CANNOT_START, "text": "job 7 waits: PartitionDown"},
            ALONE,
            ["close"],
            "m cannot start: job 7 waits",
        ),
        ({"state": State.STOPPED, "reason": Reason.WALLTIME}, chain_of_jobs(3, 3), ["close"], "the last of 3"),
        (
            {"state": State.FAILED, "reason": Reason.NODE_LOST, "served": False},
            chain_of_jobs(5, never_ready=True),
            ["close"],
            "last 5",
        ),
        (
            {"state": State.FAILED, "reason": Reason.NODE_LOST, "served": False},
            chain_of_jobs(4, never_ready=True),
            FOLLOWED,
            "node lost",
        ),
        # begun by a keeper that is gone: made again, and not counted twice
        (
            {"state": State.STOPPED, "reason": Reason.INTERRUPTED, "served": False},
            chain_of_jobs(3, 3),
            ["start"],
            "interrupted",
        ),
        (  # the folder of the first one holds the chain
            {"state": State.STOPPED, "reason": Reason.INTERRUPTED, "served": False},
            ALONE,
            ["close"],
            "m was never submitted",
        ),
    ],
)
def test_what_is_due(changes: dict[str, Any], chain: Fleet, acts: list[str], says: str) -> None:
    newest = chain.members[-1].name
    steps = next_steps(chain, {newest: replace(SERVING, name=newest, **changes)}, NOW, LEAD_S)
    assert [step.act.value for step in steps] == acts
    assert says in " ".join(step.why for step in steps)
    names = [step.member for step in steps if step.act == "add"]
    assert names == ([successor_name("m", len(chain.members) + 1)] if "add" in acts else [])


def test_a_job_with_a_successor_leaves_once_that_is_ready_and_is_never_stopped() -> None:
    """Its clients may use its own address, and its job ends by itself."""
    chain = replace(ALONE, members=(FleetMember("m"), FleetMember("m~2")))
    facts = {"m": replace(SERVING, last_request_s=NOW + 2000), "m~2": MemberFacts("m~2", State.LOADING)}
    assert next_steps(chain, facts, NOW, LEAD_S) == []  # though its end is far away again, by a newer measurement
    facts["m~2"] = replace(SERVING, name="m~2")
    assert [(step.act, step.member) for step in next_steps(chain, facts, NOW, LEAD_S)] == [("leave", "m")]
    unknown = {**facts, "m": MemberFacts("m", State.UNKNOWN), "m~2": MemberFacts("m~2", State.LOADING)}
    assert next_steps(chain, unknown, NOW, LEAD_S) == []
    chain = replace(ALONE, members=(FleetMember("m", leaving=True), FleetMember("m~2")))
    assert next_steps(chain, facts, NOW, LEAD_S) == []
    facts["m"] = MemberFacts("m", State.STOPPED, Reason.CANCELLED)  # only the newest one's end says what follows
    assert [(step.act, step.member) for step in next_steps(chain, facts, NOW, LEAD_S)] == [("forget", "m")]


def status_of(
    folder: DeploymentFolder, state: State, reason: Reason | None = None, ready_s: float | None = 5
) -> Status:
    return Status(
        folder.name, state, reason, "", "", "", None, None, "m", "", "slurm", 2e9, 0, None, Timings(ready_s=ready_s)
    )


class FakeQueue:
    """A scheduler whose jobs end when the test says so."""

    last_request_s = 0.0

    def check(self, plan: Any) -> None: ...

    def script(self, spec: Any, folder: Any) -> str:
        return ""

    def templates(self, spec: Any, folder: Any) -> dict[Any, str]:
        return {}

    def sizes(self) -> tuple[int, ...]:
        return ()

    def resized(self, nodes: int) -> Any: ...

    def job_of(self, folder: DeploymentFolder) -> str:
        return "1" if folder.job.exists() else ""

    def submit_successor(self, folder: DeploymentFolder, current: str) -> str:
        return "2"

    def with_renewal(self, options: Any) -> Any: ...

    def with_keeper(self, options: Any) -> Any: ...

    def with_runner(self, options: Any, runner: Any) -> Any: ...

    def own_job(self, environ: Any) -> Any: ...

    def is_placed(self, folder: Any, own: Any) -> Any: ...

    def job_status(self, id: str) -> Any: ...

    def cancel_job(self, id: str) -> None: ...

    def lease(self, folder: DeploymentFolder) -> Lease:
        return Lease(NOW - 10, NOW, self.last_request_s)


def record_of(folder: DeploymentFolder) -> Record:
    return Record(folder.name, "id", "m", "m", "slurm", NOW, own_identity())


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> DeploymentFolder:
    """A kept deployment that is ready and whose time is up; submissions make folders only."""
    folder = DeploymentFolder.of("it's kept")
    folder.create()
    write_atomic(folder.record, dump_json(record_of(folder)))
    create_chain(folder, DeployRequest(model="m", target_options={"renew_margin_s": "5"}), 4)
    folder.job.write_text("{}")
    monkeypatch.setattr(deployments, "status", lambda one: status_of(one, State.READY))
    monkeypatch.setattr(deployments, "target_of", lambda _: FakeQueue())
    monkeypatch.setattr(bringup, "bring_up", submitted)
    for pause in ("INTERVAL_S", "CHAIN_INTERVAL_S", "HANDOVER_INTERVAL_S", "STANDBY_S", "REFUSED_PAUSE_S"):
        monkeypatch.setattr(keeper, pause, 0.01)
    return folder


def chain_at(folder: DeploymentFolder) -> FleetFolder:
    return FleetFolder(folder.path)


def jobs_of(folder: DeploymentFolder) -> list[str]:
    return [one.name for one in members(folder)]


def submitted(request: DeployRequest, report: Any, wait: bool, hooks: ClaimHooks) -> Status:
    assert not wait
    assert request.port is None
    assert request.name
    hooks.refuse(request.name)
    folder = DeploymentFolder.of(request.name)
    assert not folder.path.exists()
    folder.create()
    write_atomic(folder.record, dump_json(record_of(folder)))
    decision: Any = None
    hooks.prepare(folder, decision)
    time.sleep(0.05)  # in which others look
    folder.job.write_text("{}")
    return status_of(folder, State.QUEUED)


def quiet(_: str) -> None: ...


def test_the_fake_is_a_queue() -> None:
    assert isinstance(FakeQueue(), Queue)


def test_many_keepers_submit_one_successor(first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(one: DeploymentFolder) -> Status:
        return status_of(one, State.READY if one.name == first.name else State.LOADING)

    monkeypatch.setattr(deployments, "status", status)
    said: list[str] = []
    keepers = [
        threading.Thread(target=keep, args=(chain_at(first), said.append, lambda: True, True)) for _ in "123456"
    ]
    for one in keepers:
        one.start()
    for one in keepers:
        one.join()
    assert jobs_of(first) == ["it's kept", "it's kept~2"]
    assert len([text for text in said if "a replacement takes" in text]) == 1
    assert not chain_at(first).lock.exists()
    assert not chain_at(first).keeper.exists()


def test_a_second_keeper_takes_over_when_the_first_ends(first: DeploymentFolder) -> None:
    """Each job of a chain has one, and a login node may have another."""
    running, said = [True, True], [list[str](), list[str]()]
    ends: list[str] = []
    write_fleet(chain_at(first), replace(read_fleet(chain_at(first)), max_jobs=1))

    def run(number: int) -> None:
        ends.append(keep(chain_at(first), said[number].append, lambda: running[number]))

    keepers = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for one in keepers:
        one.start()
        time.sleep(0.2)
    assert said[0]
    assert not said[1]
    running[0] = False
    keepers[0].join()
    until = time.monotonic() + 10
    while not said[1] and time.monotonic() < until:
        time.sleep(0.01)
    assert said[1][0].startswith("it's kept is ready")
    running[1] = False
    keepers[1].join()
    assert ends == ["told to stop; the members keep running"] * 2


def test_what_a_dead_keeper_began_is_made_again_under_the_same_name(first: DeploymentFolder) -> None:
    write_chain(first.name, "it's kept~2", max_jobs=2)
    half = members(first)[1]
    half.create()
    write_atomic(half.record, dump_json(record_of(half)))
    keep(chain_at(first), quiet, once=True)
    assert jobs_of(first) == ["it's kept", "it's kept~2"]
    assert half.job.exists()


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_that_a_dead_keeper_submitted_is_not_submitted_again(
    first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    write_chain(first.name, "it's kept~2", max_jobs=2)
    half = members(first)[1]
    half.create()
    write_atomic(half.record, dump_json(record_of(half)))

    def job_of(_: FakeQueue, folder: DeploymentFolder) -> str:
        if not answers:
            raise UnreachableError("SLURM's controller does not answer.", "")
        folder.job.write_text("{}")  # adopted
        return "7"

    monkeypatch.setattr(FakeQueue, "job_of", job_of)
    monkeypatch.setattr(bringup, "bring_up", lambda *_, **__: pytest.fail("submitted again"))
    said: list[str] = []
    running = iter([True, True, False])
    keep(chain_at(first), said.append, lambda: next(running, False))
    assert half.job.exists() == answers
    assert half.record.exists()
    assert jobs_of(first) == ["it's kept", "it's kept~2"]


def test_a_chain_ends_at_its_last_job(first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(6):
        keep(chain_at(first), quiet, once=True)
    assert jobs_of(first) == ["it's kept", "it's kept~2", "it's kept~3", "it's kept~4"]
    assert not read_fleet(chain_at(first)).closed
    monkeypatch.setattr(deployments, "status", lambda one: status_of(one, State.STOPPED, Reason.WALLTIME))
    assert keep(chain_at(first), quiet) == "it's kept~4 was the last of 4"
    assert [one.state for one in read_members(first)] == [State.STOPPED] * 4


def test_a_silent_controller_is_waited_for_and_a_refusal_ends_the_chain(
    first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[CorralError] = [UnreachableError("no answer.", "")] * 9 + [UsageError("sbatch refused.", "")] * 9

    def refuses(*_: object, **__: object) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(bringup, "bring_up", refuses)
    said: list[str] = []
    assert keep(chain_at(first), said.append) == "sbatch refused."
    assert len([text for text in said if text.endswith("no answer.")]) == 9
    assert len(answers) == 4


def test_a_deployment_that_cannot_be_read_is_left_alone(
    first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_: object) -> Status:
        raise UnreachableError("SLURM does not answer.", "")

    monkeypatch.setattr(deployments, "status", silent)
    assert keep(chain_at(first), quiet, once=True) == "it's kept is unknown"
    assert jobs_of(first) == ["it's kept"]


def test_a_keeper_ends_with_its_job(first: DeploymentFolder) -> None:
    assert keep(chain_at(first), quiet, wanted=lambda: False) == "told to stop; the members keep running"
    assert jobs_of(first) == ["it's kept"]


def test_a_wait_is_told_once_for_each_state(first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the figures in it change."""
    monkeypatch.setattr(FakeQueue, "last_request_s", time.time() + 3600)
    said: list[str] = []
    one = Keeper(chain_at(first), said.append)
    for state in (State.QUEUED, State.QUEUED, State.READY, State.READY):
        monkeypatch.setattr(deployments, "status", lambda folder, state=state: status_of(folder, state))
        assert not one.check(read_fleet(chain_at(first)))
        one.pacer.leads["more"] = (0.0, 600.0)
    assert said[0] == "it's kept is queued"
    assert len(said) == 2
    assert said[1].startswith("it's kept is ready for 3600 s more; a successor needs ")


def test_a_chain_is_checked_no_later_than_something_is_due(
    first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Keeper(chain_at(first), quiet)
    one.pacer.leads = {"m": (100.0, 600.0)}  # and a margin of 5 s
    fleet = read_fleet(chain_at(first))
    assert one.pacer.replacement_s == 705
    monkeypatch.setattr(keeper, "CHAIN_INTERVAL_S", 15.0)
    one.facts = {"m": replace(SERVING, last_request_s=time.time() + 709)}
    assert one.pause_s(fleet, acted=False, once=False) == pytest.approx(4, abs=0.5)
    assert one.pause_s(fleet, acted=True, once=False) == 0
    one.facts = {"m": replace(SERVING, last_request_s=time.time() + 3600)}
    assert one.pause_s(fleet, acted=False, once=False) == 15
    one.facts = {"m": replace(SERVING, last_request_s=time.time() - 5)}  # of a chain's last job
    assert one.pause_s(fleet, acted=False, once=False) == keeper.INTERVAL_S > 0


def test_how_early_a_successor_is_submitted(first: DeploymentFolder) -> None:
    pacer = Pacer(chain_at(first))
    assert pacer.replacement_s == 900  # nothing was measured, and there is no plan
    pacer.leads = {"m": (100.0, 600.0)}
    assert pacer.replacement_s == LEAD_S
    pacer.leads = {"m": (0.0, 30.0)}
    assert pacer.replacement_s == 90
    assert Pacer(chain_at(first), margin_s=0.0, leads={"m": (100.0, 600.0)}).replacement_s == 700


def test_the_first_of_a_chain_is_started_with_its_record(
    clean_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claimed(request: DeployRequest, report: Any, wait: bool, hooks: ClaimHooks) -> Status:
        hooks.refuse("llama")
        folder = DeploymentFolder.of("llama")
        folder.create()
        decision: Any = SimpleNamespace(name="llama", served_name="l", source=SimpleNamespace(name="llama"))
        hooks.prepare(folder, decision)
        return status_of(folder, State.QUEUED)

    monkeypatch.setattr(bringup, "bring_up", claimed)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    bring_up_chain(DeployRequest(model="weights", port=8000), 3, Lines(quiet=True), wait=False)
    folder = DeploymentFolder.of("llama")
    chain = read_chain(folder)
    assert chain is not None
    assert (chain.chain, chain.keep, chain.max_jobs, chain.model, jobs_of(folder)) == (True, True, 3, "l", ["llama"])
    request = load_request(chain_at(folder))  # a later job may be submitted from elsewhere, beside this one
    assert (request.model, request.name, request.port) == (str(tmp_path / "weights"), "llama", None)


def test_a_keeper_ends_where_its_chain_was_deleted(first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def deleted() -> bool:
        shutil.rmtree(first.path)
        return True

    assert keep(chain_at(first), quiet, wanted=deleted) == "its folder is gone"


def test_closing_a_chain(first: DeploymentFolder) -> None:
    write_fleet(chain_at(first), replace(read_fleet(chain_at(first)), max_jobs=2))
    keep(chain_at(first), quiet, once=True)
    assert [one.name for one in close_chain(first, "ended")] == ["it's kept~2"]
    assert keep(chain_at(first), quiet) == "ended"
    with pytest.raises(ConflictError, match='kept~2" follows'):
        refuse_held_name(first.name)


def test_a_deployment_that_is_not_kept(first: DeploymentFolder) -> None:
    chain_at(first).record.unlink()
    with pytest.raises(UsageError, match="--renew"):
        open_chain(first)


def test_a_successor_has_the_chains_key_and_a_request_comes_back_from_its_file(first: DeploymentFolder) -> None:
    keep(chain_at(first), quiet, once=True)
    successor = DeploymentFolder.of("it's kept~2")
    assert successor.key.read_text() == first.key.read_text()
    assert successor.key.stat().st_mode & 0o777 == 0o600
    assert chain_of("it's kept~2") == "it's kept"
    assert chain_of("a~b") == "a~b"
    request = DeployRequest(
        model="m", target_options={"time": "1:00", "extra": {"a": 1}}, fixed={"tensor": 2}, extra_args=("--x",)
    )
    write_atomic(chain_at(first).request, dump_json(request))
    assert load_request(chain_at(first)) == request


def test_a_lock_of_a_node_that_is_gone_grows_old(first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(chain_at(first).lock, dump_json(Identity(1, "elsewhere", "x", 1)))
    monkeypatch.setattr("corral.serve.fleet.record.OLD_LOCK_S", -1.0)
    with fleet_lock(chain_at(first)):
        pass
    assert not chain_at(first).lock.exists()


def test_a_chain_of_an_earlier_version_is_shown_and_ended(corral: Corral) -> None:
    for name in ("old", "old~2"):
        assert corral("up", str(corral.model), "--name", name, "--context", "128").code == 0
    folder = write_old_chain("old", "old~2")
    assert first_of("old~2") == "old"
    assert "followed by old~2 (ready)" in " ".join(corral("status", "old").out.split())
    assert corral("status", "old", "--json").json()["followed_by"] == [{"name": "old~2", "state": "ready"}]
    assert [row["name"] for row in corral("ps", "--json").json()] == ["old", "old~2"]
    refused = corral("up", str(corral.model), "--name", "old", "--replicas", "2")
    assert refused.code == 4
    done = corral("down", "old")
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["old~2: stopped", "old: stopped"]
    assert json.loads((folder.path / "successors.json").read_text())["closed"] == "ended by `corral down`"
    assert "no more: ended by `corral down`" in corral("status", "old").out


def test_a_chain_of_an_earlier_version_is_kept_by_this_one(first: DeploymentFolder) -> None:
    chain_at(first).record.unlink()
    write_old_chain(first.name, "it's kept~2")
    second = DeploymentFolder.of("it's kept~2")
    second.create()
    write_atomic(second.record, dump_json(record_of(second)))
    second.job.write_text("{}")
    chain = open_chain(first)
    assert load_request(chain).model == "m"  # keys that are no longer written are passed over
    assert (
        load_json(OldChain, first.path / "successors.json").closed == ADOPTED
    )  # its own keeper submits nothing more
    assert open_chain(first) == chain
    keep(chain, quiet, once=True)
    assert jobs_of(first) == ["it's kept", "it's kept~2", "it's kept~3"]
    found = read_chain(first)
    assert found is not None
    assert (found.model, found.max_jobs, found.closed) == ("m", 3, "")


KEPT_JOB = BatchJob(
    "m", "t", "/shared/m", SlurmOptions(), renewer="CORRAL_HOME=/shared /opt/python -m corral renew m"
)


def test_the_script_of_a_kept_job() -> None:
    script = batch_script(KEPT_JOB)
    assert 'renew m --while $$ >>"$folder/renewal.log" 2>&1 &\n' in script
    assert script.endswith('renew m --once >>"$folder/renewal.log" 2>&1\nexit "$code"\n')


def test_the_script_of_a_job_with_the_keeper_of_its_fleet(shellcheck: Shellcheck) -> None:
    """It stands by while the job runs, and starts nothing once its engine has ended: another keeper does."""
    options = SlurmOptions.read({"keeper": "true"})
    renewer = _renewer("herd-2", options)
    assert renewer.endswith(" -m corral fleet keep --in-job herd-2")
    script = batch_script(BatchJob("herd-2", "t", "/shared/m", options, renewer, renews=options.renew))
    assert 'herd-2 --while $$ >>"$folder/renewal.log" 2>&1 &\n' in script
    assert "--once" not in script
    shellcheck(script)
    assert _renewer("herd-2", SlurmOptions()) == ""


def test_the_script_of_a_kept_job_is_clean(shellcheck: Shellcheck) -> None:
    shellcheck(batch_script(KEPT_JOB))


def test_renew_needs_a_time_limit(corral: Corral) -> None:
    done = corral("up", str(corral.model), "--renew")
    assert done.code == 2
    assert "jobs of a scheduler" in done.err


def test_the_proxys_port_stays(first: DeploymentFolder) -> None:
    port = proxy_process(first, "127.0.0.1", None).port
    assert port == proxy_process(first, "127.0.0.1", None).port
    write_atomic(first.proxy, dump_json(GatewayAddress("127.0.0.1", 18999)))
    assert proxy_process(first, "127.0.0.1", None).port == 18999
    assert proxy_process(first, "127.0.0.1", 7777).port == 7777
    write_atomic(first.proxy, dump_json(GatewayAddress("127.0.0.1", 18999, own_identity())))
    with pytest.raises(ConflictError, match="is already running"):
        proxy_process(first, "127.0.0.1", None)


def test_the_proxy_as_a_command(corral: Corral) -> None:
    assert corral("up", str(corral.model), "--name", "here").code == 0
    folder = DeploymentFolder.of("here")
    with corral.start("proxy", "here", "--json") as proxy:
        assert proxy.stderr is not None
        url = proxy.stderr.readline().split()[0]
        assert proxy.stderr.readline() == f"export OPENAI_BASE_URL={url} OPENAI_API_KEY=$(cat {folder.key})\n"
        assert load_json(GatewayAddress, folder.proxy).holder is not None
        again = corral("proxy", "here")
        assert again.code == 4
        assert url.removesuffix("/v1") in again.err
        with Client(Endpoint(url, "tiny", str(folder.key))) as client:
            question = {"messages": [{"role": "user", "content": "Hello"}]}
            assert client.request_sync(CHAT, question).text == "Paris."
            page = client.page_sync("/proxy/status").json()
        assert (page["current"], page["figures"]["answered"]) == ("here", 1)
        assert corral("env", "here").out.startswith(f"export OPENAI_BASE_URL={url}\n")
        write_chain("here", "here~2", closed="enough")
        shown = " ".join(corral("status", "here").out.split())  # the column is as wide as its longest name
        assert "followed by here~2 (unknown); no more: enough" in shown
        FleetFolder(folder.path).record.unlink()
        proxy.send_signal(signal.SIGINT)
        out, _ = proxy.communicate(timeout=120)
    assert proxy.returncode == 0
    assert '"failed": 0' in out
    assert load_json(GatewayAddress, folder.proxy).holder is None
    assert folder.key.read_text().strip() not in out

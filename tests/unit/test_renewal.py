"""Jobs that follow each other: when a successor is due, that there is exactly one, and how a chain ends."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from corral.base.errors import ConflictError, CorralError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.base.processes import Identity, own_identity
from corral.base.record import dump_json, load_json
from corral.client.client import CHAT, Client
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.fleet import GatewayAddress
from corral.deploy.deployment.folder import DeploymentFolder, chain_of
from corral.deploy.deployment.state import Reason, State
from corral.deploy.lifecycle import bringup, deployments, renewal
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.lifecycle.deployments import Record, Status, Timings
from corral.deploy.lifecycle.renewal import Facts, next_step, renew
from corral.deploy.lifecycle.successors import (
    Chain,
    all_standings,
    chain_lock,
    close_chain,
    members,
    read_chain,
    refuse_living_chain,
    write_chain,
)
from corral.deploy.slurm.options import SlurmOptions
from corral.deploy.slurm.script import BatchJob, batch_script
from corral.deploy.targets.base import Lease, Queue
from corral.serve.gateway.process import proxy_process
from tests.unit.conftest import Corral, Shellcheck

NOW = 1_000_000.0
SERVING = Facts(NOW, "m", State.READY, served=True, last_request_s=NOW + 3600, queue_s=100, load_s=600)


@pytest.mark.parametrize(
    ("changes", "what", "says"),
    [
        ({}, "wait", "serves for 3600 s more"),
        ({"last_request_s": NOW + 1001}, "wait", "1001 s more"),
        ({"last_request_s": NOW + 1000}, "submit", "a successor needs 1000 (queue 100 s, load 600 s)"),
        ({"last_request_s": NOW + 701, "margin_s": 0.0}, "wait", ""),
        ({"last_request_s": NOW - 5}, "submit", ""),
        ({"last_request_s": NOW + 10, "state": State.DRAINING}, "submit", ""),
        ({"last_request_s": NOW + 10, "jobs": 3, "max_jobs": 3}, "wait", "the last of 3"),
        ({"last_request_s": NOW + 10, "jobs": 2, "max_jobs": 3}, "submit", ""),
        ({"last_request_s": None}, "wait", ""),  # SLURM does not say when it ends
        ({"state": State.UNKNOWN, "last_request_s": None}, "wait", "unknown"),
        ({"state": State.QUEUED, "last_request_s": NOW}, "wait", "queued"),
        ({"state": State.LOADING, "last_request_s": NOW}, "wait", "loading"),
        ({"state": State.STOPPED, "reason": Reason.WALLTIME}, "submit", "walltime"),
        ({"state": State.FAILED, "reason": Reason.NODE_LOST, "served": False}, "submit", "node lost"),
        ({"state": State.FAILED, "reason": Reason.ENGINE_EXITED}, "submit", ""),
        (
            {"state": State.FAILED, "reason": Reason.OUT_OF_MEMORY, "served": False},
            "close",
            "never ready: out of mem",
        ),
        ({"state": State.STOPPED, "reason": Reason.REQUESTED}, "close", "ended: requested"),
        ({"state": State.STOPPED, "reason": Reason.CANCELLED}, "close", "cancelled"),
        (
            {"state": State.STOPPED, "reason": Reason.CANCELLED, "text": "job 7 was cancelled by ann"},
            "close",
            "m was ended: cancelled (job 7 was cancelled by ann)",
        ),
        (
            {"state": State.QUEUED, "reason": Reason.CANNOT_START, "text": "job 7 waits: PartitionDown"},
            "close",
            "m cannot start: job 7 waits",
        ),
        ({"state": State.STOPPED, "reason": Reason.WALLTIME, "jobs": 3, "max_jobs": 3}, "close", "the last of 3"),
        ({"state": State.FAILED, "reason": Reason.NODE_LOST, "served": False, "unlucky": 5}, "close", "last 5"),
        # begun by somebody who is gone: made again, and not counted twice
        (
            {"state": State.STOPPED, "reason": Reason.INTERRUPTED, "served": False, "jobs": 3, "max_jobs": 3},
            "submit",
            "",
        ),
    ],
)
def test_what_is_due(changes: dict[str, Any], what: str, says: str) -> None:
    step = next_step(replace(SERVING, **changes))
    assert step.action == what
    assert says in step.why
    assert 0 < step.wait_s <= 15 or what != "wait"


def test_a_wait_is_told_once_whatever_the_name_says() -> None:
    """Two chains whose names begin alike, and figures that change: the topic decides, not words of the sentence."""
    one = next_step(replace(SERVING, name="waits for x"))
    assert next_step(replace(SERVING, name="waits for x", now_s=NOW + 60)).is_told_as(one.topic)
    assert not next_step(replace(SERVING, name="waits for y")).is_told_as(one.topic)
    assert not next_step(replace(SERVING, name="waits for x", state=State.QUEUED)).is_told_as(one.topic)


def test_a_look_is_no_later_than_what_is_due() -> None:
    assert next_step(replace(SERVING, last_request_s=NOW + 1004)).wait_s == pytest.approx(4)


def status_of(
    folder: DeploymentFolder, state: State, reason: Reason | None = None, ready_s: float | None = 5
) -> Status:
    return Status(
        folder.name, state, reason, "", "", "", None, None, "m", "", "slurm", 0, 0, None, Timings(ready_s=ready_s)
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
        return "1"

    def submit_successor(self, folder: DeploymentFolder, current: str) -> str:
        return "2"

    def with_renewal(self, options: Any) -> Any: ...

    def with_runner(self, options: Any, runner: Any) -> Any: ...

    def own_job(self, environ: Any) -> Any: ...

    def is_placed(self, folder: Any, own: Any) -> Any: ...

    def job_status(self, id: str) -> Any: ...

    def cancel_job(self, id: str) -> None: ...

    def lease(self, folder: DeploymentFolder) -> Lease:
        return Lease(NOW - 10, NOW, self.last_request_s)


def record_of(folder: DeploymentFolder) -> Record:
    return Record(folder.name, "id", "m", "m", "slurm", NOW, own_identity(), target_options={"renew_margin_s": 5})


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> DeploymentFolder:
    """A kept deployment that is ready and whose time is up; submissions make folders only."""
    folder = DeploymentFolder.of("it's kept")
    folder.create()
    write_atomic(folder.record, dump_json(record_of(folder)))
    write_atomic(folder.request, dump_json(DeployRequest(model="m", name=folder.name, renew=True, port=8000)))
    write_chain(folder, Chain(max_jobs=4))
    folder.job.write_text("{}")
    monkeypatch.setattr(deployments, "status", lambda one: status_of(one, State.READY))
    monkeypatch.setattr(deployments, "target_of", lambda _: FakeQueue())
    monkeypatch.setattr(bringup, "bring_up", submitted)
    monkeypatch.setattr(renewal, "RETRY_S", 0.01)
    return folder


def submitted(request: DeployRequest, report: Any, wait: bool = True) -> None:
    assert not wait
    assert request.port is None
    assert request.name
    folder = DeploymentFolder.of(request.name)
    assert not folder.path.exists()
    folder.create()
    write_atomic(folder.record, dump_json(record_of(folder)))
    time.sleep(0.05)  # in which others look
    folder.job.write_text("{}")


def test_the_fake_is_a_queue() -> None:
    assert isinstance(FakeQueue(), Queue)


def test_many_renewers_submit_one_successor(first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(one: DeploymentFolder) -> Status:
        return status_of(one, State.READY if one.name == first.name else State.LOADING)

    monkeypatch.setattr(deployments, "status", status)
    said: list[str] = []
    renewers = [threading.Thread(target=renew, args=(first, said.append, True)) for _ in range(6)]
    for renewer in renewers:
        renewer.start()
    for renewer in renewers:
        renewer.join()
    assert read_chain(first).successors == ("it's kept~2",)
    assert len([text for text in said if text.startswith("submitting")]) == 1
    assert not first.successors_lock.exists()


def test_what_a_dead_renewal_began_is_made_again_under_the_same_name(first: DeploymentFolder) -> None:
    write_chain(first, Chain(("it's kept~2",), 4))
    half = members(first)[1]
    half.create()
    write_atomic(half.record, dump_json(record_of(half)))
    renew(first, lambda _: None, once=True)
    assert read_chain(first).successors == ("it's kept~2",)
    assert half.job.exists()


def test_a_chain_ends_at_its_last_job(first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(6):
        renew(first, lambda _: None, once=True)
    assert read_chain(first).successors == ("it's kept~2", "it's kept~3", "it's kept~4")
    assert not read_chain(first).closed
    monkeypatch.setattr(deployments, "status", lambda one: status_of(one, State.STOPPED, Reason.WALLTIME))
    assert renew(first, lambda _: None) == "it's kept~4 was the last of 4"
    assert [one.state for one in all_standings(first)] == [State.STOPPED] * 4


def test_a_silent_controller_is_waited_for_and_a_refusal_ends_the_chain(
    first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[CorralError] = [UnreachableError("no answer.", "")] * 9 + [UsageError("sbatch refused.", "")] * 9

    def refuses(request: DeployRequest, report: Any, wait: bool = True) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(bringup, "bring_up", refuses)
    said: list[str] = []
    assert renew(first, said.append) == "sbatch refused."
    assert len([text for text in said if text == "no answer."]) == 9
    assert len(answers) == 9 - renewal.MOST_REFUSALS  # it was not asked again after the last one


def test_a_renewal_ends_with_its_job(first: DeploymentFolder) -> None:
    write_chain(first, Chain(max_jobs=1))
    assert renew(first, lambda _: None, wanted=lambda: False) == "the job that it was for has ended"


def test_closing_a_chain(first: DeploymentFolder) -> None:
    renew(first, lambda _: None, once=True)
    assert [one.name for one in close_chain(first, "ended")] == ["it's kept~2"]
    assert renew(first, lambda _: None) == "ended"
    with pytest.raises(ConflictError, match='kept~2" follows'):
        refuse_living_chain(first.name)


def test_a_deployment_that_is_not_kept(first: DeploymentFolder) -> None:
    first.request.unlink()
    with pytest.raises(UsageError, match="--renew"):
        renew(first, lambda _: None)


def test_a_successor_has_the_chains_key_and_a_wish_comes_back_from_its_file(first: DeploymentFolder) -> None:
    successor = DeploymentFolder.of("it's kept~2")
    successor.create()
    decision: Any = None
    bringup._join_chain(DeployRequest(follows=first.name), decision, successor)
    assert successor.key.read_text() == first.key.read_text()
    assert successor.key.stat().st_mode & 0o777 == 0o600
    assert chain_of("it's kept~2") == "it's kept"
    assert chain_of("a~b") == "a~b"
    request = DeployRequest(
        model="m", target_options={"time": "1:00", "extra": {"a": 1}}, fixed={"tensor": 2}, extra_args=("--x",)
    )
    write_atomic(first.request, dump_json(request))
    assert load_json(DeployRequest, first.request) == request


def test_a_lock_of_a_node_that_is_gone_grows_old(first: DeploymentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(first.successors_lock, dump_json(Identity(1, "elsewhere", "x", 1)))
    monkeypatch.setattr("corral.deploy.lifecycle.successors.OLD_LOCK_S", -1.0)
    with chain_lock(first):
        pass
    assert not first.successors_lock.exists()


KEPT_JOB = BatchJob(
    "m", "t", "/shared/m", SlurmOptions(), renewer="CORRAL_HOME=/shared /opt/python -m corral renew m"
)


def test_the_script_of_a_kept_job() -> None:
    script = batch_script(KEPT_JOB)
    assert 'renew m --while $$ >>"$folder/renewal.log" 2>&1 &\n' in script
    assert script.endswith('renew m --once >>"$folder/renewal.log" 2>&1\nexit "$code"\n')


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
        write_chain(folder, Chain(("here~2",), closed="enough"))
        assert "followed by  here~2 (unknown); no more: enough" in corral("status", "here").out
        folder.successors.unlink()
        proxy.send_signal(signal.SIGINT)
        out, _ = proxy.communicate(timeout=120)
    assert proxy.returncode == 0
    assert '"failed": 0' in out
    assert load_json(GatewayAddress, folder.proxy).holder is None
    assert folder.key.read_text().strip() not in out

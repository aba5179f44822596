"""Asking the nodes of an ssh deployment: nobody is waited for whose answer would change nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.base.errors import UnreachableError
from corral.base.shell import CommandHandle, answering_soon
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.deployment.state import Reason
from corral.deploy.targets import ssh_reports
from corral.deploy.targets.ssh_reports import LogPiece, NodeReport, failure_of, gather, is_away

HOSTS = ("head", "second", "third")
Answer = Callable[[CommandHandle], NodeReport]


class WatchedHandle(CommandHandle):
    """A question that nobody answers, until it is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.is_killed = threading.Event()

    def kill(self) -> None:
        super().kill()
        self.is_killed.set()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_reports, "CommandHandle", WatchedHandle)
    monkeypatch.setattr(ssh_reports, "AGAIN_S", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> DeploymentFolder:
    found = DeploymentFolder(tmp_path / "one")
    for number in range(len(HOSTS)):
        found.rank(number).path.mkdir(parents=True)
    return found


def says(state: str, **details: object) -> Answer:
    event = {"t": 1.0, "kind": "state", "rank": 0, "elapsed_s": 1.0, "state": state, **details}
    data = (json.dumps(event) + "\n").encode()
    return lambda handle: NodeReport(alive=True, pieces={"events.jsonl": LogPiece(0, data)})


def silent(handle: CommandHandle) -> NodeReport:
    assert isinstance(handle, WatchedHandle)
    assert handle.is_killed.wait(60), "it was waited for"
    raise UnreachableError("given up", "")


def unreachable(handle: CommandHandle) -> NodeReport:
    raise UnreachableError("no answer", "")


def ask(answers: dict[str, Answer]) -> ssh_reports.Ask:
    return lambda host, rank, timeout_s, handle: answers[host](handle)


def test_a_command_that_answers_soon_waits_as_long_as_the_node_usually_takes(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted: list[float] = []

    def answer(host: str, rank: RankFolder, timeout_s: float, handle: CommandHandle) -> NodeReport:
        granted.append(timeout_s)
        return NodeReport(alive=True)

    def refuse(host: str, rank: RankFolder, timeout_s: float, handle: CommandHandle) -> NodeReport:
        granted.append(timeout_s)
        raise UnreachableError("no answer", "")

    monkeypatch.setattr(ssh_reports, "within_deadline", lambda usual_s: min(usual_s, 1.0))
    gather(folder, HOSTS[:1], answer)  # it may be far away: nobody has measured that
    gather(folder, HOSTS[:1], answer)  # it answered at once
    (folder.rank(0).path / "answer_s").write_text("0.8")
    gather(folder, HOSTS[:1], refuse)
    gather(folder, HOSTS[:1], answer)  # it did not answer a moment ago
    assert granted == [ssh_reports.REPORT_S, 1.0, pytest.approx(2.4), 1.0]


def test_what_waits_for_something_has_more_time(folder: DeploymentFolder) -> None:
    (folder.rank(0).path / "answer_s").write_text("0.1")
    granted: list[float] = []

    def answer(host: str, rank: RankFolder, timeout_s: float, handle: CommandHandle) -> NodeReport:
        granted.append(timeout_s)
        return NodeReport(alive=True)

    gather(folder, HOSTS[:1], answer)
    with answering_soon():
        gather(folder, HOSTS[:1], answer)
    assert granted[0] == ssh_reports.REPORT_S
    assert granted[1] <= granted[0]


def test_a_lost_node_is_not_waited_for_once_the_head_says_so(folder: DeploymentFolder) -> None:
    told = says("failed", reason="node_lost", failed_rank=1)
    found = gather(folder, HOSTS, ask({"head": told, "second": silent, "third": silent}))
    assert set(found) == {"head"}
    assert not is_away(folder.rank(1))


def test_the_rank_that_failed_is_heard_for_its_log(folder: DeploymentFolder) -> None:
    told = says("failed", reason="engine_exited", failed_rank=1)
    late = threading.Event()

    def slow(handle: CommandHandle) -> NodeReport:
        late.wait(0.2)
        return says("failed", reason="engine_exited")(handle)

    found = gather(folder, HOSTS, ask({"head": told, "second": slow, "third": silent}))
    assert set(found) == {"head", "second"}
    assert folder.rank(1).events.exists()


def test_a_node_whose_agent_was_killed_is_asked_for_the_secrets_there(folder: DeploymentFolder) -> None:
    told = says("failed", reason="node_lost", failed_rank=1, closed=True)
    asked = threading.Event()

    def second(handle: CommandHandle) -> NodeReport:
        asked.wait(0.2)
        return says("ready")(handle)

    found = gather(folder, HOSTS, ask({"head": told, "second": second, "third": silent}))
    assert set(found) == {"head", "second"}


def test_a_rank_that_was_told_to_end_does_not_speak_for_its_head(folder: DeploymentFolder) -> None:
    late = threading.Event()

    def head(handle: CommandHandle) -> NodeReport:
        late.wait(0.2)
        return says("failed", reason="engine_exited", failed_rank=1)(handle)

    second = says("failed", reason="engine_exited", text="told by the head")
    found = gather(folder, HOSTS, ask({"head": head, "second": second, "third": silent}))
    assert "head" in found
    assert failure_of(folder.rank(1)) == (Reason.ENGINE_EXITED, "told by the head")


@pytest.mark.parametrize("reason", [None, 5, "a reason of tomorrow"])
def test_a_rank_whose_reason_is_not_known_has_still_failed(folder: DeploymentFolder, reason: object) -> None:
    second = says("failed", reason=reason, text="it says")
    gather(folder, HOSTS, ask({"head": silent, "second": second, "third": says("ready")}))
    assert failure_of(folder.rank(1)) == (Reason.NODE_LOST, "it says")


@pytest.mark.parametrize("rank", [7, -1, "1", True, None])
def test_a_head_may_say_nonsense_of_the_rank_that_failed(folder: DeploymentFolder, rank: object) -> None:
    told = says("failed", reason="engine_exited", failed_rank=rank)
    found = gather(folder, HOSTS[:1] + HOSTS[2:], ask({"head": told, "third": unreachable}))
    assert "head" in found


def test_while_the_head_is_silent_the_others_are_asked_until_one_has_lost_it(folder: DeploymentFolder) -> None:
    asked: list[int] = []

    def second(handle: CommandHandle) -> NodeReport:
        asked.append(1)
        return says("ready")(handle) if len(asked) < 3 else says("failed", reason="node_lost", text="lost")(handle)

    found = gather(folder, HOSTS, ask({"head": silent, "second": second, "third": says("ready")}))
    assert "head" not in found
    assert len(asked) >= 3  # one more may be under way


def test_all_are_waited_for_while_it_runs(folder: DeploymentFolder) -> None:
    found = gather(folder, HOSTS, ask({"head": says("ready"), "second": says("ready"), "third": unreachable}))
    assert set(found) == set(HOSTS)
    assert isinstance(found["third"], UnreachableError)


def test_one_that_did_not_answer_is_not_waited_for_again_the_head_always(folder: DeploymentFolder) -> None:
    gather(folder, HOSTS, ask({"head": unreachable, "second": unreachable, "third": says("ready")}))
    assert [is_away(folder.rank(number)) for number in range(3)] == [True, True, False]
    late = threading.Event()

    def head(handle: CommandHandle) -> NodeReport:
        late.wait(0.2)
        return says("ready")(handle)

    found = gather(folder, HOSTS, ask({"head": head, "second": silent, "third": says("ready")}))
    assert set(found) == {"head", "third"}
    assert [is_away(folder.rank(number)) for number in range(3)] == [False, True, False]
    found = gather(folder, HOSTS, ask({"head": head, "second": says("ready"), "third": says("ready")}))
    assert set(found) == set(HOSTS)  # it was in time
    assert not is_away(folder.rank(1))


def test_an_error_that_is_a_defect_is_not_swallowed(folder: DeploymentFolder) -> None:
    def broken(handle: CommandHandle) -> NodeReport:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gather(folder, HOSTS, ask({"head": broken, "second": says("ready"), "third": says("ready")}))

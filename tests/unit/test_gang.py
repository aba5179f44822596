"""Agents that hold together: counting in, orders, losses, strangers. Over loopback, with short patience."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.node.agent import gang, gang_connection
from corral.node.agent.worker import Worker
from corral.node.states import Reason
from tests.until import free_port, until

PATIENCE_S, SHORT_S = 60.0, 3.0  # the short one where somebody is to lose it


class Rank:
    """What an agent says of its rank."""

    def __init__(self) -> None:
        self.wait_until = 0.0
        self.said: dict[str, Any] = {"state": "loading", "phase": "loading", "running": False, "quiet_s": 0.0}

    def __call__(self) -> dict[str, Any]:
        time.sleep(max(0.0, self.wait_until - time.monotonic()))
        return dict(self.said)


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "token").write_text("secret")
    port = free_port()
    return {
        "names": ["n0", "n1", "n2"], "head": "127.0.0.1", "port": port,
        "token_file": str(tmp_path / "token"),
    }  # fmt: skip


@pytest.fixture
def head(spec: dict[str, Any]) -> Iterator[gang.Head]:
    made = gang.Head(spec, PATIENCE_S, Rank())
    yield made
    made.end("requested", {})


def test_members_are_counted_in_and_told_what_to_do(spec: dict[str, Any], head: gang.Head) -> None:
    missing = head.gather(lambda: "", 0.1)
    assert missing
    assert missing[0] == "node_lost"
    ranks = [Rank(), Rank()]
    members = [gang.Follower(spec, PATIENCE_S, number, rank) for number, rank in enumerate(ranks, 1)]
    assert head.gather(lambda: "") is None
    head.run(1)
    until(lambda: all(one.order.get("run") and one.order["epoch"] == 1 for one in members))
    assert head.fault() is None
    ranks[1].said.update(ended={"epoch": 1, "reason": "engine_exited", "text": "it ended", "ago_s": 0, "details": {}})
    reason, details = until(head.fault)
    assert (reason, details["failed_rank"]) == ("engine_exited", 2)
    assert details["text"] == "rank 2 on n2: it ended"
    head.run(2)  # what ended in the attempt before does not count
    assert head.fault() is None
    head.end("engine_exited", {"text": "why"})
    until(lambda: all(one.order.get("end") == "engine_exited" for one in members))


def test_waiting_ends_when_somebody_wants_it_to(head: gang.Head) -> None:
    assert head.gather(lambda: "requested") == ("requested", {})


def test_whoever_ended_first_is_the_cause(spec: dict[str, Any], head: gang.Head) -> None:
    ranks = [Rank(), Rank()]
    for number, rank in enumerate(ranks, 1):
        gang.Follower(spec, PATIENCE_S, number, rank)
    assert head.gather(lambda: "") is None
    head.run(1)
    now = time.monotonic()
    ranks[0].said.update(ended={"epoch": 1, "reason": "engine_exited", "text": "later", "ago_s": 0, "details": {}})
    assert head.root_cause("engine_exited", {"text": "own"}, now - 30)[1]["text"] == "own"
    ranks[1].said.update(ended={"epoch": 1, "reason": "engine_exited", "text": "first", "ago_s": 90, "details": {}})
    until(lambda: head.members[1].ended(1))
    assert head.root_cause("engine_exited", {"text": "own"}, now - 30)[1]["text"] == "rank 2 on n2: first"


def test_a_stranger_without_the_token_never_joins(spec: dict[str, Any], head: gang.Head, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("guess")
    stranger = gang.Follower({**spec, "token_file": str(tmp_path / "wrong")}, PATIENCE_S, 1, Rank())
    until(lambda: stranger._error)
    assert not head.members[0].connected
    assert stranger.order == {}


def test_silence_is_loss_on_both_sides(spec: dict[str, Any]) -> None:
    head = gang.Head(spec, SHORT_S, Rank())
    hung = Rank()
    members = [gang.Follower(spec, SHORT_S, 1, hung), gang.Follower(spec, SHORT_S, 2, Rank())]
    assert head.gather(lambda: "") is None
    head.run(1)
    stuck = time.monotonic() + 3 * SHORT_S
    hung.wait_until = stuck
    reason, details = until(head.fault)
    assert reason == "node_lost"
    assert details["text"].startswith("n1 stopped answering at ")
    until(lambda: (members[0].lost() or "").startswith("the head n0 stopped answering"))
    head.end("requested", {})


def test_a_head_that_is_gone_is_known_before_its_silence_is(spec: dict[str, Any]) -> None:
    """Whoever refuses the connection where the head was says as much as the silence of a minute."""
    early = gang.Follower(spec, PATIENCE_S, 1, Rank())  # before there is a head to listen: refused, and no loss
    until(lambda: early._refused_at)
    head = gang.Head(spec, PATIENCE_S, Rank())
    gang.Follower(spec, PATIENCE_S, 2, Rank())
    assert head.gather(lambda: "") is None
    until(lambda: not early._refused_at)
    assert early.lost() is None
    head.end("requested", {})
    for member in head.members:
        member.connection.close()
    assert "the agent of the head n0 is gone" in until(early.lost)


def test_a_member_whose_connection_was_closed_is_lost_before_its_silence_is(spec: dict[str, Any]) -> None:
    head = gang.Head(spec, PATIENCE_S, Rank())
    members = [gang.Follower(spec, PATIENCE_S, number, Rank()) for number in (1, 2)]
    assert head.gather(lambda: "") is None
    head.run(1)
    members[0]._address = ("127.0.0.1", free_port())  # it cannot come back
    head.members[0].connection.close()
    reason, details = until(head.fault)
    assert (reason, details["node"], details["closed"]) == ("node_lost", "n1", True)
    assert details["text"].startswith("the agent on n1 is gone; it was last heard at ")
    head.end("requested", {})


def test_who_loses_all_others_at_once_has_lost_itself(spec: dict[str, Any]) -> None:
    head = gang.Head(spec, SHORT_S, Rank())
    hung = [Rank(), Rank()]
    for number, rank in enumerate(hung, 1):
        gang.Follower(spec, SHORT_S, number, rank)
    assert head.gather(lambda: "") is None
    head.run(1)
    for rank in hung:
        rank.wait_until = time.monotonic() + 3 * SHORT_S
    reason, details = until(head.fault)
    assert (reason, details["node"], details["failed_rank"]) == ("node_lost", "n0", 0)
    assert details["text"].startswith("the link of n0 was cut: from ")
    head.end("requested", {})


def test_an_old_connection_that_ends_late_does_not_hide_the_new_one(spec: dict[str, Any], head: gang.Head) -> None:
    gang.Follower(spec, PATIENCE_S, 2, Rank())
    first = gang.Follower(spec, PATIENCE_S, 1, Rank())
    assert head.gather(lambda: "") is None
    old = head.members[0].connection
    gang.Follower(spec, PATIENCE_S, 1, Rank())
    until(lambda: head.members[0].connection is not old)
    old.close()
    until(lambda: first._error)
    assert head.members[0].connected


# -------------------------------------------------------------------------------------------------- who may speak
def connect(spec: dict[str, Any]) -> socket.socket:
    return socket.create_connection((spec["head"], spec["port"]), timeout=60)


def test_the_listener_outlives_a_time_without_descriptors(spec: dict[str, Any], head: gang.Head) -> None:
    """The attack: connections until there is no descriptor left; accept() then fails, and must be tried again."""
    real = head._listener

    class Exhausted:
        failures = 0

        def accept(self) -> Any:
            self.failures += 1
            raise OSError(24, "Too many open files")

    stub = Exhausted()
    head._listener = stub  # type: ignore[assignment]
    connect(spec).close()  # wakes the thread, which goes on with the stub
    until(lambda: stub.failures > 2)
    head._listener = real
    gang.Follower(spec, PATIENCE_S, 1, Rank())
    gang.Follower(spec, PATIENCE_S, 2, Rank())
    assert head.gather(lambda: "") is None


def test_strangers_cannot_keep_the_members_out(spec: dict[str, Any], head: gang.Head) -> None:
    strangers = [connect(spec) for _ in range(200)]
    try:
        until(lambda: threading.active_count() < 60)
        gang.Follower(spec, PATIENCE_S, 1, Rank())
        gang.Follower(spec, PATIENCE_S, 2, Rank())
        assert head.gather(lambda: "") is None
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize(
    "words", [b"x" * 100_000, b"[" * 3000 + b"\n", b"\xff\n", b'{"rank": 1e999}\n', b"{}\n", b"5\n"]
)
def test_a_stranger_who_says_anything_is_shown_out(spec: dict[str, Any], head: gang.Head, words: bytes) -> None:
    with connect(spec) as stranger:
        stranger.sendall(words)
        with contextlib.suppress(OSError):
            while stranger.recv(4096):
                pass
    assert not any(member.connected for member in head.members)


def test_a_stranger_who_says_nothing_has_little_time(
    spec: dict[str, Any], head: gang.Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_connection, "HANDSHAKE_S", 0.2)
    with connect(spec) as stranger:
        stranger.recv(4096)
        stranger.sendall(b" ")
        assert stranger.recv(4096) == b""


def test_fields_of_a_proof_cannot_run_into_each_other() -> None:
    assert gang_connection.proof(b"k", "member", 1, "2x") != gang_connection.proof(b"k", "member", 12, "x")
    assert gang_connection.proof(b"k", "member", "1") != gang_connection.proof(b"k", "member1", "")


@pytest.mark.parametrize("attack", ["alter", "repeat", "drop", "reflect"])
def test_what_somebody_in_between_does_to_a_line_is_noticed(attack: str) -> None:
    (one, other), (far, near) = tcp_pair(), tcp_pair()
    head, member = gang_connection.GangConnection(one, 10), gang_connection.GangConnection(near, 10)
    pump = threading.Thread(target=_between, args=(other, far, attack), daemon=True)
    pump.start()
    greeted = threading.Thread(target=head.accept_member, args=(b"token",))
    greeted.start()
    assert member.join_head(b"token", 1)
    greeted.join()
    member.send({"state": "loading"})
    member.send({"state": "ready"})
    if attack == "repeat":
        assert head.receive() == {"state": "loading"}
    with pytest.raises(ValueError, match="did not write"):
        (member if attack == "reflect" else head).receive()
    for wire in (one, other, far, near):
        wire.close()
    pump.join(10)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def _between(head: socket.socket, member: socket.socket, attack: str) -> None:
    """Lets the handshake pass, then does something to what the member says."""
    with contextlib.suppress(OSError), head.makefile("rb") as of_head, member.makefile("rb") as of_member:
        member.sendall(of_head.readline())
        head.sendall(of_member.readline())
        member.sendall(of_head.readline())
        first, second = of_member.readline(), of_member.readline()
        said = {"alter": first.replace(b"loading", b"stopped"), "repeat": first + first, "drop": second}
        if attack == "reflect":
            member.sendall(first)
        else:
            head.sendall(said[attack])


def test_a_member_that_says_nonsense_harms_nobody() -> None:
    nonsense = {"state": 5, "running": "yes", "quiet_s": "x", "done": "x", "ended": {"epoch": "1", "reason": "magic",
                "details": {"state": "ready", "exit_code": 1, "deep": [[1]], "node": "x" * 9999}}}  # fmt: skip
    said = gang_connection.read_status(nonsense)
    assert said["ended"]["details"] == {"exit_code": 1, "node": "x" * 2000}
    assert (said["running"], said["quiet_s"], said["ended"]["epoch"]) == (False, 1e9, 0)
    assert said["ended"]["reason"] == "engine_exited"
    assert gang_connection.read_order({"epoch": "x", "run": 1, "end": 5, "head": []}) == {
        "epoch": 0, "run": False, "end": "engine_exited", "text": "", "head": {},
    }  # fmt: skip


def test_a_node_that_does_not_come_back_ends_the_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent was killed: fifty restarts would wait for it five minutes each."""

    class Silent:
        def gather(self, stop_asked: Any, wait_s: float = 60.0) -> Any:
            return (Reason.NODE_LOST, {"text": f"n1 has not joined within {wait_s:g} s"}) if gathered else None

        def run(self, epoch: int) -> None:
            gathered.append(epoch)

        def halt(self, wait_s: float) -> None: ...

        def root_cause(self, reason: str, details: Any, ended_at: float) -> Any:
            return reason, details

    gathered: list[int] = []
    ended: list[tuple[str, Any]] = []
    written: list[str] = []
    worker = Worker.__new__(Worker)
    worker.restarts, worker.head, worker.ended_at = 50, Silent(), 0.0  # type: ignore[assignment]
    worker.patience = {"grace_s": 0}
    worker.journal = types.SimpleNamespace(write=lambda kind, **_: written.append(kind))  # type: ignore[assignment]
    monkeypatch.setattr(worker, "_run_once", lambda attempt: (Reason.ENGINE_EXITED, {"failed_rank": 1}))
    monkeypatch.setattr(worker, "_set_state", lambda *_, **__: None)
    monkeypatch.setattr(worker, "_pause", lambda seconds: True)
    monkeypatch.setattr(worker, "_end", lambda reason, details: ended.append((reason, details)))
    worker._lead()
    assert gathered == [1]
    assert written == ["restart"]
    assert ended == [(Reason.NODE_LOST, {"text": "n1 has not joined within 300 s"})]


@pytest.mark.parametrize(
    ("reason", "order"),
    [(Reason.ENGINE_EXITED, ["failed", "halt", "end"]), (Reason.REQUESTED, ["halt", "end", "stopped"])],
)
def test_a_failure_is_told_before_the_others_are_gone(reason: Reason, order: list[str]) -> None:
    """What was asked for is told when nothing is left; a failure is not waited for."""
    told: list[str] = []
    worker: Any = Worker.__new__(Worker)
    worker.patience = {"grace_s": 0.0}
    worker.head = types.SimpleNamespace(halt=lambda _: told.append("halt"), end=lambda *_: told.append("end"))
    worker._set_state = lambda state, **_: told.append(str(state))
    worker._end(reason, {})
    assert told == order


def test_what_a_member_said_last() -> None:
    member = gang.Member(1, "n2")
    assert member.status_text() == "nothing"
    member.status = {"state": "loading", "phase": "weights", "done": 8, "total": 10}
    assert member.status_text() == "weights, 8 of 10"
    member.status = {"state": "ready", "phase": "weights", "done": 8, "total": 10}
    assert member.status_text() == "ready"

"""Agents that hold together: counting in, orders, losses, strangers. Over loopback, with short patience."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.node.agent import gang
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


def test_an_old_connection_that_ends_late_does_not_hide_the_new_one(spec: dict[str, Any], head: gang.Head) -> None:
    gang.Follower(spec, PATIENCE_S, 2, Rank())
    first = gang.Follower(spec, PATIENCE_S, 1, Rank())
    assert head.gather(lambda: "") is None
    old = head.members[0].line
    gang.Follower(spec, PATIENCE_S, 1, Rank())
    until(lambda: head.members[0].line is not old)
    old.close()
    until(lambda: first._error)
    assert head.members[0].connected

"""The states of a deployment: which may follow which, for every pair, and that nobody writes another."""

from __future__ import annotations

import ast
import errno
import itertools
import json
import os
from pathlib import Path

import pytest

from corral.base.bundle import bundle
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.state import ENDED, TRANSITIONS, Reason, State, may_follow
from corral.node.agent.journal import Journal, TransitionError
from tests.conftest import ROOT

LIVING = [state for state in State if state not in ENDED and state is not State.UNKNOWN]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)), ids=str)
def test_what_is_written_follows_the_table(before: State, after: State, tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "events.jsonl"), 0)
    journal.state = before
    if may_follow(before, after):
        journal.write_state(after, text="x")
        assert [event.get("state") for event in read_events(tmp_path / "events.jsonl")] == [after]
        assert journal.state is after
    else:
        with pytest.raises(TransitionError, match=f"{after} cannot follow {before}"):
            journal.write_state(after)
        assert journal.state is before
        assert not read_events(tmp_path / "events.jsonl")


def test_the_table_as_a_whole() -> None:
    assert set(TRANSITIONS) == set(State)
    assert not any(TRANSITIONS[state] for state in [*ENDED, State.UNKNOWN])
    assert not any(may_follow(state, State.UNKNOWN) for state in State)  # only a reader says that
    assert all(may_follow(state, end) for state in LIVING for end in ENDED)
    begun = [state for state in LIVING if state not in (State.STAGING, State.QUEUED)]
    assert all(may_follow(state, State.QUEUED) for state in begun)  # a job can be requeued at any time
    assert all(may_follow(state, State.STARTING) for state in begun)  # and an engine started again
    reachable = {State.STAGING}
    while new := {after for before in reachable for after in TRANSITIONS[before]} - reachable:
        reachable |= new
    assert reachable == set(State) - {State.UNKNOWN}


def test_another_process_s_last_state_is_known(tmp_path: Path) -> None:
    one, other = (Journal(str(tmp_path / "events.jsonl"), 0) for _ in range(2))
    other.catch_up()
    assert other.state is State.STAGING
    one.write_state(State.STARTING)
    one.write_state(State.STOPPED, reason=Reason.REQUESTED)
    one.write("observed", kv_tokens=1)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"torn')
    other.catch_up()
    assert other.ended


def test_a_state_is_written_on_a_full_disk_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, spare, write = Journal(str(tmp_path / "events.jsonl"), 0), tmp_path / "spare", os.write

    def on_a_full_disk(descriptor: int, data: bytes) -> int:
        """The disk takes the first bytes of a line; all of it once the spare block is given back."""
        if not spare.exists():
            return write(descriptor, data)
        if len(data) > 10 and not (tmp_path / "events.jsonl").read_bytes().endswith(data[:5]):
            return write(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    assert spare.stat().st_size
    monkeypatch.setattr(os, "write", on_a_full_disk)
    journal.write("observed", kv_tokens=1)
    assert spare.exists()
    journal.write_state(State.FAILED, reason=Reason.ENGINE_EXITED)
    events = read_events(tmp_path / "events.jsonl")
    assert [(event.kind, event.get("state")) for event in events] == [("state", "failed")]


def test_states_and_reasons_are_their_own_text_everywhere() -> None:
    assert f"{State.READY} {State.READY!s} %s" % Reason.WALLTIME == "ready ready walltime"
    assert json.dumps({"state": State.READY}) == '{"state": "ready"}'
    assert {"ready": 1}[State.READY] == 1


def test_the_agent_s_modules_name_no_state_or_reason_by_a_string() -> None:
    ordinary = {"loading", "starting", "unknown"}  # names of phases as well, and of signals
    words = {word.value for word in (*State, *Reason)} - ordinary
    for path in (ROOT / "src" / "corral" / "node" / "agent").glob("*.py"):
        found = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not found & words, path.name
    assert "class Reason(_Word)" in bundle("node/agent")

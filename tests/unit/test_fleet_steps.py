"""What is due for the members of a fleet: walked through as tables, and under properties."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from corral.deploy.deployment.state import ENDED, Reason, State
from corral.serve.fleet.record import Fleet, FleetMember
from corral.serve.fleet.steps import DRAIN_MOST_S, SEEN_S, Act, MemberFacts, free_names, next_steps

NOW = 1000.0


def fleet(wanted: int, *members: FleetMember, keep: bool = False) -> Fleet:
    return Fleet("f", "m", 1, 8, wanted, 0.0, members, keep=keep)


def due(wanted: int, *facts: MemberFacts, leaving: tuple[str, ...] = (), since: float = 0.0, keep: bool = False,
        lead_s: float = 100.0) -> list[tuple[str, str]]:  # fmt: skip
    members = [FleetMember(one.name, one.name in leaving, since) for one in facts]
    steps = next_steps(fleet(wanted, *members, keep=keep), {one.name: one for one in facts}, NOW, lead_s)
    return [(step.act.value, step.member) for step in steps]


def ready(name: str, running: int | None = 0, last_s: float | None = None) -> MemberFacts:
    return MemberFacts(name, State.READY, running=running, last_request_s=last_s)


def test_as_many_as_are_wanted() -> None:
    assert due(2, ready("f-1"), ready("f-2")) == []
    assert due(1) == [("add", "f-1")]
    assert due(3, ready("f-2")) == [("add", "f-1"), ("add", "f-3")]
    assert due(1, MemberFacts("f-1")) == [("start", "f-1")]
    assert due(1, MemberFacts("f-1", busy=True)) == []


def test_who_goes_first_is_who_is_missed_least() -> None:
    coming = MemberFacts("f-1", State.LOADING)
    assert due(2, coming, ready("f-2"), ready("f-3")) == [("leave", "f-1")]
    assert due(1, ready("f-1", 5), ready("f-2", 0)) == [("leave", "f-2")]
    assert due(1, ready("f-1", 0), ready("f-2", 0)) == [("leave", "f-2")]


def test_who_leaves_is_stopped_when_its_requests_have_ended() -> None:
    one = ready("f-1", 3)
    assert due(0, one, leaving=("f-1",), since=NOW - SEEN_S) == []
    assert due(0, replace(one, running=None), leaving=("f-1",), since=NOW - SEEN_S) == []  # nobody has counted yet
    assert due(0, replace(one, running=0), leaving=("f-1",), since=NOW - SEEN_S) == [("stop", "f-1")]
    assert due(0, replace(one, running=0), leaving=("f-1",), since=NOW) == []  # gateways may not know yet
    assert due(0, one, leaving=("f-1",), since=NOW - DRAIN_MOST_S) == [("stop", "f-1")]
    assert due(0, MemberFacts("f-1", State.LOADING), leaving=("f-1",), since=NOW) == [("stop", "f-1")]
    assert due(0, MemberFacts("f-1", State.STOPPED), leaving=("f-1",), since=NOW) == [("forget", "f-1")]
    assert due(0, MemberFacts("f-1", State.READY, busy=True, running=0), leaving=("f-1",)) == []


def test_who_ends_is_started_again_after_its_pause() -> None:
    gone = MemberFacts("f-1", State.FAILED, Reason.ENGINE_EXITED, "out of luck", retry_s=NOW + 1)
    assert due(1, gone) == []
    assert due(1, replace(gone, retry_s=NOW)) == [("start", "f-1")]
    members = [FleetMember("f-1")]
    (step,) = next_steps(fleet(1, *members), {"f-1": replace(gone, retry_s=NOW)}, NOW, 0)
    assert step.why == "it has ended: engine exited (out of luck)"


def test_a_time_limit_is_met_by_a_new_job_where_the_fleet_is_kept() -> None:
    near = ready("f-1", 2, NOW + 50)
    assert due(1, near) == []  # not kept: it ends with its job
    assert due(1, near, keep=True) == [("expire", "f-1"), ("add", "f-2")]
    assert due(1, near, MemberFacts("f-2", State.LOADING), keep=True) == [("expire", "f-1")]
    assert due(1, near, ready("f-2"), keep=True) == [("expire", "f-1"), ("leave", "f-1")]
    at_the_end = ready("f-1", 2, NOW + 1)
    assert due(1, at_the_end, MemberFacts("f-2", State.LOADING), keep=True) == [("expire", "f-1"), ("leave", "f-1")]
    over = MemberFacts("f-1", State.STOPPED, Reason.WALLTIME)
    assert due(1, over, keep=True) == [("forget", "f-1"), ("add", "f-1")] or due(1, over, keep=True)[0] == (
        "forget",
        "f-1",
    )
    assert due(1, over) == [("forget", "f-1")]


def test_a_replacement_that_was_asked_for_is_not_dropped_when_a_shorter_wait_was_measured() -> None:
    near, members = ready("f-1", 2, NOW + 50), [FleetMember("f-1", expiring=True), FleetMember("f-2")]
    kept = fleet(1, *members, keep=True)
    for replacement in (MemberFacts("f-2", State.QUEUED), MemberFacts("f-2", State.LOADING)):
        assert next_steps(kept, {"f-1": near, "f-2": replacement}, NOW, lead_s=10.0) == []
    (step,) = next_steps(kept, {"f-1": near, "f-2": ready("f-2")}, NOW, lead_s=10.0)
    assert (step.act, step.member) == (Act.LEAVE, "f-1")


def test_free_names_are_the_lowest() -> None:
    assert free_names(fleet(0, FleetMember("f-1"), FleetMember("f-3")), 3) == ["f-2", "f-4", "f-5"]
    assert free_names(fleet(0, FleetMember("f-1")), 2, {"f-2", "f-4"}) == ["f-3", "f-5"]


facts_strategy = st.builds(
    MemberFacts,
    name=st.just(""),
    state=st.sampled_from([None, *State]),
    reason=st.sampled_from([None, *Reason]),
    running=st.one_of(st.none(), st.integers(0, 5)),
    last_request_s=st.one_of(st.none(), st.floats(NOW - 500, NOW + 500)),
    retry_s=st.floats(0, 2 * NOW),
    busy=st.booleans(),
)


@given(
    facts=st.lists(st.tuples(facts_strategy, st.booleans(), st.floats(0, NOW)), max_size=8),
    wanted=st.integers(0, 8),
    keep=st.booleans(),
)
def test_no_member_is_stopped_that_was_not_told_to_leave(
    facts: list[tuple[MemberFacts, bool, float]], wanted: int, keep: bool
) -> None:
    members, known = [], {}
    for number, (one, leaving, since) in enumerate(facts, 1):
        name = f"f-{number}"
        members.append(FleetMember(name, leaving, since if leaving else 0.0))
        known[name] = replace(one, name=name)
    steps = next_steps(fleet(wanted, *members, keep=keep), known, NOW, 100.0)
    by_name = {member.name: member for member in members}
    for step in steps:
        if step.act is Act.STOP:
            assert by_name[step.member].leaving
            one = known[step.member]
            served = one.state not in ENDED and one.state in (State.READY, State.DRAINING)
            waited = NOW - by_name[step.member].leaving_s
            assert not served or one.running == 0 or waited >= DRAIN_MOST_S
        if step.act is Act.START:
            assert not known[step.member].busy
            assert known[step.member].retry_s <= NOW
        assert step.why
    added = [step.member for step in steps if step.act is Act.ADD]
    assert len(set(added)) == len(added)
    assert not set(added) & set(by_name)
    left = [step for step in steps if step.act is Act.LEAVE]
    assert not (added and len([s for s in left if by_name[s.member].leaving]))
    staying = [m for m in members if not m.leaving]
    assert len(staying) - len(left) + len(added) >= min(wanted, len(staying) - len(left))

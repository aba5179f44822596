"""What a start does before there is an agent is written down, so that others than its own terminal can see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.base.errors import LaunchError
from corral.base.record import load_json
from corral.deploy.deployment.events import Event, read_events
from corral.deploy.deployment.start_times import Expected, Phase, amount, ends_at_s, expected_of, left_s
from corral.deploy.lifecycle.bringup import _released_on_failure
from corral.deploy.lifecycle.deployments import Record, status
from corral.deploy.lifecycle.staging import LINE_EVERY_S, Staging
from corral.lab.report.status import status_facts
from tests.console_home import Made, make
from tests.storage_faults import unreadable
from tests.unit.conftest import Silent

PLANNED = {
    name: Expected(seconds)
    for name, seconds in {"installing engine": 150.0, "fetching model": 40.0, "loading": 9.0}.items()
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    found = make("one", 5)
    found.folder.launch.unlink()  # it was not launched yet
    return found


def lines(made: Made, name: str) -> list[tuple[int | None, int | None]]:
    found = [event for event in read_events(made.folder.staging) if event.get("phase") == name]
    return [(event.get("done"), event.get("total")) for event in found]


def test_progress_is_written_by_the_per_cent_and_not_by_the_block(made: Made) -> None:
    now = [0.0]
    staging = Staging(Silent(), made.folder, PLANNED, lambda: now[0])
    staging.phase(Phase.FETCHING)
    for block in range(10_001):
        staging.detail("hub", block, 10_000)
    assert len(lines(made, "fetching model")) <= 102
    assert lines(made, "fetching model")[-1] == (10_000, 10_000)
    staging.phase(Phase.STARTING)
    for _ in range(50):
        now[0] += LINE_EVERY_S / 10
        staging.detail("still at it")
    assert len(lines(made, "starting")) == 1 + 5


def test_status_shows_how_far_a_download_is_from_any_process(made: Made) -> None:
    staging = Staging(Silent(), made.folder, PLANNED)
    staging.phase(Phase.INSTALLING, needed=False)
    staging.phase(Phase.FETCHING)
    staging.detail("hub: a", 10**9, 4 * 10**9)
    found = status(made.folder)
    assert (found.state, found.phase, found.done, found.total) == ("staging", "fetching model", 10**9, 4 * 10**9)
    assert found.expected is not None
    assert found.expected.seconds == 40.0
    row = dict(status_facts(found, None, (), None))["phase"]
    assert row.startswith("fetching model 1.00/4.00 GB (25%) for ")
    assert row.endswith("(about 40 s expected)")
    assert set(expected_of(made.folder)) == {"fetching model", "loading"}  # an engine that is there takes no time


def test_a_start_that_failed_is_over_although_its_process_lives(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder stays where it could not be read; a keeper would wait for itself for ever."""
    monkeypatch.setattr("corral.deploy.lifecycle.status._GIVEN_UP", set())
    folder, launch_id = made.folder, load_json(Record, made.folder.record).launch_id
    assert status(folder).state == "staging"
    with pytest.raises(LaunchError), unreadable(folder.path), _released_on_failure(folder, launch_id):
        raise LaunchError("no engine.", "Wait.")
    found = status(made.folder)
    assert (found.state, found.reason) == ("stopped", "interrupted")


def test_what_was_expected_of_a_start_is_not_read_again_once_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    read: list[Path] = []

    def reading(path: Path) -> list[Event]:
        read.append(path)
        return read_events(path)

    monkeypatch.setattr("corral.deploy.lifecycle.deployments.read_events", reading)
    monkeypatch.setattr("corral.deploy.deployment.start_times.read_events", reading)
    for number, state in enumerate(("ready", "loading")):
        made = make(f"one-{number}", 5).agent().course((state, 1.0))
        assert status(made.folder).state == state
        assert (made.folder.staging in read) is (state == "loading")


def test_a_staging_that_said_nothing_is_shown_as_before(made: Made) -> None:
    assert "phase" not in dict(status_facts(status(made.folder), None, (), None))
    assert status(made.folder).phase == "staging"


def test_a_folder_that_is_gone_ends_it_and_a_full_disk_does_not(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(Silent(), made.folder, PLANNED)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("corral.deploy.lifecycle.staging.append_event", full)
    staging.phase(Phase.FETCHING)
    staging.detail("hub", 1, 2)
    made.folder.delete()
    with pytest.raises(LaunchError, match="was stopped"):
        staging.detail("hub", 2, 2)


def test_an_end_is_told_by_what_came_and_not_by_what_was_there() -> None:
    def phase(at_s: float, **more: int) -> Event:
        return Event(at_s, "phase", 0, at_s, {"phase": "fetching model", **more})

    began = phase(100)
    assert ends_at_s([]) is None
    assert ends_at_s([began]) is None
    assert ends_at_s([began, phase(110, done=25, total=100)]) == 110 + 30
    resumed = [began, phase(101, done=80, total=100), phase(111, done=90, total=100)]
    assert ends_at_s(resumed) == 111 + 10
    assert ends_at_s([*resumed, phase(121, done=100, total=100)]) is None  # it is over
    assert ends_at_s([*resumed, Event(130, "phase", 0, 130, {"phase": "starting"})]) is None


def test_amounts_and_what_is_left() -> None:
    assert amount(3, 12) == "3/12 (25%)"
    assert amount(1_500_000_000, 6_000_000_000) == "1.50/6.00 GB (25%)"
    assert left_s(10.0, 0, 5, 20) == 30.0
    assert left_s(10.0, 5, 5, 20) is None

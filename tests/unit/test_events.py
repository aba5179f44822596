"""The journal: whole lines count, torn ones do no harm."""

from __future__ import annotations

import threading
from pathlib import Path

from corral.deploy.deployment.events import Follower, append_event, read_events


def test_append_and_follow(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert list(follower.new()) == []
    append_event(path, "state", state="starting")
    append_event(path, "phase", rank=1, elapsed_s=1.5, phase="loading", done=1)
    first, second = follower.new()
    assert (first.kind, first.get("state")) == ("state", "starting")
    assert (second.rank, second.elapsed_s, second.get("done"), second.get("absent", 7)) == (1, 1.5, 1, 7)
    assert list(follower.new()) == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_last_line_is_ignored_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, "one")
    with path.open("ab") as file:
        file.write(b'{"t": 1, "kind": "to')
    assert [event.kind for event in read_events(path)] == ["one"]
    append_event(path, "two")
    assert [event.kind for event in read_events(path)] == ["one", "two"]


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'\n[]\n{"kind": "x"}\n\xff\xfe\n{"t": 1, "kind": "good"}\n')
    assert [event.kind for event in read_events(path)] == ["good"]


def test_many_writers_do_not_tear_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(number: int) -> None:
        for _ in range(20):
            append_event(path, "x", rank=number, text="y" * 500)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_events(path)) == 80

"""The one lock: held by one at a time, waited for, taken over from the dead and from nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from corral.lock import FileLock, discard_lock, exclusive_lock, holder_of, lock_holder, try_lock
from corral.processes import Identity, own_identity

ELSEWHERE = Identity(1, "elsewhere", "b", 5)


def held_by(path: Path, holder: Identity, age_s: float = 0.0) -> Path:
    path.write_text(json.dumps(vars(holder)))
    moment = time.time() - age_s
    os.utime(path, (moment, moment))
    return path


def test_many_processes_hold_it_one_after_the_other(tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("0")
    code = (
        "import sys; from pathlib import Path; from corral.lock import FileLock\n"
        "count = Path(sys.argv[1])\n"
        "for _ in range(10):\n"
        "    with FileLock(count.with_name('lock')):\n"
        "        count.write_text(str(int(count.read_text()) + 1))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(count)]) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert count.read_text() == "40"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_who_holds_it_is_told_once_and_waited_for(tmp_path: Path) -> None:
    path = held_by(tmp_path / "lock", ELSEWHERE)
    told: list[str] = []

    def release() -> None:
        while not told:
            time.sleep(0.01)
        path.unlink()

    thread = threading.Thread(target=release)
    thread.start()
    with exclusive_lock(path, told.append):
        assert lock_holder(path) == own_identity()
    thread.join()
    assert told == [f"process 1 on elsewhere (lock {path})"]


def test_a_holder_elsewhere_is_dead_only_after_its_silence(tmp_path: Path) -> None:
    path = held_by(tmp_path / "lock", ELSEWHERE, age_s=100)
    assert holder_of(path, silent_s=None) == ELSEWHERE
    assert holder_of(path, silent_s=600) == ELSEWHERE
    assert holder_of(path, silent_s=60) is None

    def refuse(holder: Identity) -> None:
        raise ValueError(holder.host)

    with pytest.raises(ValueError, match="elsewhere"), FileLock(path, refuse):
        pass
    with FileLock(path, refuse, silent_s=60) as lock:
        lock.touch()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_a_third_one_took_is_not_discarded(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert try_lock(path)
    assert not try_lock(path)
    discard_lock(path, ELSEWHERE)
    assert lock_holder(path) == own_identity()


def test_a_lock_that_was_taken_over_is_left_to_its_new_holder(tmp_path: Path) -> None:
    with FileLock(tmp_path / "below" / "lock") as lock:
        held_by(lock.path, ELSEWHERE)
    assert lock_holder(lock.path) == ELSEWHERE

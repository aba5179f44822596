"""The one lock: held by one at a time, waited for, taken over from the dead and from nobody else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from corral.base.errors import ConflictError
from corral.base.lock import SILENT_S, FileLock, discard_lock, exclusive_lock, holder_of, lock_holder, try_lock
from corral.base.processes import Identity, own_identity, process_namespace
from corral.serve.fleet.record import FleetFolder, fleet_lock
from corral.use.batch.core.folder import BatchLock
from tests.skips import NO_MOUNT
from tests.testbed import NOT_ROOT, makes_namespaces
from tests.until import until

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
        "import sys; from pathlib import Path; from corral.base.lock import FileLock\n"
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


def test_a_long_wait_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.base.lock.REPORT_AGAIN_S", 0.0)
    path = held_by(tmp_path / "lock", ELSEWHERE)
    told: list[str] = []

    def tell(who: str) -> None:
        told.append(who)
        if len(told) == 3:
            path.unlink()

    with exclusive_lock(path, tell):
        pass
    assert told[0] == f"process 1 on elsewhere (lock {path})"
    assert all("s now" in text for text in told[1:])


def test_who_changes_a_fleet_is_told(clean_home: Path) -> None:
    folder = FleetFolder.of("first")
    folder.path.mkdir(parents=True)
    held_by(folder.lock, ELSEWHERE)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        folder.lock.unlink()

    with fleet_lock(folder, tell):
        pass
    assert "the fleet first" in told[0]
    assert "process 1 on elsewhere" in told[0]


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


# Holders whose processes cannot be seen from here

HOLD = """
import sys; from pathlib import Path; from corral.use.batch.core.folder import BatchLock
with BatchLock(Path(sys.argv[1]), "x") as lock:
    lock.check()
    print("held", flush=True)
    sys.stdin.read()
    lock.check()
"""
TAKE = """
import sys; from pathlib import Path
from corral.use.batch.core.folder import BatchLock; from corral.base.errors import ConflictError
try:
    with BatchLock(Path(sys.argv[1]), "x"):
        print("taken")
except ConflictError:
    print("refused")
"""
NAMESPACES = {
    "with its own /proc": ["unshare", "--pid", "--fork", "--mount-proc"],
    "with the machine's /proc": ["unshare", "--pid", "--fork"],
}


@pytest.fixture(params=list(NAMESPACES.values()), ids=list(NAMESPACES))
def container(request: pytest.FixtureRequest) -> list[str]:
    """How a command is started in a process namespace of its own: its first process has the number 1 there."""
    if os.geteuid() != 0:
        pytest.skip(NOT_ROOT)
    if not makes_namespaces():
        pytest.skip(NO_MOUNT)
    return [str(word) for word in request.param]


@contextmanager
def holding(path: Path, start: list[str]) -> Iterator[None]:
    argv = [*start, sys.executable, "-c", HOLD, str(path)]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        yield
    finally:
        holder.stdin.close()
        code = holder.wait(120)
        holder.stdout.close()
    assert code == 0  # it still had its lock


def take(path: Path, start: list[str]) -> str:
    argv = [*start, sys.executable, "-c", TAKE, str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def test_a_lock_is_not_stolen_out_of_a_container(tmp_path: Path, container: list[str]) -> None:
    path = tmp_path / "lock"
    with holding(path, container):
        assert lock_holder(path) != own_identity()
        with pytest.raises(ConflictError), BatchLock(path, "x"):
            pass
        assert take(path, []) == "refused"
        assert take(path, container) == "refused"  # by another container, where the same numbers are in use
    assert not list(tmp_path.iterdir())


def test_a_lock_is_not_stolen_from_within_a_container(tmp_path: Path, container: list[str]) -> None:
    path = tmp_path / "lock"
    with BatchLock(path, "x") as lock:
        assert take(path, container) == "refused"
        lock.check()


def test_a_silent_holder_in_a_container_is_dead(tmp_path: Path, container: list[str]) -> None:
    path = tmp_path / "lock"
    subprocess.run([*container, sys.executable, "-c", HOLD.replace("sys.stdin.read()", "__import__('os')._exit(9)"),
                    str(path)], check=False, stdout=subprocess.DEVNULL)  # fmt: skip
    assert holder_of(path) is not None
    old = time.time() - SILENT_S - 5
    os.utime(path, (old, old))
    with BatchLock(path, "x"):
        pass


def test_a_machine_of_the_same_name_is_another_machine(tmp_path: Path) -> None:
    twin = replace(own_identity(), pid=1, boot_id="another boot")
    path = held_by(tmp_path / "lock", twin, age_s=100)
    with pytest.raises(ConflictError, match=f"process 1 on {socket.gethostname()}"), BatchLock(path, "x"):
        pass
    assert holder_of(path, silent_s=60) is None


def test_a_holder_seen_from_here_is_judged_by_its_process_however_long_it_is_silent(tmp_path: Path) -> None:
    path = held_by(tmp_path / "lock", own_identity(), age_s=1e6)
    assert holder_of(path) == own_identity()
    assert process_namespace() != ""


def test_a_process_that_is_hidden_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under hidepid=2: /proc shows nothing of other users, and only a signal tells that they are there."""
    path = held_by(tmp_path / "lock", replace(own_identity(), pid=os.getppid()))

    def not_ours(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr("corral.base.processes.start_ticks", lambda pid: 0)
    assert holder_of(path) is None
    monkeypatch.setattr("os.kill", not_ours)
    assert holder_of(path) is not None


def test_two_writers_of_one_number_do_not_write_each_others_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines of one name, or in two containers, host, process and thread can all be the same."""
    names: list[str] = []
    link = os.link

    def noted(made: Path, path: Path) -> None:
        names.append(made.name)
        link(made, path)

    monkeypatch.setattr("os.link", noted)
    for number in range(2):
        assert try_lock(tmp_path / f"{number}.lock")
    assert names[0].split(".", 2)[2] != names[1].split(".", 2)[2]


def test_what_a_later_version_says_more_is_no_reason_to_take_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({**vars(ELSEWHERE), "more": [1]}))
    assert holder_of(path) == ELSEWHERE


@pytest.mark.parametrize("text", ["{", "[]", '{"pid":"x"}', "[" * 5000, "5", '{"pid":1e999}', "null", ""])
def test_a_file_that_is_no_lock_is_nobodys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    path.write_text(text)
    assert holder_of(path, silent_s=None) is None


def test_a_lock_that_is_waited_for_is_touched_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a long installation would look dead elsewhere, and a reboot would leave it locked for ever."""
    monkeypatch.setattr("corral.base.lock.TOUCH_S", 0.01)
    path = tmp_path / "lock"
    with exclusive_lock(path, lambda who: None):
        os.utime(path, (0, 0))
        until(lambda: path.stat().st_mtime > 0)
    old = time.time() - SILENT_S - 5
    held_by(path, replace(own_identity(), boot_id="before the reboot"))
    os.utime(path, (old, old))
    with exclusive_lock(path, lambda who: None):
        assert lock_holder(path) == own_identity()


WITHOUT_DESCRIPTORS = """
import errno, os, resource, sys
from pathlib import Path
from corral.base.lock import FileLock

path = Path(sys.argv[1])
with FileLock(path):
    if sys.argv[2] == "taken over":
        path.unlink()
        path.with_name("other").write_text("somebody else's")
        path.with_name("other").rename(path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # no further file can be opened
    try:
        path.read_bytes()
    except OSError as error:
        assert error.errno == errno.EMFILE
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
"""


@pytest.mark.parametrize(("what", "left"), [("held", False), ("taken over", True)])
def test_it_is_released_also_without_a_free_descriptor(tmp_path: Path, what: str, left: bool) -> None:
    path = tmp_path / "lock"
    keeper = tmp_path / "keeps the inode busy"
    script = WITHOUT_DESCRIPTORS.replace("path.unlink()", f"path.rename({str(keeper)!r})")
    done = subprocess.run([sys.executable, "-c", script, str(path), what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.exists() is left


def test_what_a_killed_process_put_aside_goes_with_the_next_release(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    dead = replace(own_identity(), pid=gone.pid)
    gone.wait()
    aside = held_by(tmp_path / "lock.stale.vm.1.aa", dead)
    alive = held_by(tmp_path / "lock.stale.vm.2.bb", own_identity())
    with FileLock(tmp_path / "lock"):
        pass
    assert not aside.exists()
    assert alive.exists()  # on its way back

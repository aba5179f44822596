"""`corral service`: what is shown and done for systemd, cron and SLURM's cron, and the process that they start."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from corral.base.lock import holder_of
from corral.base.processes import Identity
from corral.base.record import dump_json
from corral.serve.fleet.record import Fleet, change_fleet, create_fleet
from corral.serve.fleet.service import running_service, service_lock, unit_text
from tests.console_home import fake_program
from tests.unit.conftest import Corral, Done, in_this_process
from tests.until import LIMIT_S, until

TABLE = """case "$1" in
-l) [ -f "$0.table" ] && cat "$0.table" || { echo "no crontab for me" >&2; exit 1; };;
*) cp "$1" "$0.table";;
esac"""
OTHERS = "MAILTO=me\n# mine: 50\\% \n0 3 * * * backup\n"


@pytest.fixture
def programs(clean_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "cp", "env", "echo"):
        (folder / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return folder


def table(programs: Path, name: str = "crontab") -> str:
    return (programs / f"{name}.table").read_text()


def test_where_nothing_starts_it_that_is_said(programs: Path) -> None:
    done = in_this_process("service", "install", "--yes")
    assert done.code == 2
    assert "cron: there is no crontab here" in done.err
    assert "`corral service run` by hand" in done.err


def test_cron_keeps_the_lines_of_others(programs: Path) -> None:
    fake_program(programs, "crontab", TABLE)
    (programs / "crontab.table").write_text(OTHERS)
    shown = in_this_process("service", "install", "--dry-run")
    assert table(programs) == OTHERS  # nothing was done
    for _ in range(2):
        done = in_this_process("service", "install", "--yes")
        assert done.code == 0, done.err
        assert shown.out == done.out  # and what was shown is what is done
        mine = [line for line in table(programs).splitlines() if "service run" in line]
        assert [line.split()[0] for line in mine] == ["@reboot", "*/5"]
    assert table(programs).startswith(OTHERS)
    assert os.environ["CORRAL_HOME"] in mine[0]
    assert "installed  cron" in in_this_process("service", "status").out
    assert in_this_process("service", "remove", "--yes").code == 0
    assert table(programs) == OTHERS
    assert "installed  no" in in_this_process("service", "status").out


def test_a_table_that_cannot_be_read_is_not_an_empty_one(programs: Path) -> None:
    fake_program(programs, "crontab", f"[ \"$1\" = -l ] && {{ echo 'cannot connect' >&2; exit 1; }}\n{TABLE}")
    done = in_this_process("service", "install", "--with", "cron", "--yes")
    assert done.code == 2
    assert "`crontab -l` failed: cannot connect" in done.err
    assert not (programs / "crontab.table").exists()


def test_nobody_there_to_answer_is_refused(programs: Path) -> None:
    fake_program(programs, "crontab", TABLE)
    done = in_this_process("service", "install")
    assert done.code == 2
    assert "@reboot" in done.out  # it was shown
    assert "--yes" in done.err
    assert not (programs / "crontab.table").exists()


def test_a_line_of_cron_survives_odd_paths(programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "o'dd 100% $HOME"
    monkeypatch.setenv("CORRAL_HOME", str(home))
    fake_program(programs, "crontab", TABLE)
    assert in_this_process("service", "install", "--yes").code == 0
    (line, _) = [line for line in table(programs).splitlines() if "service run" in line]
    words = shlex.split(line.replace("\\%", "%"))  # as cron hands it to the shell
    assert f"CORRAL_HOME={home}" in words
    assert words[-2] == f">>{home}/service/service.log"


def test_slurms_cron_gets_options_of_its_job(programs: Path) -> None:
    fake_program(programs, "scrontab", TABLE.replace(">&2", ""))  # it says so on stdout
    done = in_this_process("service", "install", "--option", "partition=cpu", "--option=--time=1-00:00:00", "--yes")
    assert done.code == 0, done.err
    rows = table(programs, "scrontab").splitlines()
    assert rows[1:4] == ["#SCRON --job-name=corral-service", "#SCRON --partition=cpu", "#SCRON --time=1-00:00:00"]
    assert rows[4].startswith("*/5 * * * * env ")
    fake_program(programs, "crontab", TABLE)
    refused = in_this_process("service", "install", "--with", "cron", "--option", "partition=cpu", "--yes")
    assert refused.code == 2
    assert "--option is for --with scrontab" in refused.err


def systemctl(programs: Path, linger: str = "no", code: int = 0) -> Path:
    log = programs / "log"
    fake_program(programs, "systemctl", f'echo systemctl "$@" >>{log}; exit {code}')
    fake_program(
        programs, "loginctl", f'echo loginctl "$@" >>{log}; [ "$1" = enable-linger ] || echo Linger={linger}'
    )
    return log


def test_systemd_gets_a_unit_and_a_user_who_lingers(programs: Path, clean_home: Path) -> None:
    log = systemctl(programs)
    done = in_this_process("service", "install", "--yes")
    assert done.code == 0, done.err
    (unit,) = (clean_home / ".config/systemd/user").iterdir()
    assert "KillMode=process" in unit.read_text()
    told = log.read_text().splitlines()
    assert told[-3:] == [
        "loginctl enable-linger",
        "systemctl --user daemon-reload",
        f"systemctl --user enable --now {unit.name}",
    ]
    assert "installed  systemd" in in_this_process("service", "status").out
    assert in_this_process("service", "remove", "--yes").code == 0
    assert f"systemctl --user disable --now {unit.name}" in log.read_text()
    assert not unit.exists()


def test_a_user_who_lingers_already_is_not_asked_to(programs: Path) -> None:
    systemctl(programs, linger="yes")
    assert "enable-linger" not in in_this_process("service", "install", "--dry-run").out


def test_systemd_that_runs_nothing_of_the_users_is_passed_over(programs: Path) -> None:
    systemctl(programs, code=1)
    fake_program(programs, "crontab", TABLE)
    assert "@reboot" in in_this_process("service", "install", "--dry-run").out


def test_a_word_of_a_unit_is_what_it_was() -> None:
    text = unit_text(['/o dd/py"th%on$', "-m"], {"A": "b\\c d"})
    assert 'ExecStart="/usr/bin/env" "/o dd/py\\"th%%on$$" "-m"' in text
    assert 'Environment="A=b\\\\c d"' in text


# the process


def end(service: subprocess.Popen[str]) -> None:
    if service.poll() is None:
        service.terminate()
        service.communicate(timeout=LIMIT_S)
        assert service.returncode == 0


def test_a_keeper_that_is_killed_comes_back(corral: Corral) -> None:
    """With the real processes: a service, a fleet without members, its keeper."""
    folder = create_fleet(Fleet("herd", "m", 1, 1, 0, time.time()))
    service = corral.start("service", "run")
    try:
        first = until(lambda: holder_of(folder.keeper), "a keeper")
        assert running_service() is not None
        again = corral("service", "run")  # what cron starts every five minutes
        assert (again.code, again.out) == (0, "")
        assert f"process {first.pid}" in corral("service", "status").out
        end(service)
        assert not first.is_gone()  # the keeper goes on without it
        os.kill(first.pid, signal.SIGKILL)
        service = corral.start("service", "run")

        def another() -> Identity | None:
            now = holder_of(folder.keeper)
            return now if now is not None and now.pid != first.pid else None

        second: Identity | None = until(another, "another keeper")
        assert second is not None
        change_fleet(folder, lambda one: Fleet(**{**vars(one), "closed": "over"}))
        until(second.is_gone, "it ends with its fleet")
    finally:
        end(service)


def test_the_service_of_an_earlier_boot_is_replaced(corral: Corral) -> None:
    before = Identity(os.getpid(), os.uname().nodename, "another boot", 1, "its processes")
    service_lock().parent.mkdir(parents=True)
    service_lock().write_text(dump_json(before))
    os.utime(service_lock(), (1, 1))
    assert running_service() is None
    assert isinstance(in_this_process("service", "status"), Done)

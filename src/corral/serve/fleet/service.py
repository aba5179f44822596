"""What starts the keepers of this home again: after a boot, and after they were killed.

`corral service run` is one process for each machine. It starts a keeper that stands by for every living fleet and
every living chain. What starts that process after a boot is systemd (a unit of the user), cron, or SLURM's own cron.
Each is changed by a list of steps, which is shown first and done after that.

Not covered: fleets of other homes; each home has a service of its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from corral.base.errors import CorralError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.base.home import home_dir
from corral.base.lock import FileLock, holder_of
from corral.base.processes import OWN_COMMAND, Identity
from corral.base.shell import Completed, run
from corral.deploy.deployment.folder import all_folders
from corral.serve.fleet.record import BEAT_S, SILENT_S, FleetFolder, all_fleets, read_fleet

INTERVAL_S = 5.0
AGAIN_S = 30.0  # before a keeper that ended at once is started again
KEPT_NAMES = ("PATH", "CORRAL_HOME", "XDG_DATA_HOME", "CORRAL_SSH", "SLURM_CONF", "HF_HOME")  # of the environment


@dataclass(frozen=True)
class Step:
    """One thing to do: a command, or a file to write or to remove."""

    argv: tuple[str, ...] = ()
    file: str = ""
    text: str | None = None  # of the file; None: it is removed

    def lines(self) -> list[str]:
        if self.argv:
            return [f"run {shlex.join(self.argv)}"]
        if self.text is None:
            return [f"remove {self.file}"]
        return [f"write {self.file}", *(f"    {line}" for line in self.text.splitlines())]

    def do(self) -> None:
        if self.argv:
            _run(*self.argv).or_raise("The service could not be changed", "Choose another --with.")
        elif self.text is None:
            Path(self.file).unlink(missing_ok=True)
        else:
            Path(self.file).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(self.file), self.text)


class Starter(Protocol):
    """What starts the service after a boot."""

    def refusal(self) -> str:
        """Why it cannot be used here; empty if it can."""

    def is_installed(self) -> bool: ...

    def install(self, options: Sequence[str]) -> list[Step]: ...

    def remove(self) -> list[Step]: ...


class Systemd:
    """A unit of the user's own systemd, which runs without a login where lingering is allowed."""

    @property
    def unit(self) -> Path:
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        default = "CORRAL_HOME" not in os.environ
        return Path(folder) / "systemd" / "user" / f"corral{'' if default else f'-{_digest()}'}.service"

    def refusal(self) -> str:
        if not shutil.which("systemctl"):
            return "there is no systemctl here"
        answer = _run("systemctl", "--user", "show-environment")
        return f"systemd runs no services of yours: {answer.last_line}" if answer.code else ""

    def is_installed(self) -> bool:
        return self.unit.exists()

    def install(self, options: Sequence[str]) -> list[Step]:
        _refuse_options(options, "systemd")
        linger = _run("loginctl", "show-user", str(os.getuid()), "--property=Linger")
        return [
            *([] if linger.stdout.strip() == "Linger=yes" else [Step(("loginctl", "enable-linger"))]),
            Step(file=str(self.unit), text=unit_text(command(), environment())),
            Step(("systemctl", "--user", "daemon-reload")),
            Step(("systemctl", "--user", "enable", "--now", self.unit.name)),
        ]

    def remove(self) -> list[Step]:
        return [
            Step(("systemctl", "--user", "disable", "--now", self.unit.name)),
            Step(file=str(self.unit), text=None),
            Step(("systemctl", "--user", "daemon-reload")),
        ]


@dataclass(frozen=True)
class Cron:
    """Lines of the user's table of cron, or of SLURM's cron (`scrontab`), whose lines become jobs."""

    program: str

    def refusal(self) -> str:
        if not shutil.which(self.program):
            return f"there is no {self.program} here"
        try:
            self._table()
        except CorralError as error:
            return error.message
        return ""

    def is_installed(self) -> bool:
        return self._mark in self._table()

    def install(self, options: Sequence[str]) -> list[Step]:
        line = shlex.join(["env", *(f"{name}={value}" for name, value in environment().items()), *command()])
        line = f"{line} >>{shlex.quote(str(service_folder() / 'service.log'))} 2>&1".replace("%", r"\%")
        if self.program == "scrontab":  # the job goes on until its time limit; the next one follows
            rows = [
                *(f"#SCRON --{option.lstrip('-')}" for option in ("job-name=corral-service", *options)),
                f"*/5 * * * * {line}",
            ]
        else:
            _refuse_options(options, self.program)
            rows = [f"@reboot {line}", f"*/5 * * * * {line}"]
        return self._write([*self._others(), self._mark, *rows, self._end])

    def remove(self) -> list[Step]:
        return self._write(self._others())

    @property
    def _mark(self) -> str:
        return f"# corral service of {home_dir()}: begin"

    @property
    def _end(self) -> str:
        return f"# corral service of {home_dir()}: end"

    def _write(self, lines: Sequence[str]) -> list[Step]:
        table = str(service_folder() / self.program)
        return [Step(file=table, text="".join(f"{line}\n" for line in lines)), Step((self.program, table))]

    def _others(self) -> list[str]:
        """The table without the lines of this service."""
        lines, inside = [], False
        for line in self._table():
            inside = inside or line == self._mark
            if not inside:
                lines.append(line)
            inside = inside and line != self._end
        return lines

    def _table(self) -> list[str]:
        """The user's table. One that cannot be read is not an empty one: writing it would lose its lines."""
        answer = _run(self.program, "-l")
        if answer.code == 0:
            return answer.stdout.splitlines()
        if "no crontab for" in answer.stderr + answer.stdout:
            return []
        raise UnreachableError(
            f"`{self.program} -l` failed: {answer.last_line}.", "Try again later, or choose another --with."
        )


STARTERS: Mapping[str, Starter] = {"systemd": Systemd(), "cron": Cron("crontab"), "scrontab": Cron("scrontab")}


def choose_starter(name: str | None) -> str:
    """The given one, or the first that can be used here."""
    refusals = {one: STARTERS[one].refusal() for one in ([name] if name else STARTERS)}
    if usable := next((one for one, why in refusals.items() if not why), None):
        return usable
    reasons = "; ".join(f"{one}: {why}" for one, why in refusals.items())
    raise UsageError(
        f"nothing here starts a service after a boot ({reasons}).",
        "Run `corral service run` by hand after a boot, or start fleets on SLURM with `--keeper job`.",
    )


def command() -> tuple[str, ...]:
    return (*OWN_COMMAND, "service", "run")


def environment() -> dict[str, str]:
    """What the service needs of this shell's environment; no secrets: it is written into a file."""
    return {**{name: os.environ[name] for name in KEPT_NAMES if name in os.environ}, "CORRAL_HOME": str(home_dir())}


def unit_text(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    """A unit as systemd reads it. It ends alone: keepers, gateways and engines that it started go on."""
    settings = [_quoted(f"{name}={value}") for name, value in variables.items()]
    words = ["/usr/bin/env", *argv]  # systemd runs no program with a quote or a dollar in its path
    start = " ".join(_quoted(word).replace("$", "$$") for word in words)
    return "\n".join([
        "[Unit]", "Description=Corral: keepers of fleets", "StartLimitIntervalSec=0", "",
        "[Service]", *(f"Environment={setting}" for setting in settings), f"ExecStart={start}",
        "Restart=always", "RestartSec=10", "KillMode=process", "",
        "[Install]", "WantedBy=default.target", "",
    ])  # fmt: skip


def _quoted(word: str) -> str:
    if "\n" in word:
        raise UsageError(f"{word!r} has a line break, which no unit of systemd can hold.", "Choose --with cron.")
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _refuse_options(options: Sequence[str], program: str) -> None:
    if options:
        raise UsageError(f"{program} has no options such as {options[0]!r}.", "--option is for --with scrontab.")


def _run(*argv: str) -> Completed:
    return run(argv, timeout_s=20)


def _digest() -> str:
    return f"{zlib.crc32(str(home_dir()).encode()):08x}"


# The process


def service_folder() -> Path:
    return home_dir() / "service"


def service_lock() -> Path:
    """Held by the service of this machine."""
    return service_folder() / f"{socket.gethostname()}.lock"


def running_service() -> Identity | None:
    return holder_of(service_lock(), SILENT_S)


def serve_home(say: Callable[[str], None], wanted: Callable[[], bool]) -> str:
    """Keep a keeper standing by for everything that has one, until nobody wants that any more; why it ended."""
    service_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(service_lock(), _refuse, SILENT_S, BEAT_S, watched=True):
        started: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        while wanted():
            try:
                for folder, argv in kept_folders():
                    _ensure(folder, argv, started, say)
            except (CorralError, OSError) as error:  # the home cannot be read now
                say(str(error))
            until_s = time.monotonic() + INTERVAL_S
            while wanted() and time.monotonic() < until_s:
                time.sleep(0.2)
        for process, _ in started.values():  # those that only stand by: whoever keeps a fleet goes on
            if process.poll() is None and process.pid not in _keepers():
                process.terminate()
    return "told to stop; keepers, gateways and members go on"


class AlreadyRunsError(CorralError):
    """Another process is the service of this machine."""


def _refuse(holder: Identity) -> None:
    """A holder of an earlier boot gives no sign any more, and is replaced."""
    if holder.is_among_ours():
        raise AlreadyRunsError(f"the service already runs: process {holder.pid}.", "There is nothing to do.")
    time.sleep(0.2)


def _keepers() -> set[int]:
    holders = [holder_of(folder.keeper, None) for folder, _ in kept_folders()]
    return {one.pid for one in holders if one is not None and one.is_among_ours()}


def kept_folders() -> Iterator[tuple[FleetFolder, tuple[str, ...]]]:
    """The fleets and chains that have not ended, each with the words that keep it."""
    for folder in all_fleets():
        if _is_open(folder):
            yield folder, ("fleet", "keep", "--stand-by", folder.name)
    for deployment in all_folders():
        chain = FleetFolder(deployment.path)
        if chain.record.is_file() and _is_open(chain):
            yield chain, ("renew", deployment.name)


def _is_open(folder: FleetFolder) -> bool:
    try:
        return not read_fleet(folder).closed
    except (CorralError, OSError):
        return False  # it is read again soon


def _ensure(
    folder: FleetFolder,
    argv: Sequence[str],
    started: dict[str, tuple[subprocess.Popen[bytes], float]],
    say: Callable[[str], None],
) -> None:
    """Start a keeper, unless one that this machine can see runs, or the last one ended a moment ago."""
    holder = holder_of(folder.keeper, None)
    if holder is not None and holder.is_among_ours():
        return
    process, started_s = started.get(str(folder.path), (None, float("-inf")))
    if (process is not None and process.poll() is None) or time.monotonic() - started_s < AGAIN_S:
        return
    say(f"{folder.name}: starting a keeper")
    with folder.keeper_log.open("ab") as log:
        process = subprocess.Popen(
            [*OWN_COMMAND, *argv],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    started[str(folder.path)] = (process, time.monotonic())

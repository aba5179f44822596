"""Reaching nodes with the system's own `ssh`: the user's configuration, agent, jump hosts and host keys apply.

One connection per host is kept open for a minute (`ControlMaster`), unless the user's configuration already shares
connections. A host that does not answer, refuses the key, or shows another host key than before becomes one clear
error; a changed host key is never accepted. `CORRAL_SSH` replaces the command, for example `ssh -F other_config`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from corral.base.errors import AccessError, CorralError, DataError, UnreachableError, UsageError
from corral.base.files import existing_file, make_private_dir, read_text, write_atomic
from corral.base.home import home_dir
from corral.base.shell import CommandHandle, Completed, capture
from corral.base.untrusted import plain
from corral.node.network import some_of

LONGEST_FOLDER = 48  # for a socket: ssh adds 40 characters, and 17 while it makes it; 107 are allowed
FAN_OUT = 32  # hosts at the same time
CONNECT_S = 10
MOST_OUTPUT_BYTES = 64 << 20  # of one command on a host; a report holds two files of 4 MiB in base64
ANNOUNCE_AFTER_S = 1.5
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*")
Result = TypeVar("Result")


def _say_nothing(_: str) -> None:
    """The default: waits are not announced."""


# whether nodes may be asked, and their names looked up
MAY_ASK: ContextVar[bool] = ContextVar("MAY_ASK", default=True)

# announces for which hosts a command waits
WAITING: ContextVar[Callable[[str], None]] = ContextVar("WAITING", default=_say_nothing)


@contextlib.contextmanager
def announced_wait(text: str) -> Iterator[None]:
    """Announce what a command waits for, once it has waited for a moment."""
    timer = threading.Timer(ANNOUNCE_AFTER_S, WAITING.get(), (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def asking_no_node() -> Iterator[None]:
    """What would ask a node, or look up its name, is refused or left out meanwhile."""
    token = MAY_ASK.set(False)
    try:
        yield
    finally:
        MAY_ASK.reset(token)


class UnknownHostError(UnreachableError):
    """A name that ssh cannot resolve: usually mistyped; waiting does not help."""


def ssh_command() -> list[str]:
    """The ssh to use: `CORRAL_SSH`, or plain `ssh`."""
    return shlex.split(os.environ.get("CORRAL_SSH", "")) or ["ssh"]


@dataclass(frozen=True)
class Forward:
    """A tunnel from a port of this machine to an address that another host reaches."""

    port: int  # of this machine
    far: str  # HOST:PORT, as `through` reaches it
    through: str
    ssh: Ssh = field(default_factory=lambda: Ssh())

    def command(self, near: Path) -> list[str]:
        """The ssh that forwards what comes to a socket file, and ends when it cannot."""
        return [*_forwarding(self.ssh), "-L", f"{near}:{self.far}", check_host(self.through)]


def _forwarding(ssh: Ssh) -> list[str]:
    options = ["-N", "-T", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-o", "ControlMaster=no"]
    options += ["-o", "ControlPath=none", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    options += ["-o", "StreamLocalBindUnlink=yes", "-o", "StreamLocalBindMask=0177"]
    return [*ssh.argv, *options]


def check_host(name: str) -> str:
    """The name, if it can be given to ssh: a host, user@host, or an alias of the user's configuration."""
    if not _HOST.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of a host.", "Give names as ssh knows them, with commas between.")
    return name


def split_hosts(text: str) -> tuple[str, ...]:
    """Hosts from `a,b,c`."""
    return tuple(check_host(name.strip()) for name in text.split(",") if name.strip())


def typed_hosts(text: str) -> tuple[str, ...]:
    """Hosts as a person types them in a terminal: `a,b,c`, or `@FILE`. From elsewhere, no file is read."""
    return read_hosts_file(text[1:]) if text.startswith("@") else split_hosts(text)


def read_hosts_file(path: str) -> tuple[str, ...]:
    """One host per line; `#` begins a comment. No error shows a word of the file, which may be any file."""
    if not existing_file(path).is_file():  # reading a pipe might never end
        raise DataError(f"the hosts file {path!r} is not a file.", "Name a file with one host per line.")
    hosts = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        row = line.partition("#")[0].split()
        if row and not _HOST.fullmatch(row[0]):
            raise DataError(
                f"line {number} of {path!r} does not begin with the name of a host.",
                "Name a file with one host per line, as ssh knows it.",
            )
        hosts += row[:1]
    return tuple(hosts)


@dataclass(frozen=True)
class Ssh:
    """Runs commands on hosts; holds no state beyond the shared connections of ssh itself."""

    connect_s: float = CONNECT_S
    identity: str | None = None  # ssh -i: a key file
    config: str | None = None  # ssh -F: a configuration in the place of the user's own

    @property
    def argv(self) -> list[str]:
        """The ssh to use, with its key and configuration."""
        options = (("-i", self.identity), ("-F", self.config))
        return [*ssh_command(), *(part for flag, path in options if path for part in (flag, path))]

    def run(
        self,
        host: str,
        argv: Sequence[str],
        stdin: bytes = b"",
        timeout_s: float = 60,
        check: bool = False,
        handle: CommandHandle | None = None,
    ) -> Completed:
        """Run a command on a host to its end. With `check`, an exit code other than 0 is an error."""
        command = [*self.prefix(host), "--", shlex.join(argv)]
        try:
            code, stdout, stderr = capture(command, stdin, timeout_s, MOST_OUTPUT_BYTES, handle)
        except FileNotFoundError:
            raise CorralError(f"the command {command[0]!r} is not on this machine.", "Install OpenSSH.") from None
        except subprocess.TimeoutExpired:
            raise UnreachableError(
                f"{host} did not answer within {timeout_s:g} s.",
                "Is the node up? Try `ssh` to it by hand.",
                host=host,
            ) from None
        out, err = plain(stdout.decode("utf-8", "replace")), plain(stderr.decode("utf-8", "replace"))
        if code == 255:
            raise _connection_error(host, err)
        completed = Completed(tuple(argv), code, out, err)
        return completed.or_raise(f"on {host}") if check else completed

    def python(
        self,
        host: str,
        source: str,
        arguments: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 60,
        handle: CommandHandle | None = None,
    ) -> Completed:
        """Run Python source on a host without placing a file; `stdin` is what the script reads."""
        # the source goes to stdin, before what the script itself reads: it may be too long for an argument
        length = len(source.encode())
        boot = f"import sys; exec(compile(sys.stdin.buffer.read({length}), 'corral', 'exec'))"
        argv = ["python3", "-I", "-c", boot, *arguments]
        return self.run(host, argv, source.encode() + stdin, timeout_s, handle=handle)

    def write(self, host: str, path: str, data: bytes, mode: int = 0o600, timeout_s: float = 60) -> None:
        """Write a file on a host in one step, readable by its owner only unless `mode` says more."""
        temporary = f"{path}.corral-tmp"
        script = f"umask 077 && cat > {shlex.quote(temporary)} && chmod {mode:o} {shlex.quote(temporary)}"
        script += f" && mv -f {shlex.quote(temporary)} {shlex.quote(path)}"
        self.run(host, ["sh", "-c", script], data, timeout_s, check=True)

    def prefix(self, host: str) -> list[str]:
        """The arguments before the command."""
        return [*self.argv, *_options(tuple(self.argv), check_host(host), self.connect_s), host]


def each(
    hosts: Sequence[str], task: Callable[[str], Result], width: int = FAN_OUT
) -> dict[str, Result | CorralError]:
    """Do something for every host at once, at most `width` at a time; a failure is the host's own result."""
    if not MAY_ASK.get():
        raise UsageError(
            f"what {some_of(list(hosts), 3)} has is not known: a preview asks no node.",
            "Name it in a profile (gpus in [hardware]), or look from a terminal: corral doctor --hosts HOSTS.",
        )

    def attempt(host: str) -> Result | CorralError:
        try:
            return task(host)
        except CorralError as error:
            return error

    with ThreadPoolExecutor(max(1, min(width, len(hosts)))) as workers:
        tasks = {host: workers.submit(attempt, host) for host in hosts}
        if wait(tasks.values(), ANNOUNCE_AFTER_S).not_done:
            late = [host for host, answer in tasks.items() if not answer.done()]
            WAITING.get()(f"waiting for {some_of(late, 5)}")
        return {host: answer.result() for host, answer in tasks.items()}


@lru_cache(maxsize=1024)
def _options(command: tuple[str, ...], host: str, connect_s: float) -> tuple[str, ...]:
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s:g}", "-o", "ServerAliveInterval=5"]
    options += ["-o", "ServerAliveCountMax=3", "-T"]
    if not _shares_connections(command, host):
        options += ["-o", "ControlMaster=auto", "-o", "ControlPersist=60"]
        options += ["-o", f"ControlPath={socket_folder()}/%C"]
    return tuple(options)


def _shares_connections(command: tuple[str, ...], host: str) -> bool:
    """Whether the user's configuration already names a control socket for this host."""
    try:
        done = subprocess.run([*command, "-G", host], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    pairs = (line.split(None, 1) for line in done.stdout.splitlines())
    settings = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return settings.get("controlpath", "none") != "none"


def socket_folder() -> Path:
    """A private folder for control sockets, with a short path, because that of a socket may have 107 bytes at most.

    It is below the user's own runtime folder, where there is one. Otherwise it is a folder in /tmp with an
    unpredictable name, which is kept in Corral's home: a link, or a folder of another user, is never used.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    if _is_private(runtime) and len(str(runtime)) < LONGEST_FOLDER - len("/corral-ssh"):
        folder = runtime / "corral-ssh"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
        if _is_private(folder):
            return folder
    note = home_dir() / f".ssh-sockets-{socket.gethostname()}"
    with contextlib.suppress(OSError, ValueError):
        noted = Path(note.read_text(encoding="utf-8").strip())
        if _is_private(noted):
            return noted
    base = tempfile.gettempdir()
    made = Path(tempfile.mkdtemp(prefix="corral-", dir=base if len(base) < LONGEST_FOLDER - 20 else "/tmp"))  # noqa: S108
    make_private_dir(home_dir())
    write_atomic(note, f"{made}\n")
    return made


def _is_private(folder: Path) -> bool:
    """Whether it is a folder, not a link, that belongs to this user and that nobody else may enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


_ERRORS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
        AccessError,
        "the host key of {host} is unknown, or is not the one in known_hosts",
        "If the host was reinstalled, run `ssh-keygen -R {host}` and log in once by hand; otherwise ask its owner.",
    ),
    (
        r"Permission denied|Too many authentication failures",
        AccessError,
        "{host} refused the ssh key",
        "`ssh {host}` must work without a password: load the key with ssh-add, or name it in ~/.ssh/config.",
    ),
    (
        r"Could not resolve hostname|Name or service not known",
        UnknownHostError,
        "the host name {host} does not resolve",
        "Check the spelling, or add a Host entry to ~/.ssh/config.",
    ),
    (
        r"Connection refused",
        UnreachableError,
        "{host} refused the connection: no ssh server listens there",
        "Start sshd there, or check the port.",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        UnreachableError,
        "{host} cannot be reached",
        "Is the node up, and is it on this network? Try `ssh {host}` by hand.",
    ),
)


def _connection_error(host: str, stderr: str) -> CorralError:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    for pattern, kind, message, remedy in _ERRORS:
        if re.search(pattern, stderr):
            return kind(message.format(host=host) + ".", remedy.format(host=host), host=host, said=lines[-1])
    last_line = lines[-1] if lines else "ssh printed nothing"
    return UnreachableError(
        f"the connection to {host} was lost: {last_line}", f"Try `ssh {host}` by hand.", host=host
    )

"""Running other programs, in one place that tests can replace.

Commands are argument lists, never shell text. A command that is missing, hangs or fails becomes one clear error. The
output of a command on another machine is bounded (`capture`), so that it cannot use up this machine's memory.

A command of Corral that only shows states answers soon (`answering_soon`), whatever does not answer it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import IO

from corral.base.errors import CorralError, DataError, UnreachableError

SOON_S = 1.2  # for everything that a command asks other machines
BUSY = 2.0  # processes that wait for each core: with fewer, answers come about as fast as on an idle machine
LEAST_S = 0.2  # for one question, also when that time is over
_DEADLINE: ContextVar[float] = ContextVar("_DEADLINE", default=math.inf)


@contextlib.contextmanager
def answering_soon() -> Iterator[None]:
    """Bound the questions to other machines, all of them together; a busy machine gives them up to twice as long."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    token = _DEADLINE.set(time.monotonic() + SOON_S * min(2.0, max(1.0, load / BUSY)))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def within_deadline(usual_s: float) -> float:
    """How long a question may take: as usual, or what is left until the command has to answer."""
    return round(max(LEAST_S, min(usual_s, _DEADLINE.get() - time.monotonic())), 1)  # it stands in messages


class CommandHandle:
    """Ends a command that another thread runs, when its result is not needed any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._killed:
                process.kill()

    def kill(self) -> None:
        """End the attached command, and any that is attached later."""
        with self._lock:
            self._killed = True
            if self._process:
                self._process.kill()


@dataclass(frozen=True)
class Completed:
    """How a command ended."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of its stderr, or of its stdout; empty when it printed nothing."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1].strip() if lines else ""

    def or_raise(self, what: str, remedy: str = "") -> Completed:
        """This, or an error whose message ends with the command's last line."""
        if self.code == 0:
            return self
        last_line = self.last_line or "nothing"
        raise CorralError(f"{what}. `{self.argv[0]}` ended with code {self.code} and said: {last_line}", remedy)


def capture(
    argv: Sequence[str], stdin: bytes, timeout_s: float, most_bytes: int, handle: CommandHandle | None = None
) -> tuple[int, bytes, bytes]:
    """Run a command that is not trusted: its exit code, stdout and stderr, or an error when it prints too much.

    Raises what `subprocess.run` raises for a command that is missing or takes too long.
    """
    until = time.monotonic() + timeout_s
    output = {"stdout": bytearray(), "stderr": bytearray()}
    pipe = subprocess.PIPE
    with subprocess.Popen(list(argv), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        if handle:
            handle.attach(process)
        readers = [
            threading.Thread(target=_read, args=(process, stream, output[name], most_bytes), daemon=True)
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for thread in [*readers, threading.Thread(target=_write, args=(process.stdin, stdin), daemon=True)]:
            thread.start()
        try:
            code = process.wait(timeout_s)
            for thread in readers:  # a process that it left behind may still hold its output
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    raise subprocess.TimeoutExpired(list(argv), timeout_s)
        except BaseException:
            process.kill()
            raise
    if any(len(data) > most_bytes for data in output.values()):
        raise DataError(f"`{argv[0]}` printed more than {most_bytes >> 20} MiB and was cut off.", "Look at the host.")
    return code, bytes(output["stdout"]), bytes(output["stderr"])


def _write(stream: IO[bytes] | None, data: bytes) -> None:
    assert stream is not None
    with contextlib.suppress(OSError, ValueError):  # it ended without reading everything
        rest = memoryview(data)
        while rest:
            rest = rest[stream.write(rest) :]
        stream.close()


def _read(process: subprocess.Popen[bytes], stream: IO[bytes] | None, output: bytearray, most_bytes: int) -> None:
    assert stream is not None
    with contextlib.suppress(OSError, ValueError):
        while block := stream.read(1 << 16):
            output += block
            if len(output) > most_bytes:
                process.kill()
                return


def quote_command(argv: Sequence[str]) -> str:
    """The command as a person would paste it."""
    return shlex.join(argv)


def run(argv: Sequence[str], timeout_s: float = 60, env: Mapping[str, str] | None = None) -> Completed:
    """Run a command to its end and keep its output. A Python among them imports nothing from the current folder."""
    environment = {**(os.environ if env is None else env), "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            list(argv), capture_output=True, timeout=timeout_s, env=environment, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise CorralError(f"the command {argv[0]!r} is not on this machine.", f"Install {argv[0]}.") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"`{argv[0]}` did not answer within {timeout_s:g} s.", "Try again later.") from None
    out, err = (data.decode("utf-8", "replace") for data in (done.stdout, done.stderr))
    return Completed(tuple(argv), done.returncode, out, err)


def stream(argv: Sequence[str], on_line: Callable[[str], None], env: Mapping[str, str] | None = None) -> Completed:
    """Run a command and pass on each line as it comes; ends the command when interrupted."""
    lines: list[str] = []
    with subprocess.Popen(
        list(argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env
    ) as process:
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                lines.append(line)
                on_line(line)
        except BaseException:
            process.terminate()
            raise
        code = process.wait()
    return Completed(tuple(argv), code, "\n".join(lines), "")

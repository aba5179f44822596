"""Running foreign commands: one door, so that tests can put a fake behind it.

Commands are argument lists, never shell text. A command that is missing, hangs, or fails becomes one clear error.
What a command on another machine may say is bounded (`capture`): it is not trusted with this machine's memory.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from corral.base.errors import CorralError, DataError, UnreachableError


class Leash:
    """Holds a command that another thread runs, to end it when nobody waits for it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._cut = False

    def hold(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._cut:
                process.kill()

    def cut(self) -> None:
        """End the command that is held, and any that comes."""
        with self._lock:
            self._cut = True
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
        """The last line it said, on stderr before stdout; empty when it said nothing."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1].strip() if lines else ""

    def or_raise(self, what: str, remedy: str = "") -> Completed:
        """This, or an error whose message carries the command's last words."""
        if self.code == 0:
            return self
        said = self.last_line or "nothing"
        raise CorralError(f"{what}. `{self.argv[0]}` ended with code {self.code} and said: {said}", remedy)


def capture(
    argv: Sequence[str], stdin: bytes, timeout_s: float, most_bytes: int, leash: Leash | None = None
) -> tuple[int, bytes, bytes]:
    """Run a command whose words are not trusted: its exit code and what it said, or an error when it says too much.

    Raises what `subprocess.run` raises for a command that is missing or takes too long.
    """
    until = time.monotonic() + timeout_s
    heard = {"stdout": bytearray(), "stderr": bytearray()}
    pipe = subprocess.PIPE
    with subprocess.Popen(list(argv), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        if leash:
            leash.hold(process)
        listeners = [
            threading.Thread(target=_listen, args=(process, stream, heard[name], most_bytes), daemon=True)
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for thread in [*listeners, threading.Thread(target=_speak, args=(process.stdin, stdin), daemon=True)]:
            thread.start()
        try:
            code = process.wait(timeout_s)
            for thread in listeners:  # a process that it left behind may still hold its output
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    raise subprocess.TimeoutExpired(list(argv), timeout_s)
        except BaseException:
            process.kill()
            raise
    if any(len(words) > most_bytes for words in heard.values()):
        raise DataError(f"`{argv[0]}` printed more than {most_bytes >> 20} MiB and was cut off.", "Look at the host.")
    return code, bytes(heard["stdout"]), bytes(heard["stderr"])


def _speak(stream: IO[bytes] | None, words: bytes) -> None:
    assert stream is not None
    with contextlib.suppress(OSError, ValueError):  # it ended without hearing everything
        rest = memoryview(words)
        while rest:
            rest = rest[stream.write(rest) :]
        stream.close()


def _listen(process: subprocess.Popen[bytes], stream: IO[bytes] | None, heard: bytearray, most_bytes: int) -> None:
    assert stream is not None
    with contextlib.suppress(OSError, ValueError):
        while block := stream.read(1 << 16):
            heard += block
            if len(heard) > most_bytes:
                process.kill()
                return


def quote_command(argv: Sequence[str]) -> str:
    """The command as a person would paste it."""
    return shlex.join(argv)


def run(argv: Sequence[str], timeout_s: float = 60, env: Mapping[str, str] | None = None) -> Completed:
    """Run a command to its end and keep what it said."""
    try:
        done = subprocess.run(
            list(argv), capture_output=True, timeout=timeout_s, env=env, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise CorralError(f"the command {argv[0]!r} is not on this machine.", f"Install {argv[0]}.") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"`{argv[0]}` did not answer within {timeout_s:g} s.", "Try again later.") from None
    out, err = (data.decode("utf-8", "replace") for data in (done.stdout, done.stderr))
    return Completed(tuple(argv), done.returncode, out, err)


def stream(argv: Sequence[str], on_line: Callable[[str], None], env: Mapping[str, str] | None = None) -> Completed:
    """Run a command and hand over each line as it comes; ends the command when interrupted."""
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

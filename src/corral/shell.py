"""Running foreign commands: one door, so that tests can put a fake behind it.

Commands are argument lists, never shell text. A command that is missing, hangs, or fails becomes one clear error.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from corral.errors import CorralError, UnreachableError

__all__ = ["Completed", "quote_command", "run", "stream"]


@dataclass(frozen=True)
class Completed:
    """How a command ended."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    def or_raise(self, what: str, remedy: str = "") -> Completed:
        """This, or an error whose message carries the command's last words."""
        if self.code == 0:
            return self
        words = (self.stderr.strip() or self.stdout.strip()).splitlines()
        said = words[-1] if words else "it said nothing"
        raise CorralError(f"{what}: `{self.argv[0]}` ended with code {self.code}: {said}", remedy)


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

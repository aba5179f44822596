"""`corral` commands that the page's buttons run: children with a session of their own, which outlive the console.

A view makes the arguments from checked values; nothing is taken from the browser as it is. What a command prints goes
into a file of `<home>/console/`, which the page shows; the newest fifty are kept.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corral.base.errors import NotFoundError
from corral.base.files import make_private_dir
from corral.base.home import home_dir
from corral.base.masking import masked_argv
from corral.base.processes import OWN_COMMAND
from corral.deploy.deployment.diagnosis import last_lines

KEPT = 50
LINES = 200


def line_of(argv: Sequence[str]) -> str:
    """The line that does the same in a terminal; it shows no secret."""
    return shlex.join(["corral", *masked_argv(argv)])


@dataclass(frozen=True)
class RunningCommand:
    """A command that was started, or is over: then it has an exit code."""

    id: str
    line: str
    started_s: float
    exit_code: int | None = None
    output: tuple[str, ...] = ()


@dataclass
class _Child:
    line: str
    started_s: float
    process: subprocess.Popen[bytes]
    log: Path


@dataclass
class Commands:
    """Starts commands, and follows those of this console."""

    program: Sequence[str] = OWN_COMMAND
    clock: Callable[[], float] = time.time
    _children: dict[str, _Child] = field(default_factory=dict)

    def start(self, *commands: Sequence[str]) -> RunningCommand:
        """Run commands in the background, each once the one before has succeeded."""
        folder = home_dir() / "console"
        make_private_dir(folder)
        self._forget(folder)
        id = secrets.token_hex(6)
        log = folder / f"{id}.log"
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            process = subprocess.Popen(
                self._argv(commands), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120"},
            )  # fmt: skip
        self._children[id] = _Child(" && ".join(map(line_of, commands)), self.clock(), process, log)
        return self.read(id)

    def _argv(self, commands: Sequence[Sequence[str]]) -> list[str]:
        if len(commands) == 1:
            return [*self.program, *commands[0]]
        return ["sh", "-c", " && ".join(shlex.join([*self.program, *argv]) for argv in commands)]

    def read(self, id: str) -> RunningCommand:
        """One command, with the last lines of what it printed."""
        child = self._children.get(id)
        if child is None:
            raise NotFoundError(f"no command {id!r} was started here.", "Start it again.")
        lines = tuple(last_lines(child.log, LINES)) if child.log.exists() else ()
        return RunningCommand(id, child.line, child.started_s, child.process.poll(), lines)

    def all(self) -> list[RunningCommand]:
        """Those of this console, newest first, without their output."""
        return [
            RunningCommand(id, child.line, child.started_s, child.process.poll())
            for id, child in reversed(self._children.items())
        ]

    def _forget(self, folder: Path) -> None:
        """Keep the newest; one that still runs stays."""
        over = [id for id, child in self._children.items() if child.process.poll() is not None]
        for id in over[: max(0, len(self._children) - KEPT + 1)]:
            del self._children[id]
        with contextlib.suppress(OSError):
            logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
            living = {child.log for child in self._children.values()}
            for path in itertools.islice((path for path in logs if path not in living), KEPT, None):
                path.unlink(missing_ok=True)

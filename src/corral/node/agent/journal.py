"""The agent's journal: the events that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any

from ..states import ENDED, State, may_follow

TAIL_BYTES = 1 << 16  # of the journal: the last state is within
SPARE_BYTES = 1 << 12  # held back for a state that must be written although the disk is full


class TransitionError(Exception):
    """A state that cannot follow the one before."""


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Journal:
    """Appends events, each with one write and one sync. States follow `states.TRANSITIONS`.

    A file beside it holds a block of the disk, which is freed when a state finds the disk full: the end of a rank
    must be recorded whatever its cause. If something else fills the block first, the state is lost.
    """

    def __init__(self, path: str, rank: int) -> None:
        # opened once: when the folder is set aside for a new launch, late events stay with the old one
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._spare = os.path.join(os.path.dirname(path), "spare")
        with contextlib.suppress(OSError), open(self._spare, "wb", opener=_open_private) as file:
            file.write(os.urandom(SPARE_BYTES))  # random, so that no file system compresses it away
        self._rank = rank
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.state = State.STAGING  # placed, and not started

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def catch_up(self) -> None:
        """Read the state that another process wrote last."""
        size = os.lseek(self._descriptor, 0, os.SEEK_END)
        tail = os.pread(self._descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
        for line in reversed(tail.split(b"\n")):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                if event["kind"] == "state":
                    self.state = State(event["state"])
                    return

    def write_state(self, state: State, **details: Any) -> None:
        """Record the rank's new state; refuses one that cannot follow the last."""
        if not may_follow(self.state, state):
            raise TransitionError("%s cannot follow %s" % (state, self.state))
        self.state = state
        self.write("state", state=state, **details)

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def write(self, kind: str, **details: Any) -> None:
        body = {"t": round(time.time(), 3), "kind": kind, "rank": self._rank, "elapsed_s": round(self.elapsed(), 3)}
        body.update(details)
        line = (json.dumps(body) + "\n").encode()
        try:
            with self._lock:
                self._append(line)
        except OSError:  # a full disk must not end a running server; only states must be recorded
            if kind != "state":
                return
            with self._lock:
                with contextlib.suppress(OSError):
                    os.unlink(self._spare)
                self._append(line)

    def _append(self, line: bytes) -> None:
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            line = b"\n" + line  # end a line that a crash or a full disk cut short
        while line:
            line = line[os.write(self._descriptor, line) :]
        os.fsync(self._descriptor)


def private_tmp(launch_id: str) -> str:
    """The temporary folder of a launch; short, because the path of a socket may have 107 bytes at most."""
    base = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    return os.path.join(base if len(base) < 40 else "/tmp", "corral-" + launch_id)  # noqa: S108

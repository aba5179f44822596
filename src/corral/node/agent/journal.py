"""What the agent writes: its events; and its temporary folder."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any

from ..states import ENDED, State, may_follow

TAIL_BYTES = 1 << 16  # of the journal: the last state is within
SPARE_BYTES = 1 << 12  # kept for the words that must be written, should the disk be full by then


class TransitionError(Exception):
    """A state was to be written that cannot follow the one before."""


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Journal:
    """Appends events; one write and one sync each. States follow their table.

    A block of the disk is held in a file beside it and given back when a state finds the disk full: how a rank ended
    must be readable, however it ended. Whatever else fills the disk may be quicker; then the state is lost.
    """

    def __init__(self, path: str, rank: int) -> None:
        # opened once: when the folder is set aside for a new launch, late words stay with the old one
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._spare = os.path.join(os.path.dirname(path), "spare")
        with contextlib.suppress(OSError), open(self._spare, "wb", opener=_for_its_owner) as file:
            file.write(os.urandom(SPARE_BYTES))  # nothing that a file system could compress away
        self._rank = rank
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.state = State.STAGING  # placed, and not begun

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def catch_up(self) -> None:
        """Know the state that another process wrote last."""
        size = os.lseek(self._descriptor, 0, os.SEEK_END)
        tail = os.pread(self._descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
        for line in reversed(tail.split(b"\n")):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                if event["kind"] == "state":
                    self.state = State(event["state"])
                    return

    def tell_state(self, state: State, **details: Any) -> None:
        """Write that the rank is now in this state; refuse one that cannot follow the last."""
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
        except OSError:  # a full disk must not end a server that runs; only its states must be told
            if kind != "state":
                return
            with self._lock:
                with contextlib.suppress(OSError):
                    os.unlink(self._spare)
                self._append(line)

    def _append(self, line: bytes) -> None:
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            line = b"\n" + line  # close a line that a crash, or a full disk, tore
        while line:
            line = line[os.write(self._descriptor, line) :]
        os.fsync(self._descriptor)


def private_tmp(launch_id: str) -> str:
    """A temporary folder of this launch alone; short, because a socket's path may have 107 bytes at most."""
    base = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    return os.path.join(base if len(base) < 40 else "/tmp", "corral-" + launch_id)  # noqa: S108

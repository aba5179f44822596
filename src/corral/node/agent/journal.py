"""What the agent writes: its events; and its temporary folder."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any


class Journal:
    """Appends events; one write and one sync each."""

    def __init__(self, path: str, rank: int) -> None:
        # opened once: when the folder is set aside for a new launch, late words stay with the old one
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._rank = rank
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.ended = False

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def write(self, kind: str, **details: Any) -> None:
        body = {"t": round(time.time(), 3), "kind": kind, "rank": self._rank, "elapsed_s": round(self.elapsed(), 3)}
        body.update(details)
        line = (json.dumps(body) + "\n").encode()
        try:
            with self._lock:
                end = os.lseek(self._descriptor, 0, os.SEEK_END)
                if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
                    line = b"\n" + line  # close a line that a crash tore
                os.write(self._descriptor, line)
                os.fsync(self._descriptor)
        except OSError:  # a full disk must not end a server that runs; only its states must be told
            if kind == "state":
                raise


def private_tmp(launch_id: str) -> str:
    """A temporary folder of this launch alone; short, because a socket's path may have 107 bytes at most."""
    base = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    return os.path.join(base if len(base) < 40 else "/tmp", "corral-" + launch_id)  # noqa: S108

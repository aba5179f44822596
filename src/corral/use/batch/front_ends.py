"""Whether HTTP was the limit of a batch: how busy the engine's API server processes were while it ran.

Measured, not guessed: the processor time of the processes that listen at the deployment's row sockets, which are on
this machine. Nothing is said of engines elsewhere, nor of a batch too short to tell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from corral.base.processes import processor_s
from corral.client.endpoint import Endpoint
from corral.client.row_socket import RowSocketEndpoint, row_processes
from corral.deploy.deployment.folder import DeploymentFolder
from corral.use.batch.core.run import Listener
from corral.use.batch.core.runner import Counts, Runner

BUSY = 0.8  # of one core, on average over the processes
LEAST_S = 5.0


def advice(busy: float, processes: int) -> str:
    """What to do about API servers that busy; empty where they are not the limit."""
    if busy < BUSY:
        return ""
    who = "API server was" if processes == 1 else f"{processes} API servers were"
    return f"the engine's {who} busy {busy:.0%} of the time: --offline hands rows over without HTTP"


class FrontEndWatch:
    """Passes on what happens, and looks at the API servers of deployments at the beginning and at the end."""

    def __init__(self, inner: Listener, names: Sequence[str]) -> None:
        self._inner, self._folders = inner, [str(DeploymentFolder.of(name).rank(0).path) for name in names]
        self._began: dict[int, float] = {}
        self._began_s = 0.0

    def note(self, kind: str, text: str) -> None:
        self._inner.note(kind, text)

    def tick(self, counts: Counts, runner: Runner) -> None:
        if not self._began_s:
            self._begin([lane.client.endpoint for lane in runner.lanes if lane.up and lane.client])
        self._inner.tick(counts, runner)

    def _begin(self, used: Sequence[Endpoint]) -> None:
        """Once a server is there; where rows go in process, there is nothing to watch."""
        if used:
            in_process = any(isinstance(one, RowSocketEndpoint) for one in used)
            self._began, self._began_s = {} if in_process else self._read(), time.monotonic()

    def advice(self) -> str:
        """What the time since the beginning says."""
        took_s = time.monotonic() - self._began_s
        now = self._read() if self._began and took_s >= LEAST_S else {}
        both = [now[pid] - before for pid, before in self._began.items() if pid in now]
        return advice(sum(both) / took_s / len(both), len(both)) if both else ""

    def _read(self) -> dict[int, float]:
        found = {}
        for pid in (pid for folder in self._folders for pid in row_processes(folder)):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found[pid] = processor_s(pid)
        return found

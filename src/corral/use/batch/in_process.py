"""Rows to the engine inside its own process, without HTTP: with `--in-process`, and where a batch starts the model.

The server is a deployment like any other; only the way of the rows is another one (`corral.client.row_socket`), so
ledger, retries, pace and results are the same. The engine must run on the machine of the runner: a deployment here, a
model that the batch starts here, or the one beside a runner in a scheduler's job. Over HTTP, the processor time of
the processes that listen at a deployment's sockets says whether HTTP was the limit of a batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from corral.base.errors import UsageError
from corral.base.processes import processor_s
from corral.client.endpoint import Absence, Endpoint, ModelServer
from corral.client.row_socket import RowSocketEndpoint, has_row_socket, row_processes
from corral.deploy.deployment.folder import DeploymentFolder
from corral.use.batch.core.run import Listener
from corral.use.batch.core.runner import Counts, Runner
from corral.use.batch.spec import BatchServers


class InProcessServer:
    """A server that gets rows through its sockets; without sockets, over HTTP if `over_http`."""

    def __init__(self, inner: ModelServer, over_http: bool = False) -> None:
        self.name, self._inner, self._over_http = inner.name, inner, over_http
        self.seats = inner.seats
        self._had_sockets = False

    def find(self) -> Endpoint | None:
        endpoint = self._inner.find()
        folder = _sockets_of(endpoint) if endpoint else None
        if endpoint is None or folder is None:
            return endpoint if self._over_http else None
        self._had_sockets = True
        return RowSocketEndpoint(endpoint.base_url, endpoint.model, endpoint.key_file, folder)

    def absence(self) -> Absence:
        """Why it is away; a ready server that never had a socket here will not get one later."""
        if self._inner.find() is None or self.find() is not None or self._had_sockets:
            return self._inner.absence()
        error = UsageError(
            f"{self.name} takes no rows in process: its engine does not run on this machine, or an older Corral "
            "started it.",
            "Leave out --in-process, and rows go over HTTP; or start the model here: --start MODEL.",
        )
        return Absence(error.message.rstrip("."), error.remedy, error)


def _sockets_of(endpoint: Endpoint) -> str | None:
    """The folder with the sockets of a deployment, found through its key file; None when no one listens there."""
    if endpoint.key_file is None:
        return None
    folder = str(DeploymentFolder(Path(endpoint.key_file).parent).rank(0).path)
    return folder if has_row_socket(folder) else None


def as_used(servers: BatchServers, server: ModelServer) -> ModelServer:
    """A server as this batch uses it: over HTTP, or through its sockets."""
    return InProcessServer(server) if servers.in_process else server


BUSY = 0.8  # of one core, on average over the processes
LEAST_S = 5.0


def http_advice(busy: float, processes: int) -> str:
    """Advice for API servers that are this busy; empty where they are not the limit."""
    if busy < BUSY:
        return ""
    who = "API server was" if processes == 1 else f"{processes} API servers were"
    return f"the engine's {who} busy {busy:.0%} of the time: --in-process hands rows over without HTTP"


class FrontEndWatch:
    """A listener that also measures how busy the API servers of deployments were from the first tick to the end."""

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
        """Read the first figures once a server is used; where rows go in process, there is nothing to watch."""
        if used:
            in_process = any(isinstance(one, RowSocketEndpoint) for one in used)
            self._began, self._began_s = {} if in_process else self._read(), time.monotonic()

    def advice(self) -> str:
        """The advice that the time since the beginning gives."""
        took_s = time.monotonic() - self._began_s
        now = self._read() if self._began and took_s >= LEAST_S else {}
        spent = [now[pid] - before for pid, before in self._began.items() if pid in now]
        return http_advice(sum(spent) / took_s / len(spent), len(spent)) if spent else ""

    def _read(self) -> dict[int, float]:
        seconds = {}
        for pid in (pid for folder in self._folders for pid in row_processes(folder)):
            with contextlib.suppress(OSError):  # it has ended
                seconds[pid] = processor_s(pid)
        return seconds

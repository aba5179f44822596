"""Rows go to the engine inside its own process, without HTTP: with `--offline`, or where a batch starts the model.

The server is the deployment that any batch would use, with its agent, restarts and log; only the way of the rows is
another one (`corral.client.row_socket`), so that ledger, retries, pace and results are those of every batch. It works
where the engine runs on the machine of the runner: a deployment here, a model that the batch starts here, or the one
beside a runner in a job of a scheduler.
"""

from __future__ import annotations

from pathlib import Path

from corral.base.errors import UsageError
from corral.client.endpoint import Absence, Endpoint, ModelServer
from corral.client.row_socket import RowSocketEndpoint, has_row_socket
from corral.deploy.deployment.folder import DeploymentFolder


class InProcessServer:
    """A server of a long job that takes rows through its sockets; where it has none and may, over HTTP."""

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
        """Why there is none; a ready server that never had a socket here will not get one by waiting."""
        if self._inner.find() is None or self.find() is not None or self._had_sockets:
            return self._inner.absence()
        error = UsageError(
            f"{self.name} takes no rows in process: its engine does not run on this machine, or an older Corral "
            "started it.",
            "Leave out --offline, and rows go over HTTP; or start the model here: --start MODEL.",
        )
        return Absence(error.message.rstrip("."), error.remedy, error)


def _sockets_of(endpoint: Endpoint) -> str | None:
    """The folder of the sockets of a deployment: the key of what Corral serves lies in its deployment's folder."""
    if endpoint.key_file is None:
        return None
    folder = str(DeploymentFolder(Path(endpoint.key_file).parent).rank(0).path)
    return folder if has_row_socket(folder) else None

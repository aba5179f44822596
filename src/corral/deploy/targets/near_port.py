"""Ports of this machine for tunnels that open later: kept from the moment they are chosen.

A tunnel opens when the server behind it is ready, which may take an hour. Until then the process that brings it up
reserves its port among Corral's own, and the endpoint in the deployment's folder promises it beyond that process.
"""

from __future__ import annotations

import atexit
import contextlib
from urllib.parse import urlsplit

from corral.base.errors import ConflictError, CorralError
from corral.base.untrusted import parse_json
from corral.deploy.deployment.folder import DeploymentFolder, all_folders
from corral.deploy.deployment.state import ENDED
from corral.deploy.targets.remote_files import last_state
from corral.node.sockets import NEAR, free_port, reserve


def near_port(first: int) -> int:
    """A port of this machine for a tunnel that opens when the server is ready; nobody of ours gets it twice."""
    promised = {port for folder in all_folders() if (port := _promised_port(folder))}
    for _ in range(100):
        port = free_port("127.0.0.1", first=0 if first in promised else first)
        held = None if port in promised else reserve(port, NEAR)
        if held:
            atexit.register(held.close)  # this process opens the tunnel, and holds the port until it ends
            return port
        first = 0
    raise ConflictError("this machine has no free port for a tunnel.", "End deployments that are not needed.")


def _promised_port(folder: DeploymentFolder) -> int | None:
    """The port at which a deployment that has not ended is, or will be, reached from here."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, CorralError):
        url = parse_json(folder.endpoint.read_bytes(), str(folder.endpoint))["base_url"]
        return None if last_state(folder.rank(0)) in ENDED else urlsplit(url).port
    return None

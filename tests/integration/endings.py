"""How a deployment ends: seen as failed, and nothing of it is left."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from corral.node.processes import marked
from tests.integration.conftest import Corral
from tests.until import until


def failed(corral: Corral, name: str) -> Any:
    """Its status, once it has failed."""

    def look() -> Any:
        status = corral.json("status", name, check=False)
        return status if status["state"] == "failed" else None

    return until(look, f"the failure of {name}")


def nothing_left(corral: Corral, name: str) -> None:
    """No process of the launch, also of those that wrote a title over their environment, and nobody on its port."""
    folder = corral.home / "deployments" / name
    launch_id = json.loads((folder / "deployment.json").read_text())["launch_id"]
    until(lambda: not marked(launch_id, [str(folder / "rank0" / "engine.json")]), f"the end of {name}'s processes")
    assert _port_is_closed(json.loads((folder / "endpoint.json").read_text())["base_url"])


def _port_is_closed(base_url: str) -> bool:
    address = urlsplit(base_url)
    with socket.socket() as probe:
        return probe.connect_ex((address.hostname or "", address.port or 0)) != 0

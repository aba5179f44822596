"""Which endpoints a batch uses: deployments by name, addresses, or what the environment names.

A deployment is looked up again whenever it is lost, so that a restart on another port with another key is found. The
key in `OPENAI_API_KEY` is put into a private file for as long as the process lives, because endpoints read keys from
files.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from corral.batch.core.fleet import FixedPlace, Place
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.deployment.folder import DeploymentFolder, all_folders, open_folder
from corral.deployment.state import ENDED, State
from corral.errors import CorralError, NotFoundError, UnreachableError, UsageError
from corral.lifecycle import deployments
from corral.plan import Plan
from corral.record import load_json

__all__ = ["DeploymentPlace", "Served", "find_places", "gpus_of", "plan_in", "seats_in", "served_by"]


class DeploymentPlace:
    """A deployment by name, wherever it now is."""

    def __init__(self, name: str) -> None:
        self.name = name
        open_folder(name)  # refuses unknown names, naming the known ones

    @property
    def model(self) -> str:
        """The name it serves, also while it is away."""
        return load_json(deployments.Record, open_folder(self.name).record).served_name

    def find(self) -> Endpoint | None:
        """Its endpoint while it is ready."""
        try:
            now = deployments.status(open_folder(self.name))
        except NotFoundError:
            return None
        return now.endpoint if now.state is State.READY else None

    def seats(self) -> int | None:
        try:
            return seats_in(open_folder(self.name))
        except CorralError:
            return None


ASKED_AGAIN = 3


class Served:
    """What a place serves: model names, and the context length where the server tells it."""

    def __init__(self, models: tuple[str, ...], context: int | None) -> None:
        self.models, self.context = models, context


def find_places(
    names: Sequence[str], urls: Sequence[str], key_file: str | None, model: str | None = None
) -> list[Place]:
    """The places asked for; with nothing asked for, OPENAI_BASE_URL or the only deployment there is.

    An address that does not answer is refused, unless `model` says what it served before: then it is waited for.
    """
    places: list[Place] = [DeploymentPlace(name) for name in names]
    address = os.environ.get("OPENAI_BASE_URL")
    if not names and not urls and address:
        urls, key_file = [address], key_file or _key_from_environment()
    places += [FixedPlace(_endpoint(url, key_file, model)) for url in urls]
    return places or [_only_deployment()]


def served_by(place: Place) -> Served | None:
    """What a place serves now; None when it is away."""
    endpoint = place.find()
    if endpoint is None:
        return None
    client = Client(endpoint, connect_s=5)
    try:
        page = client.page_sync("/v1/models", timeout_s=30)
    except UnreachableError:
        return None
    finally:
        client.close_sync()
    if page.status != 200:
        from corral.client.errors import error_from_status

        raise error_from_status(page.status, page.body, None, endpoint.root)
    cards = page.json()["data"]
    context = next((card.get("max_model_len") for card in cards if card.get("max_model_len")), None)
    return Served(tuple(card["id"] for card in cards), context)


def _endpoint(url: str, key_file: str | None, model: str | None) -> Endpoint:
    """An address with the name of what it serves."""
    bare = Endpoint(url, "", key_file)
    found = served_by(FixedPlace(bare))
    for _ in range(ASKED_AGAIN if found is None and not model else 0):  # it may be between two lives
        time.sleep(0.5)
        found = served_by(FixedPlace(bare))
        if found:
            break
    if found is None and model:
        return Endpoint(url, model, key_file)
    if found is None:
        raise UnreachableError(f"{bare.root} does not answer.", "Is the server running? Check --url.")
    return Endpoint(url, found.models[0], key_file)


def _only_deployment() -> Place:
    alive = []
    for folder in all_folders():
        try:
            now = deployments.status(folder)
        except CorralError:
            continue
        if now.state not in ENDED:
            alive.append((folder.name, now.state))
    ready = [name for name, state in alive if state is State.READY]
    if len(ready) == 1:
        return DeploymentPlace(ready[0])
    if ready:
        raise UsageError(f"there are {len(ready)} deployments: {', '.join(ready)}.", "Choose with --deployment NAME.")
    if len(alive) == 1:
        return DeploymentPlace(alive[0][0])
    raise NotFoundError(
        "no model is being served.",
        "Start one with `corral up`, give --url, or let the batch start one itself: --model MODEL.",
    )


def _key_from_environment() -> str | None:
    key = os.environ.get("OPENAI_API_KEY")
    if not key:
        return None
    descriptor, path = tempfile.mkstemp(prefix="corral-key-")
    os.write(descriptor, key.encode())
    os.close(descriptor)
    atexit.register(Path(path).unlink, missing_ok=True)
    return path


def plan_in(folder: DeploymentFolder) -> Plan | None:
    """The plan a deployment was started with; None where it cannot be read."""
    try:
        return load_json(Plan, folder.plan)
    except (CorralError, OSError):
        return None


def seats_in(folder: DeploymentFolder) -> int | None:
    """How many requests a deployment's engines run at once, by its plan."""
    plan = plan_in(folder)
    return plan.settings.max_num_seqs * plan.parallel.data if plan else None


def gpus_of(name: str) -> int | None:
    """How many GPUs a deployment has, from its plan; None when it has none or they are not known."""
    try:
        plan = plan_in(open_folder(name))
    except CorralError:
        return None
    return plan.parallel.replica_gpus * plan.parallel.data if plan and plan.inventory.gpu else None

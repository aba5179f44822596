"""Which server to use: a deployment's name, an address, the environment, or the only deployment that is ready.

The order is flag, environment, default: a name or `--url` given; else `OPENAI_BASE_URL` (with `OPENAI_API_KEY`);
else the only ready deployment of this home. The served model's name is asked of the server, so nobody types a path.

A key given in memory or by an environment variable is in no field, repr or JSON of the endpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.errors import MalformedReplyError, error_from_status
from corral.deployment.folder import open_folder
from corral.deployment.state import State
from corral.errors import ConflictError, NotFoundError, UsageError
from corral.lifecycle import deployments
from corral.lifecycle.successors import newest_ready
from corral.lifecycle.tunnel import ensure_tunnel
from corral.record import nearest

__all__ = ["HeldKeyEndpoint", "ready_endpoint", "resolve", "served_model"]

URL_VARIABLE, KEY_VARIABLE = "OPENAI_BASE_URL", "OPENAI_API_KEY"


class HeldKeyEndpoint(Endpoint):
    """An endpoint whose key is held in memory instead of in a file."""

    def __init__(self, base_url: str, model: str, key: str | None) -> None:
        super().__init__(base_url, model, None)
        if key is not None and (not key.isascii() or not key.isprintable() or " " in key or not key):
            raise UsageError("The key holds signs that no key has.", "Give the key alone, without quotes or spaces.")
        object.__setattr__(self, "_held", key)

    def key(self) -> str | None:
        held: str | None = self.__dict__["_held"]
        return held


def resolve(
    name: str | None = None,
    *,
    url: str | None = None,
    key_file: str | None = None,
    key: str | None = None,
    model: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Endpoint:
    """The endpoint that was meant, with the model's name that its server knows."""
    environ = os.environ if environ is None else environ
    if name is not None and url is not None:
        raise UsageError("both a deployment and --url were given.", "Give one of them.")
    if key_file is not None and key is not None:
        raise UsageError("both a key and a key file were given.", "Give one of them.")
    if name is None and url is None and (found := environ.get(URL_VARIABLE)):
        url = found
        if key_file is None and key is None:
            key = environ.get(KEY_VARIABLE) or None
    if url is None:
        if key_file is not None or key is not None:
            raise UsageError("a key was given without an address.", "Add --url, or leave both out.")
        endpoint = ready_endpoint(name) if name is not None else _only_ready()
        return Endpoint(endpoint.base_url, model, endpoint.key_file) if model else endpoint
    return _with_model(url, key_file, key, model)


def _with_model(url: str, key_file: str | None, key: str | None, model: str | None) -> Endpoint:
    def at(name: str) -> Endpoint:
        return HeldKeyEndpoint(url, name, key) if key_file is None else Endpoint(url, name, key_file)

    return at(served_model(at(model or ""), model))


def ready_endpoint(name: str) -> Endpoint:
    """The endpoint of a deployment, if it is ready."""
    folder = open_folder(name)
    found = deployments.status(folder)
    if found.state is not State.READY and (follows := newest_ready(folder)) and follows.status:
        found, folder = follows.status, follows.folder
    if found.state is State.READY and found.endpoint is not None:
        ensure_tunnel(folder)
        return found.endpoint
    if found.state in (State.STOPPED, State.FAILED):
        why = f": {found.text}" if found.text else ""
        raise NotFoundError(f"{name!r} is {found.state}{why}.", "Start it again with `corral up`.")
    raise ConflictError(f"{name!r} is not ready: it is {found.state}.", f"`corral wait {name}` waits until it is.")


def _only_ready() -> Endpoint:
    found = deployments.statuses()
    ready = [status for status in found if status.state is State.READY]
    if len(ready) == 1 and ready[0].endpoint is not None:
        return ready[0].endpoint
    if ready:
        names = ", ".join(status.name for status in ready)
        raise UsageError(f"{len(ready)} deployments are ready: {names}.", "Say which one is meant, by its name.")
    on_the_way = [f"{s.name} ({s.state})" for s in found if s.state not in (State.STOPPED, State.FAILED)]
    if on_the_way:
        raise NotFoundError(f"no deployment is ready yet: {', '.join(on_the_way)}.", "`corral wait NAME` waits.")
    raise NotFoundError(
        "no deployment is ready.", f"Start one with `corral up`, or give --url (or set {URL_VARIABLE})."
    )


def served_model(endpoint: Endpoint, wanted: str | None = None) -> str:
    """The name of the model that a server serves; with several, the one wanted or the only one that is no adapter."""
    client = Client(endpoint, stall_s=30)
    try:
        page = client.page_sync("/v1/models", timeout_s=30)
    finally:
        client.close_sync()
    if page.status != 200:
        raise error_from_status(page.status, page.body, None, endpoint.root)
    try:
        cards: list[dict[str, Any]] = page.json()["data"]
        names = [str(card["id"]) for card in cards]
        base = [str(card["id"]) for card in cards if not card.get("parent")]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MalformedReplyError(
            f"{endpoint.root}/v1/models is not a list of models.", "Is it an OpenAI-compatible server?"
        ) from None
    if wanted is not None:
        if wanted in names:
            return wanted
        known = nearest(wanted, names) or names
        raise NotFoundError(f"{endpoint.root} does not serve {wanted!r}.", f"It serves: {', '.join(known)}.")
    if len(base) == 1:
        return base[0]
    if not names:
        raise NotFoundError(f"{endpoint.root} serves no model.", "Is it still starting?")
    raise UsageError(f"{endpoint.root} serves {len(names)} models: {', '.join(names)}.", "Say which: --model NAME.")

"""The Playground: models are asked, and nothing is kept.

What was asked and answered is in the page alone; the page can save it to a file of the user's. The console adds the
server's key to a request and remembers what token ids mean, no more.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from corral.base.errors import CorralError, DataError
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.reply import Token
from corral.console.answering import answer_events, heat_map
from corral.console.asking import PlayRequest, as_curl, as_python, parameter_table, read_play, stream_request
from corral.console.desk import Desk, answer, body_of, events
from corral.console.spelling import Spellings, shown
from corral.deploy.deployment.fleet import living_fleets
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.resolve import URL_VARIABLE, resolve, server_called
from corral.deploy.lifecycle.successors import ChainMember, living_chains

ASKING = ("/api/play/ask", "/api/play/prompt", "/api/play/spell")  # what a server has to compute for
TELLING = ("/api/play/texts",)  # posted, so that a prompt stands in no address; it only makes text


def routes(_: Desk) -> list[BaseRoute]:
    spellings = Spellings()

    async def choices(_: Request) -> Response:
        found = await run_in_threadpool(servers)
        return answer({"servers": found, "parameters": parameter_table()})

    async def ask(request: Request) -> Response:
        asked = read_play(await body_of(request))
        stream_request(asked)  # refused before anything is streamed
        endpoint = await run_in_threadpool(_endpoint, asked)
        return events(_told(endpoint, asked, spellings))

    async def prompt(request: Request) -> Response:
        asked = read_play(await body_of(request))
        async with Client(await run_in_threadpool(_endpoint, asked)) as client:
            return answer(await heat_map(client, asked))

    async def spell(request: Request) -> Response:
        body = await body_of(request)
        asked = read_play({**body, "prompt": body.get("text") or " "})
        async with Client(await run_in_threadpool(_endpoint, asked)) as client:
            exact = await spellings.exact(client, _given_tokens(body), (str(asked.prompt),))
            return answer(shown(exact))

    async def texts(request: Request) -> Response:
        asked = read_play(await body_of(request))
        model = await run_in_threadpool(_model_of, asked)
        return answer({"curl": as_curl(asked, model), "python": as_python(asked)})

    return [
        Route("/api/play/choices", choices, methods=["GET"]),
        *(Route(path, work, methods=["POST"]) for path, work in zip(ASKING, (ask, prompt, spell), strict=True)),
        *(Route(path, texts, methods=["POST"]) for path in TELLING),
    ]


def servers() -> list[dict[str, Any]]:
    """Whom one can ask: the environment's server, fleets, and deployments that have not ended."""
    found: list[dict[str, Any]] = []
    if url := os.environ.get(URL_VARIABLE):
        found.append({"name": "", "label": url, "model": "", "ready": True, "state": "from the environment"})
    fleets = living_fleets()
    members = {member.name for fleet in fleets for member in fleet.members}
    for fleet in fleets:
        ready = server_called(fleet.name).find() is not None
        state = "ready" if ready else "no member is ready"
        found.append({"name": fleet.name, "label": fleet.name, "model": fleet.model, "ready": ready, "state": state})
    found += [_offered(name, chain) for name, chain in living_chains().items() if name not in members]
    return sorted(found, key=lambda one: (not one["ready"], one["name"]))


def _offered(name: str, chain: Sequence[ChainMember]) -> dict[str, Any]:
    serving = [one for one in chain if one.state is State.READY]
    newest = (serving or chain)[-1]
    model = newest.status.model if newest.status else ""
    return {"name": name, "label": name, "model": model, "ready": bool(serving), "state": newest.state}


def _endpoint(asked: PlayRequest) -> Endpoint:
    return resolve(asked.server or None, model=asked.model)


def _model_of(asked: PlayRequest) -> str:
    try:
        return asked.model or _endpoint(asked).model
    except CorralError:
        return "MODEL"  # it is away: the text is still of use


async def _told(endpoint: Endpoint, asked: PlayRequest, spellings: Spellings) -> AsyncIterator[dict[str, Any]]:
    """The answer's events; an error is the last of them, in its own words."""
    try:
        async with Client(endpoint) as client:
            async for event in answer_events(client, asked, spellings):
                yield event
    except CorralError as error:
        yield {"kind": "error", "message": error.message, "remedy": error.remedy, "code": error.exit_code}


def _given_tokens(body: dict[str, Any]) -> list[Token]:
    try:
        return msgspec.convert(body.get("tokens") or [], list[Token])
    except msgspec.ValidationError as error:
        raise DataError(f"these are no tokens: {error}.", "Load the page again.") from None

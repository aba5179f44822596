"""The Playground: models are asked, and nothing is kept.

What was asked and answered is in the page alone; the page can save it to a file of the user's. The console adds the
server's key to a request and remembers what token ids mean, no more.

Tokens for the page: their true texts, learnt from the server by id and remembered while the console runs.

An answer as it comes: the events of a server's stream, made small and safe for the page.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from corral.base.errors import CorralError, DataError
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.reply import Choice, Reply, Token
from corral.console.asking import (
    PlayRequest,
    as_curl,
    as_python,
    parameter_table,
    prompt_request,
    read_play,
    stream_request,
)
from corral.console.context import ConsoleContext, answer, body_of, events
from corral.deploy.deployment.state import State
from corral.serve.fleet.chain import DeploymentReading, living_chains
from corral.serve.fleet.record import living_fleets
from corral.serve.resolve import URL_VARIABLE, resolve, server_called
from corral.use.llm import token_bytes
from corral.use.llm.llm import exact_view
from corral.use.llm.token_view import Character, are_logits, characters, label

MOST_SERVERS, MOST_TOKENS = 8, 300_000  # a vocabulary has some 150,000


class Spellings:
    """What ids mean, by server and model; what is unknown is asked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[int, bytes | None]] = {}

    async def exact(self, client: Client, tokens: Sequence[Token], texts: Iterable[str]) -> tuple[Token, ...]:
        """The tokens with their true bytes and texts; `texts` are where most of them come from."""
        known = self._of(client)
        missing = [number for number in token_bytes.all_ids(tokens) if number not in known]
        if missing:
            learnt = await token_bytes.learn(client, missing, texts)
            if len(known) + len(learnt) > MOST_TOKENS:
                known.clear()
            known |= learnt
        return tuple(token_bytes.exact(token, known) for token in tokens)

    def _of(self, client: Client) -> dict[int, bytes | None]:
        key = (client.endpoint.root, client.endpoint.model)
        while len(self._known) >= MOST_SERVERS and key not in self._known:
            del self._known[next(iter(self._known))]
        return self._known.setdefault(key, {})


def shown(tokens: Sequence[Token]) -> dict[str, Any]:
    """Tokens as stretches of whole characters, each with the tokens that make it and their alternatives."""
    return {"spans": [_span(one) for one in characters(tokens)], "logits": are_logits(tokens)}


def _span(one: Character) -> dict[str, Any]:
    return {"text": one.text, "logprob": one.logprob, "tokens": [_token(token, top=True) for token in one.tokens]}


def _token(token: Token, top: bool = False) -> dict[str, Any]:
    found = {"label": label(token), "text": token.text, "id": token.id, "logprob": token.logprob, "rank": token.rank}
    return {**found, "top": [_token(one) for one in token.top]} if top else found


_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


async def answer_events(client: Client, asked: PlayRequest, spellings: Spellings) -> AsyncIterator[dict[str, Any]]:
    """`prompt` (its ids), `piece` for each event, `end`, and `spans` (exact tokens); leaving it ends the request."""
    path, body = stream_request(asked)
    inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
    task = asyncio.ensure_future(client.request(path, body, on_event=lambda data, _: inbox.put_nowait(data)))
    task.add_done_callback(lambda _: inbox.put_nowait(None))
    try:
        while (data := await inbox.get()) is not None:
            for piece in pieces_of(data, asked.alternatives):
                yield piece
        reply = await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    yield _end(reply)
    for choice in reply.choices:
        if choice.tokens:
            exact = await spellings.exact(client, choice.tokens, (choice.text,))
            yield {"kind": "spans", "index": choice.index, **shown(exact)}


def pieces_of(data: bytes, alternatives: int | None) -> Iterator[dict[str, Any]]:
    """What one event of the stream says; one that is no event says nothing (the reply tells of it)."""
    try:
        event = msgspec.json.decode(data)
    except _NOT_JSON:
        return
    choices = event.get("choices") if isinstance(event, dict) else None
    for choice in [one for one in choices or () if isinstance(one, dict)]:
        if ids := event.get("prompt_token_ids") or choice.get("prompt_token_ids"):
            yield {"kind": "prompt", "ids": ids}
        delta = choice.get("delta") or {}
        text, thought = delta.get("content") or choice.get("text") or "", delta.get("reasoning") or ""
        tokens = _tokens(choice, alternatives)
        if text or thought or tokens or choice.get("finish_reason"):
            index = choice.get("index") or 0
            yield {"kind": "piece", "index": index, "text": text, "reasoning": thought, "tokens": tokens}


def _tokens(choice: Mapping[str, Any], alternatives: int | None) -> tuple[Token, ...]:
    try:
        whole = Choice(0, "", "", token_ids=choice.get("token_ids"), logprobs=choice.get("logprobs"),
                       asked_top=alternatives)  # fmt: skip
        return whole.tokens
    except (KeyError, TypeError, ValueError):
        return ()


def _end(reply: Reply) -> dict[str, Any]:
    times, usage = reply.timing, reply.usage
    decoded_s = (times.chunk_ns[-1] - times.chunk_ns[0]) / 1e9 if len(times.chunk_ns) > 1 else 0.0
    tokens = usage.completion_tokens if usage else None
    return {
        "kind": "end",
        "finish": [choice.finish_reason for choice in reply.choices],
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "completion_tokens": tokens,
        "cached_tokens": usage.cached_tokens if usage else None,
        "ttft_s": times.ttft_s,
        "total_s": times.total_s,
        "tokens_per_s": (tokens - 1) / decoded_s if tokens and tokens > 1 and decoded_s else None,
    }


async def heat_map(client: Client, asked: PlayRequest) -> dict[str, Any]:
    """The prompt's own tokens with their probabilities, and what the model makes of it as a whole."""
    path, body = prompt_request(asked)
    reply = await client.request(path, body)
    text = asked.prompt if isinstance(asked.prompt, str) else ""
    view = await exact_view(client, reply, text)
    known = [token.logprob for token in view.prompt_tokens if token.logprob is not None]
    total = math.fsum(known)
    return {
        **shown(view.prompt_tokens),
        "tokens": len(view.prompt_tokens),
        "logprob": total,
        "perplexity": math.exp(-total / len(known)) if known and total <= 0 else None,
    }


ASKING = ("/api/play/ask", "/api/play/prompt", "/api/play/spell")  # what a server has to compute for
TELLING = ("/api/play/texts",)  # posted, so that a prompt stands in no address; it only makes text


def routes(_: ConsoleContext) -> list[BaseRoute]:
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


def _offered(name: str, chain: Sequence[DeploymentReading]) -> dict[str, Any]:
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

"""The Playground: a prompt and its settings from the page, the request made of them, and the answer as it comes.

The request is made where `corral.LLM` makes its own, so that ranges are checked alike; the curl and Python shown are
exactly what the page sends. Keys are in neither: the shell gets them from `corral env`, Python from the deployment.
Nothing is kept: prompts and answers are in the page alone, which can save them to a file of the user's. The console
adds the server's key to a request, and remembers the texts of token ids.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pprint
import re
import shlex
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from corral.base.errors import CorralError, DataError, UsageError
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.reply import Choice, Reply, Token
from corral.client.sampling import PARAMETERS, STRUCTURED
from corral.console.context import ConsoleContext, answer, body_of, events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.deployments import plan_of
from corral.serve.fleet.chain import DeploymentReading, living_chains
from corral.serve.fleet.record import read_fleets
from corral.serve.resolve import URL_VARIABLE, resolve, server_called
from corral.use.llm import token_bytes
from corral.use.llm.llm import Prompt, exact_view, is_chat, request_for
from corral.use.llm.token_view import Character, are_logits, characters, label

LARGEST_PROMPT_BYTES = 16 << 20  # with its pictures
_PICTURE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}")
MOST_ALTERNATIVES = 20  # what vLLM gives unless it was started with more
_PAGES_OWN = ("logprobs", "prompt_logprobs")  # the page asks for them by its own switch
_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # tokens by id: their bytes are asked apart


@dataclass(frozen=True)
class PlayRequest:
    """One question; `server` is a deployment or a fleet, or empty for the address of the environment."""

    server: str
    prompt: Prompt
    sampling: dict[str, Any] = field(default_factory=dict)
    alternatives: int | None = 5  # to each token; None: no probabilities at all
    model: str | None = None  # where a server has several


def parameter_table() -> list[dict[str, Any]]:
    """Every parameter that can be set, for a form."""
    rows = [
        {"name": one.name, "kind": one.kind, "help": one.help, "low": one.low, "high": one.high,
         "range": one.range_text, "structured": False}
        for one in PARAMETERS.values() if one.name not in _PAGES_OWN
    ]  # fmt: skip
    forms = {"json_schema": "json", "choice": "texts"}
    rows += [
        {"name": name, "kind": forms.get(name, "text"), "help": help, "low": None, "high": None, "range": "",
         "structured": True}
        for name, (_, help) in STRUCTURED.items()
    ]  # fmt: skip
    return rows


def read_play(body: Mapping[str, Any]) -> PlayRequest:
    """A question as the page sends it, checked."""
    server, model, sampling = body.get("server", ""), body.get("model"), body.get("sampling", {})
    alternatives, prompt = body.get("alternatives"), body.get("prompt")
    if not isinstance(server, str) or not (model is None or isinstance(model, str)) or not isinstance(sampling, dict):
        raise UsageError("the question is not as the page asks it.", "Load the page again.")
    if alternatives is not None and (not isinstance(alternatives, int) or not 0 <= alternatives <= MOST_ALTERNATIVES):
        raise UsageError(f"alternatives cannot be {alternatives!r}.", f"Give 0 to {MOST_ALTERNATIVES}, or none.")
    if not prompt or not isinstance(prompt, str | list):
        raise UsageError("the prompt is empty.", "Write a prompt.")
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        prompt = [_message(one) for one in prompt]
    kept = {name: value for name, value in sampling.items() if name not in _PAGES_OWN and value is not None}
    return PlayRequest(server, prompt, kept, alternatives, model or None)


def _message(message: Any) -> dict[str, Any]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if isinstance(content, list) and role == "user":
        content = [_part(one) for one in content]
    elif not isinstance(role, str) or not isinstance(content, str):
        raise UsageError("a message has no role or no text.", "Each needs both.")
    return {"role": role, "content": content}


def _part(part: Any) -> dict[str, Any]:
    """Text, or a picture with its bytes: the server would fetch another address, or read a file of its own."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    image = part.get("image_url") if kind == "image_url" else None
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str) or not _PICTURE.fullmatch(url):
        raise UsageError("a part of a message is neither text nor a picture with its bytes.",
                         "Send a PNG, JPEG, WebP or GIF as a data: URL in base64.")  # fmt: skip
    return {"type": "image_url", "image_url": {"url": url}}


def _without_pictures(prompt: Prompt) -> tuple[Prompt, str]:
    """The prompt with a name for each picture's bytes, and a comment that says so."""
    count = 0

    def shown(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal count
        if part["type"] == "text":
            return part
        count += 1
        head, _, data = part["image_url"]["url"].partition(",")
        return {**part, "image_url": {"url": f"{head},<picture {count}: {len(data):,} characters>"}}

    if not is_chat(prompt):
        return prompt, ""
    messages = [{**one, "content": [shown(part) for part in one["content"]]} if isinstance(one["content"], list)
                else one for one in cast("Sequence[dict[str, Any]]", prompt)]  # fmt: skip
    note = "# <picture N: …> stands for the picture that was sent: write the output of `base64 -w0 FILE` there\n"
    return messages, note if count else ""


def stream_request(question: PlayRequest) -> tuple[str, dict[str, Any]]:
    """The path and the body of a streamed answer."""
    path, body = request_for(question.prompt, {**question.sampling, "logprobs": question.alternatives})
    extra = _IDS if question.alternatives is not None else {}
    return path, {**body, "stream": True, "stream_options": {"include_usage": True}, **extra}


def prompt_request(question: PlayRequest) -> tuple[str, dict[str, Any]]:
    """The path and the body that give the probabilities of the prompt's own tokens; the answer is one token."""
    path, body = request_for(question.prompt, {"prompt_logprobs": question.alternatives or 0, "max_tokens": 1})
    return path, {**body, **_IDS}


def as_curl(question: PlayRequest, model: str) -> str:
    """The request for a shell."""
    prompt, note = _without_pictures(question.prompt)
    path, body = stream_request(replace(question, prompt=prompt))
    begin = note + (f'eval "$(corral env {shlex.quote(question.server)})"\n' if question.server else "")
    sent = json.dumps({"model": model, **body}, ensure_ascii=False, indent=2)
    return (
        f'{begin}curl -sSN "$OPENAI_BASE_URL{path.removeprefix("/v1")}" \\\n'
        '  -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(sent)}\n"
    )


def as_python(question: PlayRequest) -> str:
    """The same with Corral's own client."""
    settings = {**question.sampling, **({} if question.alternatives is None else {"logprobs": question.alternatives})}
    known = {name: value for name, value in settings.items() if name in PARAMETERS or name in STRUCTURED}
    more = settings.get("extra")
    lines = [
        f"    {name}={_literal(value)}," for name, value in {**known, **({"extra": more} if more else {})}.items()
    ]
    name = "messages" if is_chat(question.prompt) else "prompt"
    where = [_literal(question.server)] if question.server else []
    where += [f"model={_literal(question.model)}"] if question.model else []
    call = f"llm.stream({name})" if not lines else "\n".join(["llm.stream(", f"    {name},", *lines, ")"])
    prompt, note = _without_pictures(question.prompt)
    return (
        f"import corral\n\n{note}{name} = {_literal(prompt)}\n"
        f"with corral.connect({', '.join(where)}) as llm:\n"
        + _indented(f'for piece in {call}:\n    print(piece.text, end="", flush=True)\n')
    )


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _literal(value: Any) -> str:
    return pprint.pformat(value, width=90, sort_dicts=False)


MOST_SERVERS, MOST_TOKENS = 8, 300_000  # a vocabulary has some 150,000


class TokenTexts:
    """Texts of token ids by server and model; an unknown one is asked for once."""

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


def token_spans(tokens: Sequence[Token]) -> dict[str, Any]:
    """Tokens as stretches of whole characters, each with the tokens that make it and their alternatives."""
    return {"spans": [_span(one) for one in characters(tokens)], "logits": are_logits(tokens)}


def _span(one: Character) -> dict[str, Any]:
    return {"text": one.text, "logprob": one.logprob, "tokens": [_token(token, top=True) for token in one.tokens]}


def _token(token: Token, top: bool = False) -> dict[str, Any]:
    found = {"label": label(token), "text": token.text, "id": token.id, "logprob": token.logprob, "rank": token.rank}
    return {**found, "top": [_token(one) for one in token.top]} if top else found


_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


async def answer_events(
    client: Client, question: PlayRequest, texts_by_id: TokenTexts
) -> AsyncIterator[dict[str, Any]]:
    """`prompt` (its ids), `piece` for each event, `end`, and `spans` (exact tokens); leaving it ends the request."""
    path, body = stream_request(question)
    inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
    task = asyncio.ensure_future(client.request(path, body, on_event=lambda data, _: inbox.put_nowait(data)))
    task.add_done_callback(lambda _: inbox.put_nowait(None))
    try:
        while (data := await inbox.get()) is not None:
            for piece in pieces_of(data, question.alternatives):
                yield piece
        reply = await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    yield _end(reply)
    for choice in reply.choices:
        if choice.tokens:
            exact = await texts_by_id.exact(client, choice.tokens, (choice.text,))
            yield {"kind": "spans", "index": choice.index, **token_spans(exact)}


def pieces_of(data: bytes, alternatives: int | None) -> Iterator[dict[str, Any]]:
    """The parts of one event of the stream; a broken event has none (the reply reports it)."""
    try:
        event = msgspec.json.decode(data)
    except _NOT_JSON:
        return
    choices = event.get("choices") if isinstance(event, dict) else None
    for choice in [one for one in choices or () if isinstance(one, dict)]:
        if ids := event.get("prompt_token_ids") or choice.get("prompt_token_ids"):
            yield {"kind": "prompt", "ids": ids}
        delta = choice.get("delta") or {}
        text, reasoning = delta.get("content") or choice.get("text") or "", delta.get("reasoning") or ""
        tokens = _tokens(choice, alternatives)
        if text or reasoning or tokens or choice.get("finish_reason"):
            index = choice.get("index") or 0
            yield {"kind": "piece", "index": index, "text": text, "reasoning": reasoning, "tokens": tokens}


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


async def heat_map(client: Client, question: PlayRequest) -> dict[str, Any]:
    """The prompt's own tokens with their probabilities, and its perplexity."""
    path, body = prompt_request(question)
    reply = await client.request(path, body)
    text = question.prompt if isinstance(question.prompt, str) else ""
    view = await exact_view(client, reply, text)
    known = [token.logprob for token in view.prompt_tokens if token.logprob is not None]
    total = math.fsum(known)
    return {
        **token_spans(view.prompt_tokens),
        "tokens": len(view.prompt_tokens),
        "logprob": total,
        "perplexity": math.exp(-total / len(known)) if known and total <= 0 else None,
    }


ASKING = ("/api/play/ask", "/api/play/prompt", "/api/play/spell")  # what a server has to compute for
TELLING = ("/api/play/texts",)  # posted, so that a prompt stands in no address; it only makes text


def routes(_: ConsoleContext) -> list[BaseRoute]:
    texts_by_id = TokenTexts()

    async def choices(_: Request) -> Response:
        found = await run_in_threadpool(servers)
        return answer({"servers": found, "parameters": parameter_table()})

    async def ask(request: Request) -> Response:
        question = read_play(await body_of(request, LARGEST_PROMPT_BYTES))
        stream_request(question)  # refused before anything is streamed
        endpoint = await run_in_threadpool(_endpoint, question)
        return events(_events_of(endpoint, question, texts_by_id))

    async def prompt(request: Request) -> Response:
        question = read_play(await body_of(request, LARGEST_PROMPT_BYTES))
        async with Client(await run_in_threadpool(_endpoint, question)) as client:
            return answer(await heat_map(client, question))

    async def spell(request: Request) -> Response:
        body = await body_of(request)
        question = read_play({**body, "prompt": body.get("text") or " "})
        async with Client(await run_in_threadpool(_endpoint, question)) as client:
            exact = await texts_by_id.exact(client, _given_tokens(body), (str(question.prompt),))
            return answer(token_spans(exact))

    async def texts(request: Request) -> Response:
        question = read_play(await body_of(request, LARGEST_PROMPT_BYTES))
        model = await run_in_threadpool(_model_of, question)
        return answer({"curl": as_curl(question, model), "python": as_python(question)})

    return [
        Route("/api/play/choices", choices, methods=["GET"]),
        *(Route(path, work, methods=["POST"]) for path, work in zip(ASKING, (ask, prompt, spell), strict=True)),
        *(Route(path, texts, methods=["POST"]) for path in TELLING),
    ]


def servers() -> list[dict[str, Any]]:
    """The servers to choose from: the environment's, fleets, and deployments that have not ended."""
    found: list[dict[str, Any]] = []
    if url := os.environ.get(URL_VARIABLE):
        found.append({"name": "", "label": url, "model": "", "ready": True, "state": "from the environment",
                      "images": False})  # fmt: skip
    fleets, unreadable = read_fleets()
    members = {member.name for fleet in fleets for member in fleet.members}
    for fleet in fleets:
        ready = server_called(fleet.name).find() is not None
        state = "ready" if ready else "no member is ready"
        images = any(_takes_images(DeploymentFolder.of(member.name)) for member in fleet.members[:1])
        found.append({"name": fleet.name, "label": fleet.name, "model": fleet.model, "ready": ready, "state": state,
                      "images": images})  # fmt: skip
    for name in unreadable:
        found.append({"name": name, "label": name, "model": "", "ready": False, "state": State.UNKNOWN,
                      "images": False})  # fmt: skip
    found += [_offered(name, chain) for name, chain in living_chains().items() if name not in members]
    return sorted(found, key=lambda one: (not one["ready"], one["name"]))


def _offered(name: str, chain: Sequence[DeploymentReading]) -> dict[str, Any]:
    serving = [one for one in chain if one.state is State.READY]
    newest = (serving or chain)[-1]
    model = newest.status.model if newest.status else ""
    return {"name": name, "label": name, "model": model, "ready": bool(serving), "state": newest.state,
            "images": _takes_images(newest.folder)}  # fmt: skip


def _takes_images(folder: DeploymentFolder) -> bool:
    """Whether the plan's record of the model says that it reads pictures."""
    plan = plan_of(folder)
    return plan is not None and plan.model.images


def _endpoint(question: PlayRequest) -> Endpoint:
    return resolve(question.server or None, model=question.model)


def _model_of(question: PlayRequest) -> str:
    try:
        return question.model or _endpoint(question).model
    except CorralError:
        return "MODEL"  # the server is away: the text is still of use


async def _events_of(
    endpoint: Endpoint, question: PlayRequest, texts_by_id: TokenTexts
) -> AsyncIterator[dict[str, Any]]:
    """The answer's events; an error is the last of them."""
    try:
        async with Client(endpoint) as client:
            async for event in answer_events(client, question, texts_by_id):
                yield event
    except CorralError as error:
        yield {"kind": "error", "message": error.message, "remedy": error.remedy, "code": error.exit_code}


def _given_tokens(body: dict[str, Any]) -> list[Token]:
    try:
        return msgspec.convert(body.get("tokens") or [], list[Token])
    except msgspec.ValidationError as error:
        raise DataError(f"these are not tokens: {error}.", "Load the page again.") from None

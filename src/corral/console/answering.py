"""An answer as it comes: the events of a server's stream, made small and safe for the page."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from corral.client.client import Client
from corral.client.reply import Choice, Reply, Token
from corral.console.asking import PlayRequest, prompt_request, stream_request
from corral.console.spelling import Spellings, shown
from corral.use.llm.llm import exact_view

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

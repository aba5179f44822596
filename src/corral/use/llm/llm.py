"""A served model in Python: complete, chat, stream, map, score. One implementation, with an async and a sync class.

`AsyncLLM` does the work; `LLM` runs it on one background loop, so it can be used in scripts, notebooks and threads
alike. Both are made by `corral.up` and `corral.connect` (`corral.use.llm.session`). Every failure is a `CorralError`
with its remedy; unknown parameters and values out of range are refused before anything is sent.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, cast

from corral.base.errors import EngineError, UsageError
from corral.client import metrics as engine_metrics
from corral.client import pooling
from corral.client.client import CHAT, COMPLETIONS, Client, wait
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError, error_from_status
from corral.client.fanout import CONCURRENCY, RETRIES, fan_out
from corral.client.pooling import RankedDocument
from corral.client.reply import Piece, Reply, Token
from corral.client.sampling import Sampling, request_fields, with_length
from corral.use.llm import token_bytes
from corral.use.llm.token_view import TokenView
from corral.use.score.likelihood import ScoreOptions
from corral.use.score.score import Scores, score_rows

if TYPE_CHECKING:
    import openai

_EMBEDDED_AT_ONCE = 256  # texts of one request
P = ParamSpec("P")
T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a list of messages."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def request_for(prompt: Prompt, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and body for a prompt: text or token ids are completed, messages are answered."""
    known = isinstance(prompt, Sequence)
    if known and is_chat(prompt):
        return CHAT, {"messages": list(cast("Messages", prompt)), **request_fields(params, chat=True)}
    if not known or not (isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)):
        raise UsageError(f"a prompt cannot be {prompt!r}.", "Give text, a list of token ids, or a list of messages.")
    fields = with_length(request_fields(params))
    if "logprobs" in fields:
        fields.setdefault("return_token_ids", True)  # so that tokens carry their ids
    return COMPLETIONS, {"prompt": prompt if isinstance(prompt, str) else list(prompt), **fields}


class AsyncStream:
    """Pieces of an answer as they come; `reply` is the whole once it has ended."""

    def __init__(self, source: AsyncIterator[Piece | Reply]) -> None:
        self._source = source
        self.reply: Reply | None = None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for item in self._source:
            if isinstance(item, Reply):
                self.reply = item
            else:
                yield item


class Stream:
    """Pieces of an answer as they come; `reply` is the whole once it has ended."""

    def __init__(self, source: Iterator[Piece | Reply]) -> None:
        self._source = source
        self.reply: Reply | None = None

    def __iter__(self) -> Iterator[Piece]:
        for item in self._source:
            if isinstance(item, Reply):
                self.reply = item
            else:
                yield item

    def close(self) -> None:
        """Stop the answer: the server notices and stops computing."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()


class AsyncLLM:
    """A served model, for programs with an event loop."""

    def __init__(self, endpoint: Endpoint, *, stall_s: float = 600.0, timeout_s: float | None = None) -> None:
        self.endpoint = endpoint
        self._client = Client(endpoint, stall_s=stall_s, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint.model!r} at {self.endpoint.base_url})"

    @property
    def client(self) -> Client:
        """The client underneath, for requests that this class has no method for."""
        return self._client

    async def complete(self, prompt: str | Sequence[int], **sampling: Unpack[Sampling]) -> Reply:
        """The continuation of a text (or of token ids)."""
        return await self._client.request(*request_for(prompt, sampling))

    async def chat(self, messages: str | Messages, **sampling: Unpack[Sampling]) -> Reply:
        """The answer to messages; a text is one message of the user."""
        return await self._client.request(*request_for(as_messages(messages), sampling))

    def stream(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> AsyncStream:
        """The answer in pieces as they come: to messages a chat answer, to text its continuation."""
        path, body = request_for(prompt, sampling)
        return AsyncStream(self._client.stream(path, {**body, "stream_options": {"include_usage": True}}))

    async def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        retries: int = RETRIES,
        on_done: Callable[[int], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[str]:
        """The texts for many prompts, in their order; the first error that retries do not cure ends it."""
        requests = (request_for(prompt, sampling) for prompt in _several(prompts))
        texts = await fan_out(
            self._client, requests, _text, concurrency=concurrency, retries=retries, on_done=on_done
        )
        return cast("list[str]", texts)

    async def replies(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        retries: int = RETRIES,
        on_done: Callable[[int], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Reply | RequestError]:
        """Like `map`, with whole replies, and an error in the place of each answer that failed."""
        requests = (request_for(prompt, sampling) for prompt in _several(prompts))
        return await fan_out(
            self._client, requests, _same, concurrency=concurrency, retries=retries, stop_at_error=False,
            on_done=on_done,
        )  # fmt: skip

    async def score(
        self, /, rows: Iterable[Mapping[str, Any]], options: ScoreOptions | None = None, **settings: Any
    ) -> Scores:
        """Likelihoods of rows: {"text"}, {"context", "continuation"} or {"context", "choices"}."""
        chosen = options or ScoreOptions(**settings)
        return await score_rows(self._client, rows, chosen)

    async def embed(self, texts: str | Sequence[str], *, dimensions: int | None = None) -> list[list[float]]:
        """The vectors of texts, in their order."""
        wanted = [texts] if isinstance(texts, str) else list(texts)
        parts = [wanted[at : at + _EMBEDDED_AT_ONCE] for at in range(0, len(wanted), _EMBEDDED_AT_ONCE)]
        pages = await asyncio.gather(
            *(self._client.post(pooling.EMBEDDINGS, pooling.embed_body(part, dimensions)) for part in parts)
        )
        return [row for part, page in zip(parts, pages, strict=True) for row in pooling.vectors(page, len(part))]

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[RankedDocument]:
        """The documents by how well they answer the query, the best first."""
        body = {"query": query, "documents": list(documents), **({"top_n": top_n} if top_n else {})}
        return pooling.ranking(await self._client.post(pooling.RERANK, body), documents)

    async def explain(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> TokenView:
        """Complete, and show each token's probability and alternatives: right for pieces of characters, too."""
        views, _ = await self.explained(prompt, **sampling)
        return views[0]

    async def explained(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> tuple[list[TokenView], Reply]:
        """The views of `explain`, one for each answer (`n`), together with the reply they were made from."""
        if sampling.get("logprobs") is None and sampling.get("prompt_logprobs") is None:
            sampling = {**sampling, "logprobs": 5, "prompt_logprobs": 5}
        path, body = request_for(prompt, sampling)
        extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        reply = await self._client.request(path, {**body, **extra})
        text = prompt if isinstance(prompt, str) else ""
        return [await exact_view(self._client, reply, text, number) for number in range(len(reply.choices))], reply

    async def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The token ids of a text, as the server's tokenizer makes them."""
        body = {"model": self.endpoint.model, "prompt": text, "add_special_tokens": special_tokens}
        page = await self._client.page("/tokenize", body, timeout_s=60)
        if page.status != 200:
            raise error_from_status(page.status, page.body, None, self.endpoint.root)
        return cast("list[int]", page.json()["tokens"])

    async def metrics(self) -> engine_metrics.Reading:
        """What the server says about its load and its cache now."""
        return await engine_metrics.read(self._client)

    def openai(self) -> openai.AsyncOpenAI:
        """The official SDK's asynchronous client, configured for this server."""
        sdk = _sdk()
        client: openai.AsyncOpenAI = sdk.AsyncOpenAI(**_sdk_settings(self.endpoint))
        return client

    async def close(self) -> None:
        """Close the connections of the running loop."""
        await self._client.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _waiting(method: Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[LLM, P], T]:
    """The method of `LLM` that waits for the method of `AsyncLLM`, with its signature and its docstring."""

    @functools.wraps(method)
    def wait_for_it(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return wait(method(self.aio, *args, **kwargs))

    wait_for_it.__qualname__ = f"LLM.{method.__name__}"
    return wait_for_it


class LLM:
    """A served model. Made by `corral.up` (then leaving its `with` stops the server) or `corral.connect`."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        stall_s: float = 600.0,
        timeout_s: float | None = None,
        on_exit: Callable[[], None] | None = None,
        on_down: Callable[[], None] | None = None,
    ) -> None:
        self.aio = AsyncLLM(endpoint, stall_s=stall_s, timeout_s=timeout_s)
        self._on_exit, self._on_down = on_exit, on_down

    def __repr__(self) -> str:
        return f"LLM({self.endpoint.model!r} at {self.endpoint.base_url})"

    @property
    def endpoint(self) -> Endpoint:
        return self.aio.endpoint

    complete = _waiting(AsyncLLM.complete)
    chat = _waiting(AsyncLLM.chat)
    map = _waiting(AsyncLLM.map)
    replies = _waiting(AsyncLLM.replies)
    score = _waiting(AsyncLLM.score)
    explain = _waiting(AsyncLLM.explain)
    embed = _waiting(AsyncLLM.embed)
    rerank = _waiting(AsyncLLM.rerank)
    tokenize = _waiting(AsyncLLM.tokenize)
    metrics = _waiting(AsyncLLM.metrics)

    def stream(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Stream:
        """The answer in pieces as they come: to messages a chat answer, to text its continuation."""
        path, body = request_for(prompt, sampling)
        return Stream(self.aio.client.stream_sync(path, {**body, "stream_options": {"include_usage": True}}))

    def openai(self) -> openai.OpenAI:
        """The official SDK's client, configured for this server."""
        sdk = _sdk()
        client: openai.OpenAI = sdk.OpenAI(**_sdk_settings(self.endpoint))
        return client

    def close(self) -> None:
        """Close the connections; a server started by `corral.up` is stopped."""
        self.aio.client.close_sync()
        on_exit, self._on_exit = self._on_exit, None
        if on_exit is not None:
            on_exit()

    def down(self) -> None:
        """Close the connections and stop the server, also one that `reuse=True` or `corral.connect` found running."""
        self._on_exit, on_down = None, self._on_down
        self.close()
        if on_down is not None:
            on_down()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def as_messages(messages: str | Messages) -> Messages:
    """Messages, if need be made of one text."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


async def exact_view(client: Client, reply: Reply, prompt: str, index: int = 0) -> TokenView:
    """An answer's tokens with their true bytes; the request must have asked for ids in the place of texts."""
    choice = reply.choices[index]
    body = reply.json()
    prompt_ids = body["choices"][index].get("prompt_token_ids") or body.get("prompt_token_ids") or ()
    before = list(choice.prompt_tokens)
    if before and prompt_ids and before[0].id is None:  # the first token has no probability, but it has an id
        before[0] = Token("", None, None, int(prompt_ids[0]))
    after = choice.tokens
    known = await token_bytes.learn(client, token_bytes.all_ids((*before, *after)), (prompt, choice.text))
    return TokenView(
        tuple(token_bytes.exact(token, known) for token in before),
        tuple(token_bytes.exact(token, known) for token in after),
    )


def _several(prompts: Iterable[Prompt]) -> Iterable[Prompt]:
    """Refuse one string where several prompts are expected: Python would read it as a list of letters."""
    if isinstance(prompts, str):
        raise UsageError("several prompts were expected, and one string was given.", "Put it in a list: [text].")
    return prompts


def _text(reply: Reply) -> str:
    return reply.text


def _same(reply: Reply) -> Reply:
    return reply


def _sdk_settings(endpoint: Endpoint) -> dict[str, str]:
    return {"base_url": endpoint.root + "/v1", "api_key": endpoint.key() or "none"}


def _sdk() -> Any:
    try:
        import openai
    except ImportError:
        raise EngineError("the openai SDK is not installed.", "pip install openai") from None
    return openai

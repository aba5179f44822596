"""Completion and chat requests of the fake server, checked with vLLM's own messages."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from corral.client.errors import error_body
from corral.fake import words

_MAX_LOGPROBS = 20
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 2.0, "in [0, 2]"),
    "top_p": (1e-9, 1.0, "in (0, 1]"),
    "min_p": (0.0, 1.0, "in [0, 1]"),
    "frequency_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "presence_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "repetition_penalty": (1e-9, 1e9, "greater than zero"),
    "n": (1, 16384, "at least 1"),
}


class FakeRefusedError(Exception):
    """A request is answered with an HTTP error, in vLLM's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
        retry_after: float = 0,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.retry_after = status, message, kind, param, retry_after

    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.kind, self.status, self.param)


@dataclass(slots=True)
class Query:
    """One completion or chat request."""

    chat: bool
    prompts: list[bytes]
    prompt_tokens: list[int]
    keys: list[int]  # one hash of content and sampling parameters for each prompt
    max_tokens: int | None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    echo: bool = False
    greedy: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # `token_id:N` in the place of each token's text
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    given_ids: list[list[int]] | None = None  # when prompts came as token ids
    call: tuple[str, str] | None = None  # the tool to call, and its arguments as JSON
    form: Any = None  # the JSON schema of the answer
    thoughts: int = 0  # tokens of a chat answer that come first, as `reasoning`

    def ids(self, index: int) -> list[int]:
        """The token ids of prompt `index`."""
        return self.given_ids[index] if self.given_ids else words.encode(self.prompts[index])

    @property
    def plain(self) -> bool:
        """Whether the answer is only text, which is written from prepared bytes."""
        return (
            self.logprobs is None
            and self.prompt_logprobs is None
            and not (self.echo or self.continuous_usage or self.return_token_ids or self.call or self.thoughts)
        )

    def limit(self, index: int, max_model_len: int) -> int:
        """The largest number of tokens in the answer to prompt `index`."""
        room = max_model_len - self.prompt_tokens[index]
        return room if self.max_tokens is None else min(room, self.max_tokens)


def read_query(body: dict[str, Any], chat: bool, max_model_len: int) -> Query:
    """Check a request body."""
    for name in _RANGES.keys() & body.keys():
        _check_range(name, body[name])
    prompts, counts = _chat_prompt(body) if chat else _prompts(body.get("prompt"))
    for count in counts:
        if count > max_model_len:
            raise FakeRefusedError(
                400,
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
                f"{count} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt.",
                param="input_tokens",
            )
    sampled = [body.get(name) for name in _SAMPLING]
    greedy = sampled[0] == 0
    salt = b"" if greedy else repr(sampled).encode()
    keys = [int.from_bytes(blake2b(text + b"\0" + salt, digest_size=8).digest(), "big") for text in prompts]
    query = Query(chat, prompts, counts, keys, _max_tokens(body, chat), greedy=greedy)
    if query.max_tokens is not None and query.max_tokens > max_model_len:
        raise FakeRefusedError(
            400,
            f"max_tokens={query.max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            param="max_tokens",
        )
    prompt = body.get("prompt")
    if not chat and isinstance(prompt, list) and not isinstance(prompt[0], str):
        query.given_ids = prompt if isinstance(prompt[0], list) else [prompt]
    query.echo = bool(body.get("echo"))
    if (
        not (query.echo and query.max_tokens == 0)
        and min(query.limit(i, max_model_len) for i in range(len(prompts))) < 1
    ):
        value = min(query.limit(i, max_model_len) for i in range(len(prompts)))
        raise FakeRefusedError(400, f"max_tokens must be at least 1, got {value}.", param="max_tokens")
    _read_options(query, body)
    return query


def _read_options(query: Query, body: dict[str, Any]) -> None:
    query.n = body.get("n") or 1
    query.stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options:
        if not query.stream:
            message = "Stream options can only be defined when `stream=True`."
            raise FakeRefusedError(400, message, param="stream_options")
        query.include_usage = bool(options.get("include_usage"))
        query.continuous_usage = query.include_usage and bool(options.get("continuous_usage_stats"))
    query.form = _form(body)
    query.min_tokens = body.get("min_tokens") or 0
    if query.max_tokens is not None and query.min_tokens > query.max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={query.max_tokens}, got {query.min_tokens}."
        raise FakeRefusedError(400, message)
    query.ignore_eos = bool(body.get("ignore_eos"))
    query.return_token_ids = bool(body.get("return_token_ids"))
    query.tokens_as_ids = bool(body.get("return_tokens_as_token_ids"))
    stop = body.get("stop") or ()
    query.stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if query.chat:
        query.logprobs = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    else:
        query.logprobs = body.get("logprobs")
    query.prompt_logprobs = body.get("prompt_logprobs")
    for name, kind, value in (
        ("logprobs", "sample", query.logprobs),
        ("prompt_logprobs", "prompt", query.prompt_logprobs),
    ):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise FakeRefusedError(400, f"`{name}` must be a positive value or -1.", param=name)
        if value and value > _MAX_LOGPROBS:
            message = f"Requested {kind} logprobs of {value}, which is greater than max allowed: {_MAX_LOGPROBS}"
            raise FakeRefusedError(400, message, param=name)
    if query.prompt_logprobs and query.stream:
        message = "`prompt_logprobs` are not available when `stream=True`."
        raise FakeRefusedError(400, message, param="prompt_logprobs")


def _form(body: dict[str, Any]) -> Any:
    """The JSON schema that a request wants its answer to have."""
    wanted = body.get("response_format") or {}
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return (wanted.get("json_schema") or {}).get("schema")
    return (body.get("structured_outputs") or {}).get("json")


def instance_of(schema: Any) -> Any:
    """A value of a JSON schema, the same every time; what needs more than types is not looked at."""
    if not isinstance(schema, dict):
        return None
    if schema.get("enum"):
        return schema["enum"][0]
    if one := next((schema[name] for name in ("anyOf", "oneOf", "allOf") if schema.get(name)), None):
        return instance_of(one[0])
    kind = schema.get("type", "object" if "properties" in schema else "null")
    if kind == "object":
        return {name: instance_of(one) for name, one in (schema.get("properties") or {}).items()}
    values: dict[str, Any] = {"string": "word", "integer": 42, "number": 0.5, "boolean": True}
    return [instance_of(schema.get("items"))] if kind == "array" else values.get(str(kind))


def _check_range(name: str, value: Any) -> None:
    if value is None:
        return
    low, high, text = _RANGES[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise FakeRefusedError(400, f"{name} must be {text}, got {value}.", param=name)


def _max_tokens(body: dict[str, Any], chat: bool) -> int | None:
    value = body.get("max_tokens")
    if chat:
        value = body.get("max_completion_tokens", value)
    elif value is None:
        value = 16
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise FakeRefusedError(400, f"max_tokens must be an integer, got {value!r}.", param="max_tokens")
    return value


def _prompts(prompt: Any) -> tuple[list[bytes], list[int]]:
    if isinstance(prompt, str) and prompt:
        text = prompt.encode("utf-8", "replace")
        return [text], [len(words.pieces(text))]
    if isinstance(prompt, list) and prompt:
        if all(type(t) is int for t in prompt):
            return [_decoded(prompt)], [len(prompt)]
        if all(isinstance(p, str) and p for p in prompt):
            texts = [p.encode("utf-8", "replace") for p in prompt]
            return texts, [len(words.pieces(t)) for t in texts]
        if all(isinstance(p, list) and p and all(type(t) is int for t in p) for p in prompt):
            return [_decoded(p) for p in prompt], [len(p) for p in prompt]
    raise FakeRefusedError(
        400, "Either prompt or prompt_embeds must be provided and non-empty.", "Bad Request", "body.prompt"
    )


def _decoded(ids: list[int]) -> bytes:
    try:
        return words.decode(ids)
    except ValueError as error:
        raise FakeRefusedError(400, str(error), param="prompt") from None


def messages_text(messages: Any) -> bytes:
    """A conversation as the fake chat template writes it."""
    if not isinstance(messages, list) or not messages:
        raise FakeRefusedError(400, "1 validation error:\n  messages: field required", "Bad Request", "body.messages")
    parts = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise FakeRefusedError(
                400, "1 validation error:\n  messages: malformed message", "Bad Request", "body.messages"
            )
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(_part_text(part) for part in content if isinstance(part, dict))
        parts.append(f"<|{message['role']}|>{content}</s>")
    return ("".join(parts) + "<|assistant|>").encode("utf-8", "replace")


def _part_text(part: dict[str, Any]) -> str:
    """A part of a message as text; of a picture that is sent in the request, its checksum."""
    image = part.get("image_url")
    if part.get("type") != "image_url" or not isinstance(image, dict):
        return str(part.get("text", ""))
    url = str(image.get("url", ""))
    try:
        head, _, data = url.partition(";base64,")
        if head.startswith("data:image/"):
            return f"<image {zlib.crc32(base64.b64decode(data, validate=True)):08x}>"
        if url.startswith(("http:", "https:")):
            return f"<image {url}>"
        problem = "The URL must be either a HTTP, data or file URL."
    except ValueError as error:
        problem = str(error)
    raise FakeRefusedError(400, f"Failed to load image: {problem}")


def scripted_call(body: dict[str, Any], calls: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """The next of the scripted calls: a conversation with as many results of tools has had those before it."""
    if not body.get("tools") or body.get("tool_choice") == "none":
        return None
    results = sum(message["role"] == "tool" for message in body["messages"])
    return calls[results] if results < len(calls) else None


def _chat_prompt(body: dict[str, Any]) -> tuple[list[bytes], list[int]]:
    text = messages_text(body.get("messages"))
    return [text], [len(words.pieces(text))]

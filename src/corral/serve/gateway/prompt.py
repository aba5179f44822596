"""What routing reads of a request and of its answer: model, prompt, tokens.

A request's body is read in one pass; fields that do not matter here are skipped. Text is routed by its bytes as they
stand in the body, token ids by the ids. How many tokens a text has is estimated from its length, by the ratio that
earlier answers of the model gave. The usage at the end of an answer is found without reading the rest of it.

A prompt is cut at fixed positions that lie further apart the deeper they are (every 128 bytes up to 2 KiB, then every
sixteenth of the way), and each block is known by one hash of all that comes before its end. Two prompts that begin
alike have the same first hashes. The hash is keyed by the process, so that no one can make two prompts collide.

A member holds what it computed until it has computed more than its cache takes since then. How much that is comes
from its metrics and from its answers: a prompt that was expected to be cached and was not has a known age. What is
remembered is bounded.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from corral.base.untrusted import LONGEST_NUMBER
from corral.serve.gateway.large_json import BadBodyError, LargeJsonReader

FIRST_STEP_BYTES, DEEPEST_BYTES = 128, 1 << 21
MOST_BLOCKS = 60_000  # remembered of a member, twice
WINDOW = 256  # requests over which a beginning counts as shared
FEWEST = 16  # requests before anything does
SHARED_BY = 0.8


def _positions() -> list[int]:
    found, at = [], 0
    while at < DEEPEST_BYTES:
        at += max(FIRST_STEP_BYTES, at // 16 // FIRST_STEP_BYTES * FIRST_STEP_BYTES)
        found.append(at)
    return found


POSITIONS = _positions()  # in bytes; the n-th hash of a prompt stands for its first POSITIONS[n] bytes
_SPANS = list(pairwise([0, *POSITIONS]))


def block_hashes(data: bytes, seed: int) -> list[int]:
    """The hashes of a prompt's beginnings; `seed` stands for what comes before it (tools, the kind of prompt)."""
    found, chain = [], seed
    for start, end in _SPANS[: bisect_right(POSITIONS, len(data))]:
        chain = hash((chain, data[start:end]))
        found.append(chain)
    return found


class Holdings:
    """The prefixes that one member has cached, dated by its count of computed tokens."""

    __slots__ = ("_limit", "_old", "_young", "capacity_tokens", "clock")

    def __init__(self, limit: int = MOST_BLOCKS) -> None:
        self._young: dict[int, float] = {}
        self._old: dict[int, float] = {}
        self._limit = limit
        self.clock = 0.0
        self.capacity_tokens = float("inf")

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def _touched(self, block: int) -> float | None:
        found = self._young.get(block)
        return self._old.get(block) if found is None else found

    def depth(self, blocks: list[int]) -> int:
        """How many of a prompt's first blocks it holds; a member that holds one holds all before it."""
        since, young, old = self.clock - self.capacity_tokens, self._young, self._old
        low, high = 0, len(blocks)
        middle = high - 1  # a prompt is often held to its last block
        while low < high:
            touched = young.get(blocks[middle]) or old.get(blocks[middle])
            if touched is not None and touched >= since:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        return low

    def hold(self, blocks: list[int], computed_tokens: float) -> None:
        """It gets a prompt, and computes this much of it."""
        self.clock += computed_tokens
        if len(self._young) + len(blocks) > self._limit:
            self._old, self._young = self._young, {}
        young, clock = self._young, self.clock
        for block in blocks:
            young[block] = clock

    def forget(self) -> None:
        """It was started again: its cache is empty."""
        self._young, self._old = {}, {}

    def age(self, block: int) -> float | None:
        """How many tokens it has computed since it last computed or used this block."""
        touched = self._touched(block)
        return None if touched is None else self.clock - touched

    def learn(self, age_tokens: float, cached: bool) -> None:
        """A block of that age was in its cache, or was not: the cache holds at least, or at most, that much."""
        if cached:
            self.capacity_tokens = max(self.capacity_tokens, age_tokens)
        elif age_tokens < self.capacity_tokens:
            low = age_tokens if self.capacity_tokens == float("inf") else self.capacity_tokens * 0.75
            self.capacity_tokens = max(age_tokens, low)


class SharedBeginnings:
    """Which beginnings nearly every request of a model has: holding them does not distinguish members."""

    __slots__ = ("_before", "_before_requests", "_now", "_requests")

    def __init__(self) -> None:
        self._now: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._requests = self._before_requests = 0

    def note(self, blocks: list[int], members: int) -> int:
        """Count a prompt; how many of its first blocks are shared so widely that all members come to hold them."""
        if self._requests >= WINDOW:
            self._before, self._before_requests, self._now, self._requests = self._now, self._requests, {}, 0
        requests = self._requests + self._before_requests
        self._requests += 1
        now, before = self._now, self._before
        known = requests >= FEWEST and members > 1
        least = requests * SHARED_BY if known else float("inf")
        shared, wide = 0, True
        for block in blocks:
            seen = now.get(block, 0)
            now[block] = seen + 1
            if wide:
                wide = seen + before.get(block, 0) > least
                shared += wide
        return shared


ID_BYTES = 4
LARGEST_COUNT = 1 << 31
LARGEST_LIST_BYTES = 1 << 20  # of prompts as a list: a longer one is compared as text, and its tokens are estimated
LONGEST_MODEL = 1024  # characters; a name may be a path
LONGEST_MODEL_BYTES = 12 * LONGEST_MODEL + 2  # each as two escapes, in quotes
EMPTY = msgspec.Raw(b"")


class _Fields(msgspec.Struct):
    """Raw: an array where a name or a number belongs would take seconds to decode."""

    model: msgspec.Raw = EMPTY
    prompt: msgspec.Raw = EMPTY
    messages: msgspec.Raw = EMPTY
    input: msgspec.Raw = EMPTY
    tools: msgspec.Raw = EMPTY
    max_tokens: msgspec.Raw = EMPTY
    max_completion_tokens: msgspec.Raw = EMPTY
    max_output_tokens: msgspec.Raw = EMPTY
    n: msgspec.Raw = EMPTY
    stream: msgspec.Raw = EMPTY


_decode = msgspec.json.Decoder(_Fields).decode
_decode_list = msgspec.json.Decoder(list[Any]).decode
_decode_any = msgspec.json.Decoder().decode


class TokenScale:
    """Tokens for each byte of a model's prompts, learned from its answers; and tokens of an answer."""

    __slots__ = ("output_tokens", "per_byte")

    def __init__(self) -> None:
        self.per_byte, self.output_tokens = 0.25, 128.0

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> None:
        if prompt_bytes >= FEWEST_BYTES and 0 < prompt_tokens <= prompt_bytes:
            self.per_byte += (prompt_tokens / prompt_bytes - self.per_byte) / 16

    def learn_output(self, tokens: float) -> None:
        self.output_tokens += (tokens - self.output_tokens) / 32


FEWEST_BYTES = 64  # below, names of roles and brackets are most of it


@dataclass(slots=True)
class RoutedPrompt:
    """What routing needs to know of a request."""

    model: str | None
    blocks: list[int]
    tokens: float  # of all its prompts, estimated unless they are ids
    tokens_per_byte: float  # at the positions of `blocks`
    size_bytes: int  # of the text; 0 for ids
    output_tokens: float  # expected, of all its sequences
    width: int  # sequences
    stream: bool

    def tokens_until(self, depth: int) -> float:
        """How many tokens the first `depth` positions cover."""
        return POSITIONS[depth - 1] * self.tokens_per_byte if depth else 0.0


def read_prompt(
    body: bytes | bytearray, scale_of: Callable[[str | None], TokenScale], large: LargeJsonReader | None = None
) -> RoutedPrompt:
    """Read a request's body; counts that are not numbers are ignored, the server will refuse them.

    Of a large body the fields were found while it arrived.
    """
    lengths: dict[str, int] = {}
    try:
        if large is not None:
            cut, lengths = large.fields(DEEPEST_BYTES)
            fields = _Fields(**{name: raw for name, raw in cut.items() if name in _Fields.__struct_fields__})
        else:
            fields = _decode(body)
        model = checked_model(_value(fields.model, LONGEST_MODEL_BYTES))
        scale = scale_of(model)
        data, tokens, many, ids, size = _content(fields, scale, lengths)
        width = many * (_count(fields.n) or 1)
        limit = _count(fields.max_completion_tokens) or _count(fields.max_output_tokens) or _count(fields.max_tokens)
        stream = bool(_value(fields.stream))
    except RecursionError:
        raise BadBodyError("it is nested too deep") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadBodyError(str(error)[:200]) from None
    output = min(limit, scale.output_tokens) if limit else scale.output_tokens
    seed = hash((model, bytes(fields.tools), ids))
    per_byte = 1 / ID_BYTES if ids else scale.per_byte
    blocks = block_hashes(data, seed)
    return RoutedPrompt(model, blocks, tokens, per_byte, size, output * width, width, stream)


def checked_model(model: object) -> str | None:
    """The name of a model, which is used to look it up, in errors and in lists of similar names."""
    if model is not None and (not isinstance(model, str) or len(model) > LONGEST_MODEL):
        raise BadBodyError(f"the model is not a text of at most {LONGEST_MODEL:,} characters")
    return model


def _content(fields: _Fields, scale: TokenScale, lengths: Mapping[str, int]) -> tuple[bytes, float, int, bool, int]:
    """The first prompt as bytes, the tokens of all, how many there are, whether they are ids, and the text's size."""
    name = "messages" if fields.messages else "prompt" if fields.prompt else "input"
    raw = bytes(getattr(fields, name))
    size = lengths.get(name, len(raw))
    as_text = raw, size * scale.per_byte, 1, False, size
    if not raw.startswith(b"[") or fields.messages or size > LARGEST_LIST_BYTES:
        return as_text
    parts = _decode_list(raw)
    if all(type(one) is int for one in parts):
        return _packed(parts), len(parts), 1, True, 0
    if all(isinstance(one, list) and all(type(id) is int for id in one) for one in parts):
        return _packed(parts[0]), sum(map(len, parts)), len(parts), True, 0
    if all(isinstance(one, str) for one in parts):
        first = parts[0].encode("utf-8", "replace")
        return first, sum(map(len, parts)) * scale.per_byte, len(parts), False, len(first)
    return as_text


def _packed(ids: list[int]) -> bytes:
    try:
        return array("I", ids).tobytes()
    except OverflowError:
        return repr(ids).encode()


def _value(raw: msgspec.Raw, most_bytes: int = LONGEST_NUMBER) -> Any:
    """A text, a number or a boolean; something longer is of another kind, and refused by the server."""
    if not raw:
        return None
    return _decode_any(raw) if len(raw) <= most_bytes else raw


def _count(raw: msgspec.Raw) -> int:
    value = _value(raw)
    return value if type(value) is int and 0 < value < LARGEST_COUNT else 0


TAIL_BYTES = 4096
_number = re.compile(rb"\s*(\d{1,9})").match


class AnswerUsage(NamedTuple):
    """Tokens of one answer."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the server does not say


_USAGE_NAMES = (
    (b'"prompt_tokens":', b'"completion_tokens":'),
    (b'"input_tokens":', b'"output_tokens":'),  # of /v1/responses and /v1/messages
)


def find_usage(tail: bytes) -> AnswerUsage | None:
    """The last `usage` in the end of an answer; text of the model cannot look like one: its quotes are escaped."""
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None
    for read, written in _USAGE_NAMES:
        if (prompt := _after(tail, read, at)) is not None:
            return AnswerUsage(prompt, _after(tail, written, at) or 0, _after(tail, b'"cached_tokens":', at))
    return None


def _after(tail: bytes, name: bytes, since: int) -> int | None:
    at = tail.find(name, since)
    found = _number(tail, at + len(name)) if at >= 0 else None
    return int(found[1]) if found else None

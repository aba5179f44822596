"""What routing needs to know of a request, read in one pass over its body; the rest of the body is not looked at.

Text is routed by its bytes as they stand in the body, token ids by the ids. How many tokens a text has is estimated
from its length, by the ratio that earlier answers of the model gave.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from corral.serve.gateway.prefixes import POSITIONS, block_hashes

ID_BYTES = 4
LARGEST_COUNT = 1 << 31
EMPTY = msgspec.Raw(b"")


class BadAskError(ValueError):
    """A body that is not a JSON object."""


class _Fields(msgspec.Struct):
    model: Any = None
    prompt: msgspec.Raw = EMPTY
    messages: msgspec.Raw = EMPTY
    input: msgspec.Raw = EMPTY
    tools: msgspec.Raw = EMPTY
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    stream: Any = None


_decode = msgspec.json.Decoder(_Fields).decode
_decode_list = msgspec.json.Decoder(list[Any]).decode


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
    """A request, for routing."""

    model: str | None
    blocks: list[int]
    tokens: float  # of all its prompts, estimated unless they are ids
    tokens_per_byte: float  # at the places of `blocks`
    size_bytes: int  # of the text; 0 for ids
    output_tokens: float  # expected, of all its sequences
    width: int  # sequences
    stream: bool

    def tokens_until(self, depth: int) -> float:
        """How many tokens the first `depth` places stand for."""
        return POSITIONS[depth - 1] * self.tokens_per_byte if depth else 0.0


def read_prompt(body: bytes | bytearray, scale_of: Callable[[str | None], TokenScale]) -> RoutedPrompt:
    """A request's body; counts that are no numbers count as not given, the server will say what it thinks of them."""
    try:
        fields = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadAskError(str(error)) from None
    model = fields.model if isinstance(fields.model, str) else None
    scale = scale_of(model)
    data, tokens, many, ids = _content(fields, scale)
    width = many * (_count(fields.n) or 1)
    limit = _count(fields.max_completion_tokens) or _count(fields.max_tokens)
    output = min(limit, scale.output_tokens) if limit else scale.output_tokens
    seed = hash((model, bytes(fields.tools), ids))
    per_byte = 1 / ID_BYTES if ids else scale.per_byte
    blocks = block_hashes(data, seed)
    size = 0 if ids else len(data)
    return RoutedPrompt(model, blocks, tokens, per_byte, size, output * width, width, bool(fields.stream))


def _content(fields: _Fields, scale: TokenScale) -> tuple[bytes, float, int, bool]:
    """The first prompt as bytes, the tokens of all, how many there are, and whether they are token ids."""
    raw = bytes(fields.messages or fields.prompt or fields.input)
    if not raw.startswith(b"[") or fields.messages:
        return raw, len(raw) * scale.per_byte, 1, False
    parts = _decode_list(raw)
    if all(type(one) is int for one in parts):
        return _packed(parts), len(parts), 1, True
    if all(isinstance(one, list) and all(type(id) is int for id in one) for one in parts):
        return _packed(parts[0]), sum(map(len, parts)), len(parts), True
    if all(isinstance(one, str) for one in parts):
        first = parts[0].encode("utf-8", "replace")
        return first, sum(map(len, parts)) * scale.per_byte, len(parts), False
    return raw, len(raw) * scale.per_byte, 1, False


def _packed(ids: list[int]) -> bytes:
    try:
        return array("I", ids).tobytes()
    except OverflowError:
        return repr(ids).encode()


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < LARGEST_COUNT else 0

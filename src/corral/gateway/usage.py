"""What an answer says at its end about its tokens, found without reading the rest of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["TAIL_BYTES", "AnswerUsage", "find_usage"]

TAIL_BYTES = 4096
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d{1,9})')
_OUTPUT = re.compile(rb'"completion_tokens":\s*(\d{1,9})')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d{1,9})')


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of one answer."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the server does not tell


def find_usage(tail: bytes) -> AnswerUsage | None:
    """The last `usage` in the end of an answer; text of the model cannot look like one: its quotes are escaped."""
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None
    part = tail[at:]
    prompt, output, cached = _PROMPT.search(part), _OUTPUT.search(part), _CACHED.search(part)
    if prompt is None:
        return None
    return AnswerUsage(int(prompt[1]), int(output[1]) if output else 0, int(cached[1]) if cached else None)

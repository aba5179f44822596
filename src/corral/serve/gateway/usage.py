"""What an answer says at its end about its tokens, found without reading the rest of it."""

from __future__ import annotations

import re
from typing import NamedTuple

TAIL_BYTES = 4096
_number = re.compile(rb"\s*(\d{1,9})").match


class AnswerUsage(NamedTuple):
    """Tokens of one answer."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the server does not tell


def find_usage(tail: bytes) -> AnswerUsage | None:
    """The last `usage` in the end of an answer; text of the model cannot look like one: its quotes are escaped."""
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None
    prompt = _after(tail, b'"prompt_tokens":', at)
    if prompt is None:
        return None
    return AnswerUsage(prompt, _after(tail, b'"completion_tokens":', at) or 0, _after(tail, b'"cached_tokens":', at))


def _after(tail: bytes, name: bytes, since: int) -> int | None:
    at = tail.find(name, since)
    found = _number(tail, at + len(name)) if at >= 0 else None
    return int(found[1]) if found else None

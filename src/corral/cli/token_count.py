"""Numbers of tokens as people say them: 32768, or 32k."""

from __future__ import annotations

import re

import click

from corral.errors import UsageError

__all__ = ["TokenCount"]

_TIMES = {"": 1, "k": 1 << 10, "m": 1 << 20}


class TokenCount(click.ParamType[int]):
    """A number of tokens, at least 1; `k` stands for 1,024, as in the names of context lengths."""

    name = "tokens"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        read = re.fullmatch(r"(\d+)([km]?)", value.strip().lower())
        if read is None or int(read[1]) < 1:
            raise UsageError(f"{value!r} is not a number of tokens.", "Give one such as 32768, or 32k (32,768).")
        return int(read[1]) * _TIMES[read[2]]

"""The type of options that take a number of tokens."""

from __future__ import annotations

import click

from corral.plan.token_count import token_count


class TokenCount(click.ParamType[int]):
    """A number of tokens, at least 1: 32768, or 32k."""

    name = "tokens"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else token_count(value)

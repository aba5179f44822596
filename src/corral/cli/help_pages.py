"""Pages of `--help`: a list of verbs that is not cut off, and options under headings, after examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["GroupedCommand", "GroupedOption", "WholeGroup"]


class WholeGroup(click.Group):
    """A group whose page says what each verb does in whole sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, one.get_short_help_str(1000)) for name, one in found.items() if one and not one.hidden]
        with formatter.section("Verbs"):
            formatter.write_dl(rows)


class GroupedOption(click.Option):
    """An option that is shown under a heading of its own."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose page shows examples first, and its options under headings.

    `headings` are headings with the options under them, in the order of the page. An option that none of them names
    stands under its own heading, where it has one, and else under `Options`. A heading without options keeps a place.
    """

    def __init__(
        self, *args: Any, headings: Mapping[str, Sequence[str]] | None = None, examples: str = "", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.headings, self.examples = headings or {}, examples

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples.strip().splitlines()))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {option: heading for heading, options in self.headings.items() for option in options}
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in self.headings or ("Options",)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                own = getattr(param, "heading", "Options")
                heading = next((named[option] for option in param.opts if option in named), own)
                groups.setdefault(heading, []).append(record)
        for heading, rows in groups.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

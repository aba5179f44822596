"""Pages of `--help`: a list of verbs that is not cut off, and options under headings, after examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from corral.base.record import nearest


class WholeGroup(click.Group):
    """A group whose page says what each verb does in whole sentences, and that knows where an option belongs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            having = [verb for verb, one in self.commands.items() if any(name in param.opts for param in one.params)]
            if not having:
                raise
            verbs = " and ".join(f"`{ctx.command_path} {verb}`" for verb in having)
            raise click.UsageError(f"{name} is an option of {verbs}.", ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            verbs = self.list_commands(ctx)
            known = ", ".join(nearest(args[0], verbs) or verbs)
            raise click.UsageError(f"there is no verb `{ctx.command_path} {args[0]}`. Known: {known}.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, one.get_short_help_str(1000)) for name, one in found.items() if one and not one.hidden]
        with formatter.section("Verbs"):
            formatter.write_dl(rows)


def _write_examples(formatter: click.HelpFormatter, text: str) -> None:
    if text:
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in text.strip().splitlines()))


class DefaultVerbGroup(WholeGroup):
    """A group in which one verb need not be said: `corral batch FILE` is `corral batch run FILE`."""

    def __init__(self, *args: Any, default: str = "run", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        _write_examples(formatter, getattr(self.commands[self.default], "examples", ""))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of the verb that need not be said, then the verbs."""
        self.commands[self.default].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


class GroupedOption(click.Option):
    """An option that is shown under a heading of its own."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class RenamedOption(click.Option):
    """An option that also takes a spelling of earlier releases, and then names the new one on stderr."""

    def __init__(self, *args: Any, was: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.was = was

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        parser._long_opt[self.was] = _OldSpelling(parser._long_opt[self.opts[0]], self.was, ctx.resilient_parsing)


class _OldSpelling:
    """The parser's part of an option under another name."""

    def __init__(self, option: Any, was: str, quiet: bool) -> None:
        self._option, self._was, self._quiet = option, was, quiet  # quiet while a shell completes a command

    def __getattr__(self, name: str) -> Any:
        return getattr(self._option, name)

    def process(self, value: Any, state: Any) -> None:
        new = self._option.obj.opts[0]
        if not self._quiet:
            click.echo(f"corral: {self._was} is now {new}; the next release no longer takes {self._was}", err=True)
        self._option.process(value, state)


class FormerOption(click.Option):
    """An option of earlier releases whose value is an argument now; it works, and names the argument on stderr."""

    def __init__(self, *args: Any, argument: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden = True
        self.argument = argument

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        result = super().process_value(ctx, value)
        given = ctx.get_parameter_source(str(self.name)) is click.core.ParameterSource.COMMANDLINE
        if given and not ctx.resilient_parsing:
            was, now = self.opts[0], self.argument
            click.echo(f"corral: {was} {now} is now {now} alone; the next release no longer takes {was}", err=True)
        return result


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
        _write_examples(formatter, self.examples)

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

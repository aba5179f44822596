"""Where to run, as options of the command line: every target's own, from its declaration, in a group of its own.

A flag that only one target has decides for that target; one that several have (an interface between nodes) decides
nothing, and goes to whichever is meant by others or by the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from corral.base.errors import UsageError
from corral.cli.help_pages import GroupedOption
from corral.deploy.targets.base import TARGETS, target_class
from corral.deploy.targets.keys import Flag

F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "target_option_"  # of the parameters, so that no other option has their name


def _flags() -> dict[str, tuple[Flag, tuple[str, ...]]]:
    """Every flag of every target once, by its name, and the targets that have it."""
    found: dict[str, tuple[Flag, tuple[str, ...]]] = {}
    for target in TARGETS:
        for flag in target_class(target).FLAGS:
            known = found.get(flag.name, (flag, ()))
            found[flag.name] = (known[0], (*known[1], target))
    return found


def target_options(command: F) -> F:
    """All flags of all targets."""
    for flag, targets in reversed(_flags().values()):
        command = click.option(
            flag.name,
            PREFIX + flag.name.strip("-").replace("-", "_"),
            cls=GroupedOption,
            heading="Options for " + " and ".join(target_class(target).TITLE or target for target in targets),
            type=click.IntRange(min=flag.least) if flag.least is not None else str,
            multiple=not flag.option,
            metavar=flag.metavar,
            help=flag.help,
        )(command)
    return command


def chosen_target(given: Mapping[str, Any], on: str | None) -> tuple[str | None, dict[str, object]]:
    """The target that the command line names, None for the profile's; and options for it."""
    said = {name: value for name, value in given.items() if name.startswith(PREFIX) and value not in (None, ())}
    flags = {PREFIX + name.strip("-").replace("-", "_"): row for name, row in _flags().items()}
    options: dict[str, object] = {}
    deciding: dict[str, str] = {}  # target -> the flag that says so
    for name, value in said.items():
        flag, targets = flags[name]
        if not flag.option:
            options |= {pair.partition("=")[0]: pair.partition("=")[2] or True for pair in value}
        else:
            options[flag.option] = flag.read(value) if flag.read else value
        if len(targets) == 1:
            deciding.setdefault(targets[0], flag.name)
    if len(deciding) > 1:
        one, other = list(deciding.items())[:2]
        raise UsageError(f"{one[1]} is for {one[0]}, {other[1]} for {other[0]}.", "Leave one of them out.")
    if options and not deciding and on is None:
        named = ", ".join(flags[name][0].name for name in said)
        raise UsageError(f"{named} is for several nodes.", "Say which: --hosts, --nodes, or a profile with --on.")
    return next(iter(deciding), None), options

"""What a shell offers when Tab is pressed: deployments, models, profiles and files, by what a parameter stands for.

Nothing here asks a node, a hub or a scheduler: only names that lie on this machine are offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
from click.shell_completion import CompletionItem

Offer = Callable[[], Iterator[str]]


def _deployments() -> Iterator[str]:
    from corral.deploy.deployment.folder import all_folders
    from corral.serve.fleet.record import all_fleets

    yield from (folder.name for folder in all_folders())
    yield from (folder.name for folder in all_fleets())


def _models() -> Iterator[str]:
    from corral.plan.models.catalogue import entries

    return iter(entries())


def _profiles() -> Iterator[str]:
    from corral.deploy.profile.folders import known_names

    return known_names()


_OPTIONS: dict[str, Offer] = {"--deployment": _deployments, "--on": _profiles, "--model": _models, "--start": _models}
_ARGUMENTS: dict[str, Offer] = {"name": _deployments, "names": _deployments, "model": _models}
_FILES = ("--file", "--output", "--key-file", "--load", "--serve-key-file", "input", "output")


def offer(command: click.Command, group: str = "") -> None:
    """Give the parameters of a command what they offer; of a group, those of its verbs too."""
    if isinstance(command, click.Group):
        for name, verb in command.commands.items():
            offer(verb, command.name or name)
        return
    for param in command.params:
        names = param.opts if isinstance(param, click.Option) else [param.name or ""]
        table = _OPTIONS if isinstance(param, click.Option) else _ARGUMENTS
        names_of = next((table[name] for name in names if name in table), None)
        if names_of is _deployments and group == "profile":
            names_of = _profiles
        if names_of is not None:
            _set(param, names_of, files=names_of is _models)
        elif any(name in _FILES for name in names):
            _set(param, lambda: iter(()), files=True)


def _set(param: click.Parameter, names: Offer, files: bool) -> None:
    def complete(_: click.Context, incomplete: str) -> list[CompletionItem]:
        items = [CompletionItem(name) for name in sorted(set(names())) if name.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if files else [])

    param.shell_complete = complete  # type: ignore[method-assign,assignment]

"""Options that take a length of time."""

from __future__ import annotations

import click
import pytest

from corral.cli import root
from corral.cli.options import Duration


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("40m", 2400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("8m30s", 510.0),
        ("1h30m", 5400.0),
        ("1h 5s", 3605.0),
    ],
)
def test_a_duration_is_a_number_with_its_unit(said: str, seconds: float) -> None:
    assert Duration().convert(said, None, None) == seconds


def test_a_number_alone_has_the_options_own_unit() -> None:
    assert Duration(unit="m").convert("40", None, None) == 2400.0


@pytest.mark.parametrize("said", ["soon", "-5", "5 minutes", "", "1e3", "nan", "5d", "30s8m", "8m30", "5mm"])
def test_what_is_no_duration_is_answered_with_how_to_write_one(said: str) -> None:
    with pytest.raises(click.BadParameter, match="write 90s, 40m or 1h30m"):
        Duration().convert(said, None, None)


def test_too_short_a_time_names_the_least() -> None:
    with pytest.raises(click.BadParameter, match="'5s' is too short: at least 10 s"):
        Duration(10).convert("5s", None, None)


def test_every_verb_reads_a_time_in_the_same_way() -> None:
    """An option whose value is a time is of this type, so that `--stall 30m` is understood everywhere."""
    found = 0
    for command in _commands(root):
        for option in command.params:
            name = option.human_readable_name
            if name.endswith(("_s", "patience", "timeout")) and not name.endswith("per_s"):
                assert isinstance(option.type, Duration), (command.name, option.opts)
                found += 1
    assert found > 10


def _commands(command: click.Command) -> list[click.Command]:
    if not isinstance(command, click.Group):
        return [command]
    context = click.Context(command)
    inner = [command.get_command(context, name) for name in command.list_commands(context)]
    return [one for child in inner if child for one in _commands(child)]

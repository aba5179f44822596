"""An option means the same with every verb; old spellings are taken for a release, with a hint."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest

from corral.cli import VERBS, root
from tests.unit.conftest import in_process

# option -> its one meaning, as the parser sees it: the choices, or the name that stands for the value
MEANINGS = {
    "--network": {"ethernet-100|ethernet-25|ib-hdr|ib-ndr"},
    "--link": {"auto|native|ray"},
    "--route": {"least-work|prefix|random|round-robin"},
    "--input-len": {"number"},
    "--output-len": {"number"},
    "--slo": {"SLOS"},
    "--goodput": {"SLOS"},
    "--json": {"flag"},
}
REPLACED = ("--prompt", "--policy")  # nothing lists them any more


def options(command: click.Command, context: click.Context) -> Iterator[click.Option]:
    yield from (one for one in command.params if isinstance(one, click.Option))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options(below, click.Context(below, context))


def meaning(option: click.Option) -> str:
    if option.is_flag:
        return "flag"
    if isinstance(option.type, click.Choice):
        return "|".join(sorted(map(str, option.type.choices)))
    if option.type.name.startswith("integer"):
        return "number"
    return option.metavar or option.type.name


def every_option() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for verb in VERBS:
        context = click.Context(root)
        command = root.get_command(context, verb)
        assert command is not None
        for option in options(command, click.Context(command, context)):
            for name in option.opts:
                found.setdefault(name, set()).add(meaning(option))
    return found


def test_an_option_has_one_meaning_across_all_verbs() -> None:
    found = every_option()
    assert {name: found.get(name) for name in MEANINGS} == MEANINGS
    assert not set(REPLACED) & found.keys()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("--prompt", "1000"), "--input-len"),
        (("--output", "99"), "--output-len"),
        (("--link", "ib-hdr"), "--network"),
    ],
)
def test_an_old_spelling_is_taken_with_a_hint(
    old: tuple[str, str], new: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    corral = in_process(capsys, "plan")
    asked = ("llama-3.1-8b", "--gpus", "8xH100", "--nodes", "2", "--json")
    code, before, hint = corral(*asked, *old)
    assert (code, hint) == (0, f"corral: {old[0]} is now {new}; the next release no longer takes {old[0]}\n")
    code, after, hint = corral(*asked, new, old[1])
    assert (code, hint) == (0, "")
    assert json.loads(before) == json.loads(after) != json.loads(corral(*asked)[1])

"""Pages of `--help`: nothing is cut off, examples come before options, and every option stands under its heading."""

from __future__ import annotations

import importlib

import click
import pytest
from click.testing import CliRunner

from corral.cli import PARTS, VERBS, root
from corral.cli.up import EXAMPLES, HEADINGS


def command(verb: str) -> click.Command:
    module, _, attribute = VERBS[verb][0].partition(":")
    found: click.Command = getattr(importlib.import_module(module), attribute)
    return found


def page(verb: str) -> str:
    found = CliRunner().invoke(command(verb), ["--help"])
    assert found.exit_code == 0
    return found.output


GROUPS = [verb for verb in VERBS if isinstance(command(verb), click.Group)]


@pytest.mark.parametrize("verb", GROUPS)
def test_the_list_of_verbs_is_not_cut_off(verb: str) -> None:
    group = command(verb)
    assert isinstance(group, click.Group)
    told = " ".join(page(verb).split())
    for name, one in group.commands.items():
        if not one.hidden:
            assert f"{name} {' '.join((one.help or '').split('.')[0].split())}" in told


def test_up_shows_examples_and_then_its_options_in_groups() -> None:
    told = page("up")
    places = [told.index(f"\n{heading}:\n") for heading in ("Examples", *HEADINGS)]
    assert places == sorted(places)
    assert "\nOptions:" not in told  # every option has its heading
    assert all(len(line) <= 80 for line in told.splitlines())
    assert all(line in told for line in EXAMPLES.strip().splitlines())


def test_what_the_headings_name_exists() -> None:
    known = {option for param in command("up").params for option in param.opts} | {"--help"}
    assert {option for options in HEADINGS.values() for option in options} <= known


def test_a_deployment_is_named_alike_everywhere() -> None:
    """[NAME] where it is the object of the verb, -d/--deployment elsewhere; --on is a profile."""

    def walk(name: str, one: click.Command) -> None:
        if isinstance(one, click.Group):
            for word, below in one.commands.items():
                walk(f"{name} {word}", below)
        for param in one.params:
            if "--deployment" in param.opts and not one.hidden:
                assert "-d" in param.opts, name
            if "--on" in param.opts:
                assert isinstance(param, click.Option)
                assert param.metavar == "PROFILE", name

    for verb in VERBS:
        walk(verb, command(verb))


@pytest.mark.parametrize(("verb", "options"), [("batch", "--output"), ("simulate", "--request-rate"),
                                               ("gateway", "--port"), ("tune", "--workload")])  # fmt: skip
def test_a_group_shows_the_options_of_the_verb_that_need_not_be_said(verb: str, options: str) -> None:
    shown = page(verb)
    assert options in shown
    assert shown.index(options) < shown.index("Verbs:")


def test_the_verbs_stand_under_headings() -> None:
    shown = root.get_help(click.Context(root, info_name="corral"))
    at = [shown.index(f"\n{heading}:\n") for heading in PARTS.values()]
    assert at == sorted(at)
    assert PARTS.keys() <= VERBS.keys()
    assert next(iter(PARTS)) == next(iter(VERBS))


def test_a_group_shows_the_examples_of_the_verb_that_need_not_be_said() -> None:
    assert "corral tune report last -o tune.html" in page("tune")

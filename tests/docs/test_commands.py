"""Every command of README and docs/ is typed, page by page, and its output has the shape that the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from corral.cli import root
from tests.conftest import ROOT
from tests.docs.not_run import NOT_RUN, why_not_run
from tests.docs.pages import LANGUAGES, PAGES, Command, blocks, commands, indented
from tests.docs.shape import difference
from tests.docs.stage import Reader

# what a page takes for granted: the commands that come before it
BEFORE = {"bench.md": [f"corral bench run --name {name} --num-prompts 8" for name in ("runA", "runB", "RUN")]}
TYPED = [page for page in PAGES if commands(page)]
FROM = sorted(path for path in (ROOT / "docs" / "from").glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in TYPED])
def test_every_command_of_a_page_runs(page: Path, reader: Reader) -> None:
    before = [Command(page.name, 0, text) for text in BEFORE.get(page.name, [])]
    wrong = []
    for command in [*before, *commands(page)]:
        if not why_not_run(command.text):
            try:
                reader.types(command)
            except AssertionError as error:  # all of a page's faults at once
                wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)


def parsed(words: list[str]) -> None:
    """The verb exists, takes as many words, and has every option."""
    context = click.Context(root)
    command: click.Command = root
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        usual = next((one for name, one in command.commands.items() if name in ("run", "serve")), None)
        chosen = found or usual  # what a group does with words that are no verb of it
        assert chosen is not None, words
        command, words = chosen, words[1:] if found else words
    command.make_context(words[0] if words else "", words)


def test_what_is_not_run_is_there_and_can_be_read() -> None:
    texts = [command.text for page in PAGES for command in commands(page)]
    assert [part for part in NOT_RUN if not any(part in text for text in texts)] == []
    assert len(NOT_RUN) < 15, "the list is for what cannot be helped"
    for text in filter(why_not_run, texts):
        if ours := re.match(r"(?:\w+=\S+ )*corral (.*)", text, re.DOTALL):
            parsed(shlex.split(ours[1]))


def test_every_block_says_its_language() -> None:
    for page in PAGES:
        assert not indented(page), f"{page.name}: an indented block says no language: {indented(page)}"
        assert not [block for block in blocks(page) if block.language not in LANGUAGES], page.name


def test_every_guide_has_its_page() -> None:
    index = (ROOT / "docs" / "from" / "README.md").read_text()
    assert FROM
    assert [page.name for page in FROM if f"({page.name})" not in index] == []
    for page in FROM:
        assert "| step | with Corral |" in page.read_text()
        assert "## What is better now, and why" in page.read_text()


@pytest.mark.parametrize(
    ("shown", "printed", "alike"),
    [
        (("x is ready",), "note\nx is ready\n", True),
        (("x is ready", "  key  ~/a/b"), "x is ready\n   key  /home/c/d\n", True),
        (("12.5 tok/s, http://h:1/v1",), "3 tok/s,   http://other:8000/v1", True),
        (("a", "…", "c"), "a\nb\nb\nc", True),
        (("took … s",), "took nothing s", True),
        (("a", "c"), "a\nb\nc", False),
        (("a", "…", "c"), "a\nb", False),
        (("x is ready",), "x is stopped", False),
    ],
)
def test_shapes(shown: tuple[str, ...], printed: str, alike: bool) -> None:
    assert (difference(shown, printed) == "") is alike

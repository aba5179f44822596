"""What the documents say is true: verbs, options and exit codes exist as written."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import click
import pytest

import corral
from corral.base import errors
from corral.cli import VERBS
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[str]:
    """Lines of a page that a reader would paste: fenced, beginning with corral."""
    found = []
    for line in page.read_text(encoding="utf-8").splitlines():
        match = re.match(r"^\$? ?(?:\./)?corral (?! )(.+)$", line)
        if match:
            found.append(match.group(1).split("  #")[0].split(" #")[0].strip())
    return found


def cases() -> list[tuple[str, str]]:
    return [(page.name, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "line"), cases())
def test_commands_in_the_documents_exist(page: str, line: str) -> None:
    for part in re.split(r"\s+[;|]\s+|\s+&&\s+", line):
        words = shlex.split(part.replace("…", "x"), comments=True)
        if words and words[0] == "corral":
            words = words[1:]
        if not words or words[0].startswith("-") or words[0] not in VERBS:
            assert words == [] or words[0] in {"--help", "--version", "--debug"} or words[0] in VERBS, line
            continue
        module, _, attribute = VERBS[words[0]][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        rest = words[1:]
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            names = rest[0].split("|")
            known = [name for name in names if name in command.commands]
            if not known:
                command = command.commands.get("run", command)  # what the group does without a verb of its own
                break
            command, rest = command.commands[known[0]], rest[1:]
        if not isinstance(command, click.Group):
            command.make_context(words[0], rest)  # as many words as it takes, and every option one of its own


def test_exit_codes_are_documented() -> None:
    table = (ROOT / "docs" / "exit-codes.md").read_text()
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.CorralError)
    ]
    codes = {kind.exit_code for kind in classes} | {0, errors.BARELY_FITS, errors.INTERRUPTED}
    written = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert codes == written
    docstring = errors.__doc__ or ""
    for kind in classes:
        assert re.search(rf"{kind.__name__}\s+{kind.exit_code}\b", docstring)


def test_every_verb_answers_help() -> None:
    for verb, (place, summary) in VERBS.items():
        module, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        text = command.get_help(click.Context(command, info_name=verb))
        assert "Usage:" in text
        assert summary.endswith(".")


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs" / "decisions").glob("0*.md")]
    assert pages
    assert [name for name in pages if name not in index] == []


def test_the_readme_tree_names_real_files() -> None:
    """At its left edge; `test_layers` compares the rooms."""
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## The tree")[1].split("## ")[0]
    names = re.findall(r"^([a-z][\w./]*)  ", tree, re.MULTILINE)
    assert "src/corral/" in names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    listed = set(re.findall(r"\]\(([\w/.-]+)\)", index))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= listed, f"docs/README.md lists {sorted(pages - listed)} nowhere"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_tutorial_needs_no_shell_and_only_what_is_public() -> None:
    cells = json.loads((ROOT / "notebooks" / "tutorial.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not [text for text in code if re.search(r"(import|from) corral\.", text)]
    assert {name for text in code for name in re.findall(r"\bcorral\.(\w+)", text)} <= {*corral.__all__}
    assert not [text for text in code if re.search(r"subprocess|os\.system|^[!%]", text, re.MULTILINE)]
    assert any("corral.batch(" in text for text in code)
    shows = [cell for cell in cells if cell["cell_type"] == "code"][1:-1]  # imports and the end show nothing
    ran = [cell for cell in shows if not re.search(r"perf_counter|timing\.", "".join(cell["source"]))]
    assert len(ran) == len(shows) - 5  # seconds are those of the reader's machine
    assert all(cell["outputs"] for cell in ran), "stored as they were run"
    for cell in ran:
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
        drawn = any("image/png" in output.get("data", {}) for output in cell["outputs"])
        assert drawn == ("plt.show()" in "".join(cell["source"])), "".join(cell["source"])
    assert code[-1] == "llm.down()"


def test_every_cell_of_who_can_do_what_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    _, _, rows = text.partition("## Who can do what")[2].partition("|---|---|---|---|---|\n")
    cells = [line.strip(" |").split(" | ") for line in rows.partition("\n\n")[0].splitlines()]
    assert len(cells) == 7
    for who, *others in cells:
        assert len(others) == 4, who
        for cell in others:
            named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)
            assert named, f"{who}: {cell}"
            for file, test in named:
                source = (ROOT / "tests" / "unit" / file).read_text(encoding="utf-8")
                assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file}::{test}"
    for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / path).is_file(), path

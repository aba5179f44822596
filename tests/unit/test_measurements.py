"""Every command that docs/measurements names exists in the repository, with its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs" / "measurements").glob("*.md"))
PROGRAM = re.compile(r"`(?:python (?:-m )?)?((?:benchmarks|tests)[/.][\w/.]+)([^`]*)`")


def program(name: str) -> Path:
    """`benchmarks/x.py`, `tests.cluster.y` of `python -m`, or a test."""
    return ROOT / (name if name.endswith(".py") or "/" in name else name.replace(".", "/") + ".py")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_what_repeats_a_figure_exists(page: Path) -> None:
    for name, words in PROGRAM.findall(page.read_text(encoding="utf-8")):
        path = program(name)
        assert path.exists(), f"{page.name}: there is no {name}"
        options = [word for word in shlex.split(words.replace("…", "")) if word.startswith("--") and " " not in word]
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        source += "".join(other.read_text(encoding="utf-8") for other in path.parent.glob(f"{path.stem}_*.py"))
        assert [option for option in options if f'"{option}"' not in source] == [], f"{page.name}: {name}{words}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "measurements" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []

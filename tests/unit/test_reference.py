"""The pages of docs/reference are what `--help` prints, and no page of docs/ is too long to be read."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from corral.base.record import to_json
from corral.plan.choose import make_plan
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import read_facts
from tests.conftest import ROOT

LONGEST_PAGE = 250  # lines


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "tools" / "write_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool()


def test_the_reference_is_what_help_prints(clean_home: Path) -> None:
    """In a process of its own: click keeps the help option that a command was first shown with."""
    check = [sys.executable, str(ROOT / "tools" / "write_reference.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_page_has_the_very_text_of_help(tool: ModuleType, clean_home: Path) -> None:
    program = f"import click; click.formatting.FORCED_WIDTH = {tool.WIDTH}; from corral.cli import main; main()"
    for words in (["scale"], ["batch", "check"], ["gateway", "key", "add"]):
        argv = [sys.executable, "-c", program, *words, "--help"]
        printed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
        (page,) = [text for name, text in tool.pages().items() if f"## `corral {' '.join(words)}`\n" in text]
        assert f"```text\n{printed.rstrip()}\n```" in page


def test_a_changed_a_missing_and_a_forgotten_page_are_stale(
    tool: ModuleType, clean_home: Path, tmp_path: Path
) -> None:
    for name, text in tool.pages().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert tool.stale(tmp_path) == []
    (tmp_path / "up.md").write_text("something else")
    (tmp_path / "tune.md").unlink()
    (tmp_path / "gone.md").write_text("a verb that was removed")
    assert tool.stale(tmp_path) == ["gone.md", "tune.md", "up.md"]


def test_no_page_is_longer_than_can_be_read() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "docs").rglob("*.md")}
    assert {str(path): lines for path, lines in lengths.items() if lines > LONGEST_PAGE} == {}


def test_the_json_of_a_plan_is_described_key_by_key() -> None:
    plan = make_plan(read_facts("llama-3.1-8b", offline=True), parse_gpus("1xH100", None, "ib-ndr"), Goal())
    body = to_json(plan)
    text = (ROOT / "docs" / "reference" / "plan-json.md").read_text()
    first = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    assert {name for cell in first for name in re.findall(r"`(\w+)", cell)} == body.keys()
    for name, keys in re.findall(r"`(\w+)\.\{([^}]+)\}`", "".join(first)):
        described = set(keys.split(","))
        assert described - {"…"} <= body[name].keys() if "…" in described else described == body[name].keys(), name

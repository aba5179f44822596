"""A skip that is not on the list fails, however it came about; one that is on it is shown with its reason."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.skips import KNOWN, NO_SHELLCHECK, refusal, tier_of
from tests.testbed import NO_NAMESPACES, NOT_ROOT

SKIPPING = """
import pytest

def test_unknown():
    pytest.skip("too tired")

@pytest.mark.skip(reason="for ever")
def test_marked():
    ...

@pytest.mark.xfail(reason="known to be wrong")
def test_expected():
    assert False

@pytest.fixture
def absent():
    pytest.skip("a fixture's wish")

def test_fixture(absent):
    ...

def test_known():
    pytest.skip("a true reason of this tier, with its detail")

def test_known_and_untrue():
    pytest.skip("an untrue reason")

def test_plain():
    ...
"""
LIST = """
import tests.skips
from tests.skips import *
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

tests.skips.KNOWN = (
    Known(("unit",), "a true reason", lambda: True), Known(("unit",), "an untrue reason", lambda: False)
)
"""


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(LIST)
    (folder / "test_skipping.py").write_text(SKIPPING)
    (folder / "test_nothing.py").write_text("import pytest\npytest.importorskip('no_module')\ndef test_it(): ...\n")
    return folder


@pytest.mark.parametrize(
    "how", [(), ("-p", "xdist", "-n", "1", "-p", "pytest_rerunfailures", "--reruns", "1")], ids=["plain", "xdist"]
)
def test_only_what_is_listed_and_true_is_skipped(tier: Path, how: tuple[str, ...]) -> None:
    options = ("-rs", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--rootdir={tier}")
    command = [sys.executable, "-m", "pytest", *options, *how, str(tier)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tier, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout
    assert "3 failed, 1 passed, 1 skipped" in said
    assert "3 errors" in said  # before the test itself: the mark, the fixture and the module
    for reason in ("too tired", "for ever", "known to be wrong", "a fixture's wish", "could not import 'no_module'"):
        assert f"has no such reason on its list (tests/skips.py): {reason}" in said
    assert "a reason that is not true here: an untrue reason" in said
    assert ": a true reason of this tier, with its detail" in said


def test_reasons_hold_where_they_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("tests.skips.PATH", "/nowhere")
    assert refusal("cluster", NOT_ROOT) == ""
    assert refusal("unit", NO_SHELLCHECK) == ""
    assert "list" in refusal("cluster", NO_SHELLCHECK)
    assert "not true here" in refusal("cluster", NO_NAMESPACES)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "not true here" in refusal("cluster", NOT_ROOT)
    assert "not true here" in refusal("unit", NO_SHELLCHECK)


def test_tiers() -> None:
    assert tier_of(ROOT / "tests" / "cluster" / "test_ssh.py") == "cluster"
    assert {tier for known in KNOWN for tier in known.tiers} <= {path.name for path in (ROOT / "tests").iterdir()}


def functions_of(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What a function itself does, without what functions inside it do."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def test_no_test_returns_early() -> None:
    """A `return` passes without having looked; `pytest.skip` with a listed reason, or another parameter, says so."""
    files = sorted((ROOT / "tests").glob("*/test_*.py"))
    found = [
        f"{path.relative_to(ROOT)}::{test.name}"
        for path in files
        for test in functions_of(path)
        if any(isinstance(node, ast.Return) for node in own_nodes(test))
    ]
    assert files
    assert not found

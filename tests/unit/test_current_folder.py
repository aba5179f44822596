"""Nothing is imported from the folder in which a command is typed: it may be another user's, or a model's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from corral.base.processes import OWN_COMMAND
from corral.base.shell import run
from corral.console.commands import Commands
from corral.engines import locks
from tests.conftest import ROOT
from tests.until import until

PLANTED = ("json", "click", "msgspec", "corral", "pip", "uv", "venv", "vllm", "pathlib")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What exists once a module of the current folder was imported."""
    folder, mark = tmp_path / "theirs", tmp_path / "ran"
    for name in PLANTED:
        package = folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            f"open({str(mark)!r}, 'a').write({name!r})\nraise ImportError('planted')\n"
        )
    monkeypatch.chdir(folder)
    return mark


def test_a_plain_python_imports_from_there(ran: Path) -> None:
    """Without it, the tests below would show nothing."""
    assert subprocess.run([sys.executable, "-m", "corral", "--version"], capture_output=True).returncode != 0
    assert ran.exists()


def test_corral_starts_itself_from_elsewhere(ran: Path, clean_home: Path) -> None:
    done = subprocess.run([*OWN_COMMAND, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    console = Commands()
    started = console.start(["--version"], ["--version"])
    until(lambda: console.read(started.id).exit_code is not None, "the commands")
    assert console.read(started.id).exit_code == 0, console.read(started.id).output
    assert not ran.exists()


def test_questions_to_other_pythons_import_nothing_from_there(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's Python is asked for its version (`-c`), pip for its configuration (`-m`)."""
    done = run([sys.executable, "-c", "import json, vllm"])
    assert "planted" not in done.stderr
    monkeypatch.setattr(locks, "read_sources", locks.read_sources.__wrapped__)
    locks.read_sources()
    assert not ran.exists()


def test_every_own_process_is_started_with_the_one_command() -> None:
    sources = [path for path in (ROOT / "src" / "corral").rglob("*.py") if "node" not in path.parts]
    own = re.compile(r"""sys\.executable,\s*["']-m""")
    assert [str(path) for path in sources if own.search(path.read_text(encoding="utf-8"))] == []


def test_the_launcher_starts_every_python_away_from_there() -> None:
    text = (ROOT / "corral").read_text(encoding="utf-8")
    started = re.findall(r'^[^#\n]*"(?:\$candidate|\$python|\$venv/bin/python|\$1/bin/python|\$aside/bin/python|\$1)"'
                         r" (-(?!-)\S*)", text, re.MULTILINE)  # fmt: skip
    assert len(started) >= 7
    assert set(started) <= {"-I", "-P"}

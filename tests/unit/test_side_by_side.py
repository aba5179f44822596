"""`make` targets side by side: whole outputs, the right exit code, and an end to both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.until import until

MAKEFILE = """
.PHONY: left right after bad never slow endless other
left:
\t@echo left begins; until test -e right-began; do sleep 0.02; done; echo left ends
right:
\t@echo right begins; touch right-began; sleep 0.1; echo right ends
after:
\t@echo after
bad:
\t@touch bad-began; echo what is wrong; exit 3
slow:
\t@touch slow-began; until test -e bad-began; do sleep 0.02; done; sleep 0.5; echo slow is done
endless other:
\t@trap 'echo torn down; exit 1' INT TERM; touch $@-began; while :; do sleep 0.02; done
"""
COMMAND = [sys.executable, str(ROOT / "tools" / "side_by_side.py")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(folder: Path, *lanes: str) -> tuple[int, list[str]]:
    done = subprocess.run([*COMMAND, *lanes], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_both_run_at_once_and_each_output_is_in_one_piece(folder: Path) -> None:
    code, lines = run(folder, "left", "right,after")  # left waits for right
    assert code == 0
    for piece in (["left begins", "left ends"], ["right begins", "right ends"]):
        at = lines.index(piece[0])
        assert lines[at : at + 2] == piece
        assert lines[at + 2].startswith(f"=== {piece[0].split()[0]}: passed after ")
    assert lines.index("after") > lines.index("right ends")
    assert (folder / ".scratch" / "make" / "left.txt").read_text() == "left begins\nleft ends\n"


def test_a_failure_fails_the_whole_lets_the_other_end_and_starts_nothing_more(folder: Path) -> None:
    code, lines = run(folder, "slow,never", "bad,never")
    assert code == 1
    assert "what is wrong" in lines
    assert any(line.startswith("=== bad: FAILED (exit code 2) after ") for line in lines)
    assert any(line.startswith("=== slow: passed after ") for line in lines)
    assert not any("never" in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_both_after_their_tear_down(folder: Path, number: int) -> None:
    with subprocess.Popen(
        [*COMMAND, "endless", "other"], cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        until(lambda: len(list(folder.glob("*-began"))) == 2)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        said = process.communicate(timeout=100)[0]
    assert process.returncode == 128 + number
    assert said.count("torn down") == 2
    assert said.count(": FAILED") == 2
    with pytest.raises(ProcessLookupError):  # nobody is left of the group
        os.killpg(process.pid, 0)

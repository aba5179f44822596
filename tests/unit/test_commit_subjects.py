"""`make lint` checks the length of commit subjects, and says so where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SCRIPT = ROOT / "tools" / "check_commit_subjects.py"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def repository(folder: Path, *subjects: str) -> str:
    """A clone with the script and a commit for each subject; returns the first commit."""
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / SCRIPT.name).write_text(SCRIPT.read_text())
    git(folder, "init", "--quiet")
    for subject in ("the first one, before the rule, " + "x" * 80, *subjects):
        git(folder, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(folder, "rev-list", "--max-parents=0", "HEAD").strip()


def check(folder: Path, since: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(folder / "tools" / SCRIPT.name), since]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_a_subject_of_72_characters_passes_and_one_more_is_named(tmp_path: Path) -> None:
    first = repository(tmp_path / "a", "y" * 72)
    assert check(tmp_path / "a", first).returncode == 0
    git(tmp_path / "a", "commit", "--quiet", "--allow-empty", "--message", "z" * 73)
    done = check(tmp_path / "a", first)
    assert done.returncode == 1
    assert "has 73 characters: " + "z" * 73 in done.stderr


def test_a_clone_without_the_first_commit_is_not_checked_and_says_so(tmp_path: Path) -> None:
    first = repository(tmp_path / "a", "y" * 90)
    git(tmp_path, "clone", "--quiet", "--depth", "1", (tmp_path / "a").as_uri(), "shallow")
    (tmp_path / "shallow" / "tools").mkdir()
    (tmp_path / "shallow" / "tools" / SCRIPT.name).write_text(SCRIPT.read_text())
    done = check(tmp_path / "shallow", first)
    assert (done.returncode, "are not checked" in done.stdout) == (0, True)
    (tmp_path / "archive" / "tools").mkdir(parents=True)
    (tmp_path / "archive" / "tools" / SCRIPT.name).write_text(SCRIPT.read_text())
    done = check(tmp_path / "archive", "ad72a15")
    assert (done.returncode, "are not checked" in done.stdout) == (0, True)

"""What the shell offers after Tab: the protocol of click's bash completion, as a shell speaks it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from corral.deploy.deployment.folder import DeploymentFolder


def offered(words: str, clean_home: Path) -> list[tuple[str, str]]:
    """(type, value) pairs for what stands before the cursor."""
    given = words.split(" ")
    env = {**os.environ, "HOME": str(clean_home), "_CORRAL_COMPLETE": "bash_complete",
           "COMP_WORDS": words, "COMP_CWORD": str(len(given) - 1)}  # fmt: skip
    command = [sys.executable, "-c", "from corral.cli import main; main()"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=clean_home)
    assert not done.stderr
    pairs = [line.partition(",") for line in done.stdout.splitlines()]
    return [(kind, value) for kind, _, value in pairs]


@pytest.fixture
def home(clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORRAL_HOME", str(clean_home / "corral"))
    for name in ("alpha", "beta"):
        folder = DeploymentFolder.of(name)
        folder.path.mkdir(parents=True)
        folder.record.write_text(json.dumps({}))
    return clean_home


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("corral sta", {"status"}),
        ("corral status ", {"alpha", "beta"}),
        ("corral down al", {"alpha"}),
        ("corral complete --deployment ", {"alpha", "beta"}),
        ("corral up smol", {"smollm2", "smollm3-3b"}),
        ("corral up --on kemp", {"kempner"}),
        ("corral profile show kemp", {"kempner"}),
        ("corral profile che", {"check"}),
        ("corral up --served", {"--served-name"}),
    ],
)
def test_names_of_what_there_is(home: Path, words: str, expected: set[str]) -> None:
    assert {value for _, value in offered(words, home)} == expected


@pytest.mark.parametrize(
    "words", ["corral batch run ro", "corral complete -f ro", "corral up ./mod", "corral score ro"]
)
def test_files_where_files_are_meant(home: Path, words: str) -> None:
    assert {kind for kind, _ in offered(words, home)} == {"file"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_line_of_the_documentation_is_good_bash(home: Path) -> None:
    env = {**os.environ, "_CORRAL_COMPLETE": "bash_source"}
    made = subprocess.run([sys.executable, "-c", "from corral.cli import main; main()"], env=env,
                          capture_output=True, text=True)  # fmt: skip
    assert "_corral_completion" in made.stdout
    assert subprocess.run(["bash", "-n"], input=made.stdout, text=True).returncode == 0

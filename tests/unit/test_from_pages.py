"""The pages of docs/from: a reader who types every command of a page, from top to bottom, gets through.

Starts on GPUs, over ssh or in a queue are dry; what is about a deployment that runs finds one of that name, whose
engine is the fake server; hosts are folders, the hub is on loopback and has a tiny model under the real names, conda
is a stand-in.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from corral.cli import main
from corral.engines import environments as engines
from corral.hardware import inventory as hardware
from tests.conftest import ROOT
from tests.fake_hub import FakeHub
from tests.fake_ssh import make_fake_ssh
from tests.unit.conftest import Corral
from tests.unit.test_engine_conda import make_conda

PAGES = sorted(path for path in (ROOT / "docs" / "from").glob("*.md") if path.name != "README.md")
ENGINE = Path(__file__).parent.parent / "fake_engine.py"
HOSTS = ["node00", "node01", "node02", "node03"]
ABOUT_ONE = ("status", "wait", "logs", "env", "down")
REPOSITORIES = [f"meta-llama/Llama-3.1-{size}-Instruct" for size in ("8B", "70B", "405B")]
# a machine without a Docker that answers, and one too busy for a measurement: told by codes of their own
TOLERATED = {"doctor": (0, 8), "bench": (0, 1)}
SHORTER = {("bench", "search"): ["--probe-seconds", "1", "--max-probes", "2"]}
TOKEN = "tok-en-that-is-good"


def commands(page: Path) -> list[str]:
    """Every command of a page, as a reader would paste it."""
    return re.findall(r"`(corral [^`]+)`", page.read_text(encoding="utf-8"))


def typed(page: Path) -> list[list[str]]:
    """Those that are whole: `corral env` in a sentence only names a verb."""
    return [words[1:] for words in map(shlex.split, commands(page)) if len(words) > 2]


@dataclass
class Reader:
    """Somebody who has the five documents' hardware, as far as a dry run can tell."""

    corral: Corral
    folder: Path
    hub: FakeHub
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def begin(self, name: str) -> None:
        """A deployment of this name, by the fake server."""
        up = self.corral("up", str(self.corral.model), "--name", name, "--served-name", name)
        assert up.code == 0, up.err

    def types(self, words: list[str]) -> None:
        if words[0] == "up":
            self._here([*words, *([] if "--dry-run" in words else ["--dry-run"])])
        elif words[0] == "engine":
            self._here(words)
        else:
            self._apart(words)

    def _apart(self, words: list[str]) -> None:
        words = [*words, *SHORTER.get((words[0], words[1]), [])]
        online = {"HF_ENDPOINT": self.hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        env = {**self.corral.env, "CORRAL_SSH": str(self.folder / "hosts" / "ssh")}
        env |= online if words[0] == "pull" or "--model" in words else {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "corral", *words], capture_output=True, text=True, env=env, timeout=240,
            cwd=self.folder, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert done.returncode in TOLERATED.get(words[0], (0,)), f"{shlex.join(words)}\n{said}"
        assert said, words
        measured = "saved" in said or "req/s" in said or "use a freer machine" in said  # as the tests' often is not
        assert words[0] != "bench" or measured, said

    def _here(self, words: list[str]) -> None:
        """In this process, where the machine has eight H100."""
        with self.patch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(hardware, "probe", lambda: hardware.parse_gpus("8xH100"))
            with pytest.raises(SystemExit) as ended:
                main(words)
        said = self.capsys.readouterr()
        assert ended.value.code in (0, None), f"{shlex.join(words)}\n{said.err}"
        assert said.out


@pytest.fixture
def reader(
    corral: Corral,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Reader]:
    python = Path(engines.expected("cpu").path) / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ENGINE}" "$@"\n')
    make_conda(tmp_path, monkeypatch)
    folder = tmp_path / "reader"
    make_fake_ssh(folder / "hosts", HOSTS)
    rows = [{"id": n, "prompt": f"San Francisco is a {n}"} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "items.jsonl").write_text('{"id": "1", "text": "some words to score"}\n')
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with FakeHub(dict.fromkeys(REPOSITORIES, corral.model), gated=set(REPOSITORIES)) as hub:
        yield Reader(corral, folder, hub, monkeypatch, capsys)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_every_command_of_a_page_runs(page: Path, reader: Reader) -> None:
    words = typed(page)
    assert len(words) >= 8
    named = [each[1] for each in words if each[0] in ABOUT_ONE]
    assert len(set(named)) <= 1, "one deployment for each page"
    reader.begin(named[0] if named else "one")
    for each in words:
        reader.types(each)


def test_every_document_has_its_page() -> None:
    index = (ROOT / "docs" / "from" / "README.md").read_text()
    assert len(PAGES) == 5
    assert [page.name for page in PAGES if f"({page.name})" not in index] == []
    for page in PAGES:
        text = page.read_text()
        assert "| step | with Corral |" in text
        assert "## What is better now, and why" in text

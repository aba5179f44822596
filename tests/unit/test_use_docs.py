"""Every example of the pages on using a model runs, here against the fake server; the real one has its own tier."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import corral
from corral.fake import FakeOptions, FakeServer
from tests.conftest import ROOT

DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions()) as running:
        yield running


@pytest.mark.parametrize(
    "line", [line for block in blocks("using.md", "sh") for line in block.splitlines() if "logits" not in line]
)
def test_the_shells_examples(server: FakeServer, line: str, tmp_path: Path) -> None:
    script = tmp_path / "corral"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m corral "$@"\n')
    script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, cwd=tmp_path,
        env={**os.environ, "PATH": path, "OPENAI_BASE_URL": server.url},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout or "chat" in line


def test_the_scoring_example(server: FakeServer, tmp_path: Path) -> None:
    (line,) = (line for block in blocks("scoring.md", "sh") for line in block.splitlines())
    (tmp_path / "items.jsonl").write_text('{"id": "1", "text": "some words to score"}\n')
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "OPENAI_BASE_URL": server.url},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scores.parquet").exists()


def test_pythons_examples(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setattr(corral, "up", lambda *_, **__: corral.connect(), raising=False)
    room: dict[str, object] = {}
    found = blocks("python.md", "python")
    assert len(found) > 8
    for block in found:
        exec(compile(textwrap.dedent(block), "docs/python.md", "exec"), room)
    assert "PromptTooLongError False" in capsys.readouterr().out
    room["client"].close()  # type: ignore[attr-defined]

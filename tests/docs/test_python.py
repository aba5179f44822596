"""The Python of the pages runs as it stands there, against the fake server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import corral
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from tests.conftest import ROOT
from tests.docs.pages import PAGES, blocks, commands
from tests.until import free_port

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, object]]:
    """The names of a reader's session; a model that is started is the fake server."""
    with FakeServer(FakeOptions()) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setattr(corral, "up", lambda *_, **__: corral.connect(), raising=False)
        monkeypatch.setattr(corral, "connect", lambda *_, **__: _connect(), raising=False)
        monkeypatch.chdir(tmp_path)
        Path("prompts.txt").write_text("one\ntwo\n")
        names: dict[str, object] = {}
        yield names
        if client := names.get("client"):
            client.close()  # type: ignore[attr-defined]


_connect = corral.connect


# pages whose Python needs more than a fake server: where it is tried
ELSEWHERE = {
    "batch-api.md": "test_the_batch_api_as_shown",
    "extending.md": "tests/unit/test_extending.py, as files",
}


def test_pages_that_are_tried_elsewhere_have_python() -> None:
    assert ELSEWHERE.keys() <= {page.name for page in WITH_PYTHON}


@pytest.mark.parametrize("page", [page.name for page in WITH_PYTHON if page.name not in ELSEWHERE])
def test_the_python_of_a_page(page: str, room: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(ROOT / "docs" / page):
        if block.language == "python":
            exec(compile(textwrap.dedent("\n".join(block.lines)), f"docs/{page}", "exec"), room)
    assert page != "python.md" or "PromptTooLongError False" in capsys.readouterr().out


def test_the_python_in_a_job(room: dict[str, object]) -> None:
    texts = [command.text for command in commands(ROOT / "docs" / "slurm-and-notebooks.md")]
    (script,) = [text for text in texts if text.startswith("#!")]
    inside = re.search(r"<<'PY'\n(.*)\nPY", script, re.DOTALL)
    assert inside
    exec(compile(inside[1], "the job", "exec"), room)
    assert len(room["texts"]) == 200  # type: ignore[arg-type]


def test_the_batch_api_as_shown(room: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": BODY} for n in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (block,) = [block for block in blocks(ROOT / "docs" / "batch-api.md") if block.language == "python"]
    port = free_port()
    argv = [sys.executable, "-m", "corral", "batch", "serve", "--port", str(port)]
    with subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as service:
        assert service.stdout is not None
        said = service.stdout.readline() + service.stdout.readline()
        key = re.search(r"key +(\S+)", said)
        assert key, said
        source = "\n".join(block.lines).replace("8100", str(port)).replace(".../key", key[1])
        exec(compile(source, "docs/batch-api.md", "exec"), room)
        service.terminate()
        service.communicate(timeout=120)
    assert len(capsys.readouterr().out.strip().splitlines()) == 3

"""The Models view's API: what is listed, what a button runs, and what a reader of `--read-only` learns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from corral.base.errors import CorralError
from corral.console.commands import Commands
from corral.console.context import ConsoleContext
from corral.console.models import pull_argv
from corral.console.server import Console, ConsoleOptions
from tests.unit.test_console_guard import Answer, ask, enter
from tests.unit.test_models_cli import cached
from tests.until import until

HOSTILE = ["", "-x", "--on", "/etc/passwd", "../a/b", "a/b/c", "./model", "a/..", "nothing-like-it", "a/b --to /tmp"]


@pytest.fixture
def hub(clean_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one model, and one that was downloaded in part."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    cached(tmp_path / "hf", "meta-llama/Llama-3.1-8B")
    part = cached(tmp_path / "hf", "somebody/part")
    next((part / "snapshots").glob("*/*.safetensors")).unlink()
    return tmp_path / "hf"


@pytest.fixture(params=[False], ids=["console"])
def console(request: pytest.FixtureRequest, hub: Path) -> Iterator[Console]:
    stand_in = Commands(program=["sh", "-c", 'echo "$@" && exec sleep 30', "corral"])
    context = ConsoleContext(read_only=request.param, commands=stand_in)
    with Console(ConsoleOptions(port=0, read_only=request.param), context) as running:
        yield running
        for child in stand_in._children.values():
            child.process.kill()
            child.process.wait()


read_only = pytest.mark.parametrize("console", [True], indirect=True, ids=["read-only"])


def got(console: Console, path: str) -> Any:
    found = ask(console, path, cookie=enter(console))
    assert found.status == 200, found.body
    return json.loads(found.body)


def post(console: Console, path: str, body: Any) -> Answer:
    return ask(console, path, "POST", json.dumps(body), cookie=enter(console), origin=console.url,
               content_type="application/json")  # fmt: skip


def test_models_are_listed_with_size_and_fit_and_where_they_lie(console: Console, hub: Path) -> None:
    models = {one["name"]: one for one in got(console, "/api/models")["models"]}
    assert models["smollm2"]["fits"] == "yes"
    assert models["llama-3.1-405b"]["fits"] == "no"
    here, part = models["llama-3.1-8b"], models["somebody/part"]
    assert (here["here"], here["whole"], here["bytes"] > 10**10) == (True, True, True)
    assert (part["here"], part["whole"], part["fits"]) == (True, False, "")
    assert here["path"].startswith(str(hub))
    assert models["qwen2.5-vl-7b-instruct"]["images"]
    assert not models["llama-3.1-8b"]["images"]


def test_models_are_judged_on_the_hardware_of_a_profile(console: Console, clean_home: Path) -> None:
    profiles = clean_home / ".config" / "corral" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "big.toml").write_text('[hardware]\ngpus = "8xH100"\n')
    (profiles / "far.toml").write_text('target = "ssh"\n[ssh]\nhosts = ["node00"]\n')
    found = got(console, "/api/models?on=big")
    assert {"big", "far"} <= set(found["profiles"])
    assert {one["name"]: one["fits"] for one in found["models"]}["llama-3.1-405b-fp8"] != "no"
    assert "H100" in found["hardware"]
    unknown = ask(console, "/api/models?on=far", cookie=enter(console))
    assert unknown.status == 400
    assert "does not say what its nodes hold" in str(unknown.error["message"])
    assert ask(console, "/api/models?on=../../etc/x", cookie=enter(console)).status == 400
    line = got(console, "/api/models/line?name=smollm2&on=far")["line"]
    assert line == "corral pull smollm2 --on far"


def test_a_download_runs_the_line_that_was_shown(console: Console, hub: Path) -> None:
    line = got(console, "/api/models/line?name=llama-3.1-8b")["line"]
    begun = post(console, "/api/models/pull", {"name": "llama-3.1-8b"})
    assert begun.status == 202
    assert json.loads(begun.body)["line"] == line == "corral pull llama-3.1-8b"

    def first() -> Any:
        return got(console, "/api/models/downloads")["downloads"][0]

    until(lambda: first()["text"] == "pull llama-3.1-8b", "its output")
    download = first()
    assert (download["name"], download["exit_code"]) == ("llama-3.1-8b", None)
    assert 0 < download["bytes"] < download["total"]  # of the hub's cache, while it runs
    post(console, "/api/models/pull", {"name": "owner/name"})
    assert first()["total"] is None  # how large it will be is not known


@pytest.mark.parametrize("name", HOSTILE)
def test_a_page_names_a_model_and_no_folder(console: Console, name: str) -> None:
    with pytest.raises(CorralError):
        pull_argv({"name": name})
    assert ask(console, f"/api/models/line?name={quote(name)}", cookie=enter(console)).status == 404
    assert post(console, "/api/models/pull", {"name": name}).status == 404
    assert got(console, "/api/commands") == {"commands": []}


BAD = [{}, {"name": 5}, {"name": ["smollm2"]}, {"name": "smollm2", "on": "-x"}, {"name": "smollm2", "on": "../x"},
       {"name": "smollm2", "on": ["x"]}]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=repr)
def test_other_bodies_start_nothing(console: Console, body: Any) -> None:
    assert post(console, "/api/models/pull", body).status in (400, 404)
    assert got(console, "/api/commands") == {"commands": []}


@read_only
def test_a_viewer_downloads_nothing_and_learns_no_path(console: Console, hub: Path) -> None:
    assert post(console, "/api/models/pull", {"name": "smollm2"}).status == 403
    found = ask(console, "/api/models", cookie=enter(console))
    assert str(hub).encode() not in found.body
    assert b'"path"' not in found.body

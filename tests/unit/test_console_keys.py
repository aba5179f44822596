"""The Keys view's API: names, limits and use; a secret once; nothing for a reader of `--read-only`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.console import keys as view
from corral.console.server import Console, ConsoleOptions
from corral.serve.gateway.keys import add_key, digest_of, read_keys
from corral.serve.gateway.usage import KeyUse
from tests.unit.test_console_guard import Answer, ask, enter
from tests.until import until


@pytest.fixture(params=[False], ids=["console"])
def console(request: pytest.FixtureRequest, clean_home: Path) -> Iterator[Console]:
    with Console(ConsoleOptions(port=0, read_only=request.param)) as running:
        yield running


read_only = pytest.mark.parametrize("console", [True], indirect=True, ids=["read-only"])


def got(console: Console, path: str) -> Any:
    found = ask(console, path, cookie=enter(console))
    assert found.status == 200, found.body
    return json.loads(found.body)


def post(console: Console, path: str, **body: Any) -> Answer:
    return ask(console, path, "POST", json.dumps(body), cookie=enter(console), origin=console.url,
               content_type="application/json")  # fmt: skip


def test_a_key_is_made_and_its_secret_is_told_once(console: Console, clean_home: Path) -> None:
    assert not got(console, "/api/about")["keys"]
    shown = got(console, "/api/keys/line?name=alice&rpm=60&tpm=&models=llama%2C%20herd")
    assert shown["line"] == "corral gateway key add --rpm 60 --models llama,herd alice"
    made = post(console, "/api/keys/add", name="alice", rpm="60", tpm="", models="llama, herd")
    assert made.status == 201
    secret = json.loads(made.body)["key"]
    (kept,) = read_keys()
    assert (kept.name, kept.rpm, kept.tpm, kept.models) == ("alice", 60, None, ("llama", "herd"))
    assert kept.digest == digest_of(secret.encode()).hex()
    assert got(console, "/api/about")["keys"]
    for path in ("/api/keys", "/api/commands", "/api/about"):
        body = ask(console, path, cookie=enter(console)).body
        assert secret.encode() not in body
        assert kept.digest.encode() not in body
    assert not [path for path in clean_home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_limits_and_use_are_listed_by_name(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key("alice", 60, 1000, ("llama",))
    add_key("-bob")
    monkeypatch.setattr(view, "used_by_keys", lambda: {"alice": KeyUse(7, 1, 2, 300, 40), "fleet's own": KeyUse(9)})
    found = got(console, "/api/keys")
    alice, bob = found["keys"]
    assert alice.pop("created_s") > 0
    assert alice == {"name": "alice", "rpm": 60, "tpm": 1000, "models": ["llama"], "answered": 7, "failed": 1,
                     "limited": 2, "prompt_tokens": 300, "output_tokens": 40,
                     "remove": "corral gateway key remove alice"}  # fmt: skip
    assert (bob["answered"], bob["remove"]) == (0, "corral gateway key remove -- -bob")
    assert found["gateways"] == []


@pytest.mark.parametrize("name", ["alice", "-bob", "<b>eve</b> & co"])
def test_a_key_is_revoked_by_the_line_that_is_shown(console: Console, name: str) -> None:
    add_key(name)
    add_key("other")
    line = got(console, "/api/keys")["keys"][0]["remove"]
    begun = post(console, "/api/keys/remove", name=name)
    assert begun.status == 202, begun.body
    command = json.loads(begun.body)
    assert command["line"] == line
    until(lambda: got(console, f"/api/commands/{command['id']}")["exit_code"] == 0, "the end of the command")
    assert [one.name for one in read_keys()] == ["other"]
    assert post(console, "/api/keys/remove", name=name).status == 404


BAD = [{}, {"name": " "}, {"name": "a\nb"}, {"name": "x" * 65}, {"name": 5}, {"name": "a", "rpm": "0"},
       {"name": "a", "tpm": "-1"}, {"name": "a", "rpm": "many"}, {"name": "a", "rpm": 5},
       {"name": "a", "models": ["m"]}]  # fmt: skip


@pytest.mark.parametrize("fields", BAD, ids=repr)
def test_what_the_command_line_refuses_is_refused(console: Console, fields: dict[str, Any]) -> None:
    refused = post(console, "/api/keys/add", **fields)
    assert refused.status == 400
    assert refused.error["remedy"]
    assert read_keys() == ()


@read_only
def test_a_viewer_sees_no_client_and_makes_no_key(console: Console) -> None:
    add_key("alice")
    cookie = enter(console)
    for path in ("/api/keys", "/api/keys/line?name=x"):
        found = ask(console, path, cookie=cookie)
        assert found.status == 403
        assert b"alice" not in found.body
    assert not got(console, "/api/about")["keys"]
    for path in ("/api/keys/add", "/api/keys/remove"):
        assert post(console, path, name="alice").status == 403
    assert [one.name for one in read_keys()] == ["alice"]

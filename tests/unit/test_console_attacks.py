"""What a reader of `console --read-only`, and a page of another port, try; each was possible once."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from corral.console.server import Console, ConsoleOptions
from corral.deploy.deployment.state import State
from corral.serve.gateway.member import Member
from corral.serve.gateway.request import Request
from tests.console_home import make
from tests.unit.test_console_guard import SECRETS, ask, enter

SECRET = "5ec7e7c0ffee5ec7e7c0ffee"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Everything that was given to ssh, or looked up as a host's name."""
    calls = tmp_path / "calls"
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{calls}\nfor last; do :; done\n'
                   'echo "ssh: Could not resolve hostname $last" >&2\nexit 255\n')  # fmt: skip
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CORRAL_SSH", str(ssh))

    real = socket.getaddrinfo

    def look_up(name: str, *rest: Any, **more: Any) -> Any:
        if name != "127.0.0.1":
            with calls.open("a") as file:
                file.write(f"{name}\n")
        return real(name, *rest, **more)

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    return calls


@pytest.fixture
def viewed(clean_home: Path) -> Iterator[Console]:
    with Console(ConsoleOptions(port=0, read_only=True)) as console:
        yield console


def _plan(console: Console, cookie: str, **fields: str) -> tuple[int, str]:
    query = "&".join(f"{quote(name)}={quote(value)}" for name, value in fields.items())
    found = ask(console, f"/api/fleet/plan?{query}", cookie=cookie)
    return found.status, found.body.decode()


@pytest.mark.parametrize("lines", [f"{SECRET}\n", f"node00\n{SECRET}\n", f"-o{SECRET}\n"])
def test_a_viewer_reads_no_file_of_the_owner(viewed: Console, asked: Path, tmp_path: Path, lines: str) -> None:
    key = tmp_path / "key"
    key.write_text(lines)
    cookie = enter(viewed)
    for hosts in (f"@{key}", f" @{key}", f"node00,@{key}", "@/dev/stdin"):
        status, body = _plan(viewed, cookie, target="ssh", model="llama-3.1-8b", **{"--hosts": hosts})
        assert status == 400, body
        assert SECRET not in body
    assert not asked.exists()


def test_a_viewer_learns_of_no_file_through_the_form(viewed: Console, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    cookie = enter(viewed)
    for fields in ({"model": str(folder)}, {"flags": f"--chat-template {folder}/x"}, {"settings": f"draft={folder}"}):
        status, body = _plan(viewed, cookie, **{"model": "smollm2", **fields})
        assert status in (403, 404), body
        assert "--read-only" in body or "only shows" in body


def test_a_viewer_gets_no_key(viewed: Console) -> None:
    make("one").agent().course(("starting", 1), ("ready", 20)).serves("http://127.0.0.1:9/v1")
    cookie = enter(viewed)
    found = ask(viewed, "/api/fleet/access", "POST", '{"name": "one"}', cookie=cookie, origin=viewed.url,
                content_type="application/json")  # fmt: skip
    assert found.status == 403


def test_a_viewer_makes_the_owner_connect_nowhere(viewed: Console, asked: Path, clean_home: Path) -> None:
    profiles = clean_home / ".config" / "corral" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "box.toml").write_text(
        'target = "ssh"\n[link]\nname = "ray"\n[ssh]\nhosts = ["node00", "node01"]\n[hardware]\ngpus = "8xH100"\n'
    )
    cookie = enter(viewed)
    status, body = _plan(viewed, cookie, target="ssh", model="llama-3.1-8b", **{"--hosts": "evil.example"})
    assert status == 400
    assert "asks no node" in json.loads(body)["error"]["message"]
    status, body = _plan(viewed, cookie, on="box", model="llama-3.1-8b")
    assert status == 200, body  # what the profile says of the nodes is enough for a plan
    _plan(viewed, cookie, on="box", model="llama-3.1-8b", target="ssh", **{"--hosts": "evil.example"})
    assert not asked.exists()


def test_the_form_starts_nothing_with_a_file_of_hosts(asked: Path, tmp_path: Path, clean_home: Path) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    with Console(ConsoleOptions(port=0)) as console:
        body = json.dumps({"target": "ssh", "model": "smollm2", "options": {"--hosts": f"@{key}"}})
        found = ask(console, "/api/fleet/start", "POST", body, cookie=enter(console), origin=console.url,
                    content_type="application/json")  # fmt: skip
        assert found.status == 400
        assert "is not the name of a host" in str(found.error["message"])


def test_a_viewer_cannot_tell_which_folders_exist(
    clean_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with Console(ConsoleOptions(port=0, read_only=True)) as console:
        cookie = enter(console)
        for model in (f"{tmp_path}/%s", "%s/model", "./%s"):
            told = {str(_plan(console, cookie, model=model % name)).replace(name, "") for name in ("there", "gone")}
            assert len(told) == 1


def posted_paths(console: Console) -> set[str]:
    """Everything that a page posts to."""
    app: Any = console._app
    found = {route.path for route in app._app.routes if "POST" in route.methods}
    assert {"/api/fleet/start", "/api/models/pull", "/api/keys/add", "/api/keys/remove", "/api/play/ask"} <= found
    return found


def test_a_viewer_posts_to_nothing_that_changes_something(viewed: Console) -> None:
    cookie = enter(viewed)
    for path in posted_paths(viewed) - {"/api/play/texts"}:  # which only makes text
        found = ask(viewed, path, "POST", '{"name": "one"}', cookie=cookie, origin=viewed.url,
                    content_type="application/json")  # fmt: skip
        assert found.status == 403, path
        assert "--read-only" in str(found.error["message"])


def test_the_cookie_alone_starts_and_stops_nothing(clean_home: Path) -> None:
    """Browsers send a cookie of 127.0.0.1 to all its ports: also to a tunnel, and so to the node behind it."""
    make("one", words=("up", "smollm2")).agent().course(("starting", 1), ("ready", 20))
    with Console(ConsoleOptions(port=0)) as console:
        cookie, other = enter(console), enter(console)
        body = json.dumps({"name": "one"})
        for secret in ("", "guess", SECRETS[other], cookie.partition("=")[2]):
            for path in posted_paths(console):
                found = ask(console, path, "POST", body, cookie=cookie, origin=console.url, x_corral_secret=secret,
                            content_type="application/json")  # fmt: skip
                assert found.status == 403, path
                assert "link" in str(found.error["remedy"])
        assert json.loads(ask(console, "/api/commands", cookie=cookie).body) == {"commands": []}
        assert (
            ask(
                console, "/api/x", "POST", "{}", cookie=cookie, origin=console.url, content_type="application/json"
            ).status
            == 404
        )  # with the secret the guard lets it through


def test_the_cookie_alone_reads_nothing_but_the_pages_files(clean_home: Path) -> None:
    make("one", words=("up", "smollm2")).agent().course(("starting", 1), ("ready", 20))
    with Console(ConsoleOptions(port=0)) as console:
        cookie, other = enter(console), enter(console)
        app: Any = console._app
        paths = [route.path.format(name="one", id="0") for route in app._app.routes if route.path.startswith("/api/")]
        assert "/api/fleet/stream" in paths
        for path in (*paths, "/api/fleet/deployments/one", "/x", "/staticx", "//", ""):
            for secret in ("", "guess", SECRETS[other], cookie.partition("=")[2]):
                for method in ("GET", "HEAD"):
                    found = ask(console, path or "/api", method, cookie=cookie, x_corral_secret=secret)
                    assert found.status == 403, path
        for path in ("/", "/static/app.js"):
            assert ask(console, path, cookie=cookie, x_corral_secret="").status == 200
        assert ask(console, "/api/about", cookie=cookie).status == 200  # with the secret


def test_a_node_gets_no_cookie_of_a_browser() -> None:
    headers = [(b"cookie", b"corral_console_8765=x"), (b"accept", b"*/*")]
    request = Request(b"GET", b"/v1/models", headers, False, b"", True)
    sent = b"".join(request.message(Member("a", "http://node:1", State.READY), "m"))
    assert b"accept" in sent
    assert b"cookie" not in sent.lower()

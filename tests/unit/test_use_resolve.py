"""Which server is meant: names, addresses, the environment, the only one that is ready."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import AccessError, ConflictError, LaunchError, NotFoundError, UnreachableError, UsageError
from corral.base.record import to_json
from corral.client.endpoint import Endpoint, HeldKeyEndpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.serve import resolve as resolve_module
from corral.serve.fleet.chain import choose_folder
from corral.serve.resolve import DeploymentServer, ServedModels, find_servers, resolve, served_by
from tests.chains import write_chain


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def ready(name: str, state: State = State.READY) -> Any:
    endpoint = Endpoint(f"http://127.0.0.1:1/{name}", name) if state is State.READY else None
    return deployments.Status(
        name,
        state,
        None,
        "its text",
        "",
        "",
        None,
        None,
        name,
        "",
        "local",
        0.0,
        0.0,
        endpoint,
        deployments.Timings(),
    )


def test_an_address_finds_its_model(server: FakeServer) -> None:
    assert resolve(url=server.url, environ={}).model == "fake"
    assert resolve(url=server.url + "/v1", environ={}).model == "fake"
    assert resolve(environ={"OPENAI_BASE_URL": server.url}).model == "fake"
    with pytest.raises(NotFoundError) as caught:
        resolve(url=server.url, model="fak", environ={})
    assert "fake" in caught.value.remedy


def test_keys_from_files_environment_and_memory(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret-key\n")
    key_file.chmod(0o600)
    with FakeServer(FakeOptions(key_file=key_file)) as server:
        assert resolve(url=server.url, key_file=str(key_file), environ={}).model == "fake"
        assert resolve(url=server.url, key="secret-key", environ={}).model == "fake"
        environ = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "secret-key"}
        assert resolve(environ=environ).key() == "secret-key"
        with pytest.raises(AccessError):
            resolve(url=server.url, key="wrong", environ={})
        # a key for one server is not sent to another
        with pytest.raises(AccessError):
            resolve(url=server.url, environ={"OPENAI_API_KEY": "secret-key"})


def test_a_held_key_is_nowhere_to_be_seen() -> None:
    endpoint = HeldKeyEndpoint("http://127.0.0.1:1", "m", "secret-key")
    assert "secret" not in repr(endpoint)
    assert "secret" not in json.dumps(to_json(endpoint))
    with pytest.raises(UsageError):
        HeldKeyEndpoint("http://127.0.0.1:1", "m", "two words\r\nx-evil: 1")


def test_who_only_watches_a_server_need_not_choose_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    served = resolve_module.ServedModels(("one", "two"), ("one", "two"), None)
    monkeypatch.setattr(resolve_module, "_models_at", lambda endpoint: served)
    with pytest.raises(UsageError, match="serves 2 models"):
        resolve(url="http://127.0.0.1:9", environ={})
    assert resolve_module.server_at("http://127.0.0.1:9", None).model == "one"


def test_contradictions() -> None:
    for wrong in ({"name": "a", "url": "http://b"}, {"url": "http://b", "key": "k", "key_file": "f"}, {"key": "k"}):
        with pytest.raises(UsageError):
            resolve(environ={}, **wrong)


def test_nobody_there() -> None:
    with pytest.raises(UnreachableError):
        resolve(url="http://127.0.0.1:9", environ={})
    with pytest.raises(NotFoundError) as caught:
        resolve(environ={})
    assert "corral up" in caught.value.remedy
    with pytest.raises(NotFoundError):
        resolve("nobody", environ={})


class Deployments:
    """Deployments of this home, in the states that a test gives them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: dict[str, State] = {}
        self.tunnels: list[str] = []
        monkeypatch.setattr(deployments, "status", lambda folder: ready(folder.name, self.states[folder.name]))
        monkeypatch.setattr("corral.serve.resolve.ensure_tunnel", lambda folder: self.tunnels.append(folder.name))

    def set(self, **states: State) -> None:
        for name in [name.replace("_", "~") for name in states]:
            folder = DeploymentFolder.of(name)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.record.touch()
        self.states |= {name.replace("_", "~"): state for name, state in states.items()}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, clean_home: Path) -> Deployments:
    return Deployments(monkeypatch)


def test_the_only_ready_one(there: Deployments, monkeypatch: pytest.MonkeyPatch) -> None:
    there.set(a=State.READY, b=State.LOADING, c=State.FAILED)
    assert resolve(environ={}).model == "a"
    served = ServedModels(("a", "adapter"), ("a",), None)
    monkeypatch.setattr("corral.serve.resolve._models_at", lambda endpoint: served)
    assert resolve(model="adapter", environ={}).model == "adapter"
    with pytest.raises(NotFoundError, match="does not serve 'adaptor'"):  # as with --url: no request is sent for it
        resolve(model="adaptor", environ={})
    assert [server.name for server in find_servers([], [], None, environ={})] == ["a"]
    there.set(d=State.READY)
    for find in (resolve, lambda **given: find_servers([], [], None, **given)):
        with pytest.raises(UsageError, match="a, d"):
            find(environ={})
    there.set(a=State.STOPPED, d=State.STOPPED)
    with pytest.raises(NotFoundError, match=r"b \(loading\)"):
        resolve(environ={})
    assert [server.name for server in find_servers([], [], None, environ={})] == ["b"]  # waited for
    there.set(b=State.UNKNOWN)
    with pytest.raises(NotFoundError, match=r"b \(unknown\)"):
        find_servers([], [], None, environ={})


def test_a_deployment_that_is_not_ready(there: Deployments) -> None:
    there.set(b=State.LOADING)
    with pytest.raises(ConflictError, match="loading"):
        resolve("b", environ={})
    assert DeploymentServer("b").find() is None
    there.set(b=State.FAILED)
    with pytest.raises(LaunchError, match="has failed: its text"):
        resolve("b", environ={})
    there.set(b=State.STOPPED)
    with pytest.raises(NotFoundError, match="is stopped: its text"):
        resolve("b", environ={})
    there.set(b=State.READY)
    assert resolve("b", environ={}).model == "b"


def test_a_chain_is_one_deployment_and_its_newest_serves(there: Deployments) -> None:
    there.set(x=State.READY, x_2=State.QUEUED, x_3=State.QUEUED)
    write_chain("x", "x~2", "x~3")
    server = DeploymentServer("x")
    for states, serving in (
        ({}, "x"),
        ({"x_2": State.READY}, "x~2"),  # the hand-over: both are ready
        ({"x": State.STOPPED}, "x~2"),
        ({"x_2": State.STOPPED}, None),
        ({"x_3": State.READY}, "x~3"),
    ):
        there.set(**states)
        there.tunnels.clear()
        found = server.find()
        assert (found.model if found else None) == serving
        assert there.tunnels == ([serving] if serving else [])
        assert [one.name for one in find_servers([], [], None, environ={})] == ["x"]
        if serving:
            assert resolve(environ={}).model == resolve("x", environ={}).model == serving
            assert there.tunnels == [serving] * 3
    assert choose_folder(None).name == "x"


def test_a_name_like_a_successors_is_a_deployment_of_its_own(there: Deployments) -> None:
    there.set(y_2=State.READY)
    assert resolve(environ={}).model == "y~2"
    assert choose_folder(None).name == "y~2"


def test_a_key_of_the_environment_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, key_file = tmp_path / "tmp", tmp_path / "key"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    key_file.write_text("secret-key\n")
    key_file.chmod(0o600)
    with FakeServer(FakeOptions(key_file=key_file)) as server:
        environ = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "secret-key"}
        [found] = find_servers([], [], None, environ=environ)
        endpoint = found.find()
        assert endpoint is not None
        assert (endpoint.key(), endpoint.key_file) == ("secret-key", None)
        assert served_by(found) == ServedModels(("fake",), ("fake",), 8192)
    assert served_by(found) is None
    assert not list(temporary.iterdir())
    with pytest.raises(UsageError, match="without an address"):
        find_servers([], [], str(key_file), environ={})


def test_servers_of_several_models(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.client.client import Client
    from corral.client.pool import Page

    cards: list[dict[str, Any]] = [{"id": "base", "parent": None}, {"id": "adapter", "parent": "base"}]
    monkeypatch.setattr(Client, "page_sync", lambda *_, **__: Page(200, json.dumps({"data": cards}).encode()))
    assert resolve(url=server.url, environ={}).model == "base"
    assert resolve(url=server.url, model="adapter", environ={}).model == "adapter"
    cards.append({"id": "other"})
    with pytest.raises(UsageError, match="base, adapter, other"):
        resolve(url=server.url, environ={})
    cards.clear()
    with pytest.raises(NotFoundError):
        resolve(url=server.url, environ={})

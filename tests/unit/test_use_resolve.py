"""Which server is meant: names, addresses, the environment, the only one that is ready."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.client.endpoint import Endpoint
from corral.deployment.folder import DeploymentFolder
from corral.deployment.state import State
from corral.errors import AccessError, ConflictError, NotFoundError, UnreachableError, UsageError
from corral.fake import FakeOptions, FakeServer
from corral.lifecycle import deployments
from corral.lifecycle.resolve import HeldKeyEndpoint, resolve
from corral.record import to_json


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


def test_the_only_ready_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [ready("a"), ready("b", State.LOADING), ready("c", State.FAILED)]
    monkeypatch.setattr(deployments, "statuses", lambda: found)
    assert resolve(environ={}).model == "a"
    assert resolve(model="adapter", environ={}).model == "adapter"
    found.append(ready("d"))
    with pytest.raises(UsageError, match="a, d"):
        resolve(environ={})
    found[:] = [ready("b", State.LOADING)]
    with pytest.raises(NotFoundError, match=r"b \(loading\)"):
        resolve(environ={})


def test_a_deployment_that_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.lifecycle.resolve.open_folder", DeploymentFolder.of)
    monkeypatch.setattr(deployments, "status", lambda _: ready("b", State.LOADING))
    with pytest.raises(ConflictError, match="loading"):
        resolve("b", environ={})
    monkeypatch.setattr(deployments, "status", lambda _: ready("b", State.FAILED))
    with pytest.raises(NotFoundError, match="its text"):
        resolve("b", environ={})
    monkeypatch.setattr(deployments, "status", lambda _: replace(ready("b"), endpoint=Endpoint("http://x", "b")))
    assert resolve("b", environ={}).model == "b"


def test_servers_of_several_models(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.client.client import Client, Page

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

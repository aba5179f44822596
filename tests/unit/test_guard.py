"""The guard alone, driven as an ASGI server drives it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from corral.node import guard
from tests.adapters import make_adapter

KEY = "k" * 43


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> guard.Guard:
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("CORRAL_KEY_FILE", str(tmp_path / "key"))
    return guard.Guard(app)


def call(
    door: guard.Guard, path: str, key: str | None = None, method: str = "GET", header: str = ""
) -> tuple[int, bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"x")]
    if header:
        headers.append((header.encode(), (key or "").encode()))
    elif key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {"type": "http", "path": path, "method": method, "headers": headers}
    asyncio.run(door(scope, None, send))
    return sent[0]["status"], sent[1]["body"]


INFERENCE = [
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/metrics",
    "/version",
    "/v1/responses/x",
]
ADMINISTRATIVE = [
    "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/pause", "/resume", "/invocations", "/server_info",
    "/reset_prefix_cache", "/update_weights", "/start_profile", "/abort_requests", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/v1/load_lora_adapter/", "/scale_elastic_ep", "/docs", "/openapi.json", "/", "",
    "/some_path_of_a_later_engine", "/v1/../sleep", "//sleep", "/v1//../sleep", "/v1/./x", "/V1/models",
]  # fmt: skip


@pytest.mark.parametrize("path", INFERENCE)
def test_inference_needs_the_key(guarded: guard.Guard, path: str) -> None:
    assert call(guarded, path)[0] == 401
    assert call(guarded, path, "wrong")[0] == 401
    assert call(guarded, path, KEY[:-1])[0] == 401
    assert call(guarded, path, "")[0] == 401
    assert call(guarded, path, KEY) == (200, b"inside")


@pytest.mark.parametrize("path", ADMINISTRATIVE)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_administration_is_closed_to_everybody(guarded: guard.Guard, path: str, method: str) -> None:
    assert call(guarded, path, None, method)[0] == 401
    assert call(guarded, path, KEY, method)[0] == 403


def test_health_is_open_to_readers_only(guarded: guard.Guard) -> None:
    assert call(guarded, "/health")[0] == 200
    assert call(guarded, "/health", method="POST")[0] == 401
    assert call(guarded, "/health/x")[0] == 401


def test_other_ways_to_send_a_key(guarded: guard.Guard) -> None:
    assert call(guarded, "/v1/messages", KEY, "POST", "x-api-key")[0] == 200
    assert call(guarded, "/v1/messages", "no", "POST", "x-api-key")[0] == 401
    assert call(guarded, "/v1/models", f"bearer {KEY}", header="authorization")[0] == 200
    assert call(guarded, "/v1/models", f"Basic {KEY}", header="authorization")[0] == 401


def test_refusals_read_like_the_api_and_name_no_key(guarded: guard.Guard) -> None:
    status, body = call(guarded, "/v1/models")
    error = json.loads(body)["error"]
    assert status == error["code"] == 401
    assert error["type"] == "authentication_error"
    assert KEY.encode() not in body


def test_websockets_are_guarded_too(guarded: guard.Guard) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(guarded({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_lifespan_passes(guarded: guard.Guard) -> None:
    seen: list[str] = []

    async def inner(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    guarded.app = inner
    asyncio.run(guarded({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


@pytest.mark.parametrize("content", [None, "", "short"])
def test_no_key_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    monkeypatch.delenv("CORRAL_KEY_FILE", raising=False)
    if content is not None:
        (tmp_path / "key").write_text(content)
        monkeypatch.setenv("CORRAL_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(RuntimeError, match="corral guard"):
        guard.Guard(app)


def test_a_server_that_drains_takes_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(KEY)
    monkeypatch.setenv("CORRAL_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("CORRAL_DRAIN_FILE", str(tmp_path / "drain"))
    door = guard.Guard(app)
    assert call(door, "/v1/completions", KEY, "POST")[0] == 200
    (tmp_path / "drain").write_text("90")
    door._checked = float("-inf")  # half a second later
    status, body = call(door, "/v1/completions", KEY, "POST")
    assert status == 503
    assert json.loads(body)["error"]["type"] == "service_unavailable_error"
    assert call(door, "/v1/completions", "wrong", "POST")[0] == 401
    assert call(door, "/metrics", KEY)[0] == 200  # the agent counts what still runs
    assert call(door, "/health")[0] == 200


ORIGIN = "https://chat.example.org"


def preflight(door: guard.Guard, origin: str, path: str = "/v1/chat/completions") -> int:
    return exchanged(door, path, "OPTIONS", {"origin": origin, "access-control-request-method": "POST"})[0]


def exchanged(
    door: guard.Guard, path: str, method: str, headers: dict[str, str], app_of: Any = None
) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(door({"type": "http", "path": path, "method": method, "headers": pairs, "app": app_of}, None, send))
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def test_a_page_of_an_allowed_origin_may_ask_and_can_read_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("CORRAL_KEY_FILE", str(tmp_path / "key"))
    assert preflight(guard.Guard(app), ORIGIN) == 401  # closed by default
    monkeypatch.setenv("CORRAL_ALLOWED_ORIGINS", json.dumps([ORIGIN]))
    door = guard.Guard(app)
    assert preflight(door, ORIGIN) == 200
    assert preflight(door, "https://evil.example.org") == 401
    assert preflight(door, ORIGIN, "/sleep") == 401  # administration answers nobody
    assert exchanged(door, "/v1/models", "OPTIONS", {"origin": ORIGIN})[0] == 401  # no preflight
    status, headers, _ = exchanged(door, "/v1/models", "GET", {"origin": ORIGIN})
    assert (status, headers[b"access-control-allow-origin"]) == (401, ORIGIN.encode())
    status, headers, _ = exchanged(door, "/v1/models", "GET", {"origin": "https://evil.example.org"})
    assert (status, b"access-control-allow-origin" in headers) == (401, False)


class Route:
    def __init__(self, path: str) -> None:
        self.path = path


class Application:
    routes = tuple(map(Route, ("/v1/models", "/v1/chat/completions", "/v1/responses/{id}", "/sleep")))


LACKING = {
    "message": "this model's server has no path /v1/embeddings; it has: /v1/chat/completions, /v1/models",
    "type": "not_found_error",
    "param": None,
    "code": 404,
}


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b'{"error":{"message":"no model x"}}'])
def test_an_unknown_path_is_an_error_that_openais_sdk_can_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    async def missing(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(len(body)).encode()), (b"x-request-id", b"r1")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("CORRAL_KEY_FILE", str(tmp_path / "key"))
    status, headers, answer = exchanged(
        guard.Guard(missing), "/v1/embeddings", "POST", {"authorization": f"Bearer {KEY}"}, Application()
    )
    assert (status, headers[b"x-request-id"]) == (404, b"r1")
    assert int(headers[b"content-length"]) == len(answer)
    assert json.loads(answer)["error"] == (json.loads(body).get("error") or LACKING)  # vLLM's own words stay


def test_one_model_is_an_entry_of_the_list(guarded: guard.Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def models(scope: dict[str, Any], receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        body = json.dumps({"data": [{"id": "org/one"}, {"id": "two"}]}).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body[:9], "more_body": True})
        await send({"type": "http.response.body", "body": body[9:]})

    monkeypatch.setattr(guarded, "app", models)
    status, body = call(guarded, "/v1/models/org/one", KEY)
    assert (status, json.loads(body)) == (200, {"id": "org/one"})
    status, body = call(guarded, "/v1/models/three", KEY)
    assert status == 404
    assert json.loads(body)["error"]["message"] == "this server has no model 'three'"
    assert call(guarded, "/v1/models/two")[0] == 401
    assert asked == ["/v1/models"] * 2


# Adapters


class Loaded:
    """vLLM's models with its directory resolver, as far as the guard uses them."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.lora_resolvers: list[Any] = ["another"]


class FilesystemResolver:
    def __init__(self, lora_cache_dir: str) -> None:
        self.folder = lora_cache_dir

    async def _get_lora_req_from_path(self, name: str, path: str, base: str) -> tuple[str, str, str]:
        return name, path, base


@pytest.fixture
def adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[guard.Guard, Loaded]:
    """A guard with the adapters `one` and `two`, as it is once the server has begun."""
    for name in ("one", "two"):
        make_adapter(tmp_path / "adapters" / name, base_model_name_or_path="org/base")
    (tmp_path / "adapters" / "pickled").mkdir()
    (tmp_path / "adapters" / "pickled" / "adapter_config.json").write_text("{}")
    (tmp_path / "adapters" / "pickled" / "adapter_model.bin").write_bytes(b"x")
    make_adapter(tmp_path / "outside")
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("CORRAL_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("CORRAL_ADAPTERS", str(tmp_path / "adapters"))
    module = types.ModuleType("vllm.plugins.lora_resolvers.filesystem_resolver")
    module.FilesystemResolver = FilesystemResolver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    models = Loaded()

    async def inner(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        card = {"id": "base", "object": "model", "parent": None, "max_model_len": 8, "root": "/m"}
        loaded = [{**card, "id": name, "parent": "base", "root": "/a"} for name in models.lora_requests]
        body = json.dumps({"object": "list", "data": [card, *loaded]}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    door = guard.Guard(inner)
    owner = types.SimpleNamespace(state=types.SimpleNamespace(openai_serving_models=models))

    async def send(_: dict[str, Any]) -> None:
        raise AssertionError

    asyncio.run(door({"type": "lifespan", "app": owner}, None, send))
    return door, models


def resolved(models: Loaded, name: str) -> Any:
    """What vLLM gets for a name that a request has, and keeps."""
    (resolver,) = models.lora_resolvers
    found = asyncio.run(resolver.resolve_lora("/path/of/the/model", name))
    if found is not None:
        models.lora_requests[name] = found
    return found


def listed(door: guard.Guard) -> dict[str, str | None]:
    return {card["id"]: card["parent"] for card in json.loads(call(door, "/v1/models", KEY)[1])["data"]}


def test_every_adapter_is_listed_before_anybody_used_it(adapted: tuple[guard.Guard, Loaded]) -> None:
    door, models = adapted
    assert listed(door) == {"base": None, "one": "base", "two": "base"}
    resolved(models, "one")
    assert listed(door) == {"base": None, "one": "base", "two": "base"}
    assert json.loads(call(door, "/v1/models/two", KEY)[1])["parent"] == "base"
    assert call(door, "/v1/models/three", KEY)[0] == 404
    assert call(door, "/v1/models")[0] == 401


def test_a_name_reaches_nothing_but_the_folder(adapted: tuple[guard.Guard, Loaded], tmp_path: Path) -> None:
    _, models = adapted
    folder = tmp_path / "adapters"
    assert resolved(models, "one") == ("one", str(folder / "one"), "org/base")  # its own base: it was compared before
    for name in (
        "../outside",
        str(tmp_path / "outside"),
        "one/../../outside",
        ".",
        "..",
        "",
        "one\n",
        "pickled",
        "new",
    ):
        assert resolved(models, name) is None, name


def test_what_was_removed_or_replaced_is_forgotten(adapted: tuple[guard.Guard, Loaded], tmp_path: Path) -> None:
    door, models = adapted
    first, other = resolved(models, "one"), resolved(models, "two")
    shutil.rmtree(tmp_path / "adapters" / "one")
    assert listed(door) == {"base": None, "two": "base"}
    assert set(models.lora_requests) == {"two"}
    make_adapter(tmp_path / "adapters" / "one", seed=7, rank=8)
    again = resolved(models, "one")
    assert again[1] != first[1]  # vLLM keeps what it has computed by name and path
    assert Path(again[1]).resolve() == Path(first[1]).resolve()
    make_adapter(tmp_path / "adapters" / "two", seed=8, rank=8)
    listed(door)
    assert set(models.lora_requests) == {"one"}
    assert resolved(models, "two")[1] != other[1]


@pytest.mark.parametrize(
    "path", ["load_lora_adapter", "unload_lora_adapter", "load_lora_adapter/", "x//load_lora_adapter"]
)
def test_with_adapters_vllms_own_paths_stay_closed(adapted: tuple[guard.Guard, Loaded], path: str) -> None:
    assert call(adapted[0], f"/v1/{path}", KEY, "POST")[0] == 403
    assert call(adapted[0], f"/v1/{path}", None, "POST")[0] == 401


def imported(tmp_path: Path, folder: Path | None) -> subprocess.CompletedProcess[str]:
    """The guard in a process of its own, beside a vLLM that has nothing but its resolver."""
    module = tmp_path / "vllm" / "plugins" / "lora_resolvers" / "filesystem_resolver.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.touch()
    script = "import os; import guard; print(os.environ.get('VLLM_ALLOW_RUNTIME_LORA_UPDATING'))"
    env = {**os.environ, "PYTHONPATH": f"{Path(guard.__file__).parent}:{tmp_path}"}
    env.pop("VLLM_ALLOW_RUNTIME_LORA_UPDATING", None)
    env |= {"CORRAL_ADAPTERS": str(folder)} if folder else {}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)


def test_vllms_switch_is_set_where_there_are_adapters_only(tmp_path: Path) -> None:
    assert imported(tmp_path, tmp_path).stdout == "1\n"
    assert imported(tmp_path, None).stdout == "None\n"


def test_a_server_does_not_start_without_its_folder(tmp_path: Path) -> None:
    done = imported(tmp_path, tmp_path / "nowhere")
    assert done.returncode
    assert f"there is no folder of adapters {tmp_path}/nowhere here" in done.stderr

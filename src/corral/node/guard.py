"""The guard of a deployment: one ASGI middleware loaded into vLLM's own API server.

`vllm serve --middleware corral_guard.Guard`: every path except `/health` needs the deployment's key. vLLM's own
`--api-key` protects only some prefixes (`/invocations` gives full inference without it), and its administrative paths
(sleep, pause, weight updates, RPC into the workers) are open to whoever has the key. Here the *open* paths are
listed; every other one answers 403, also paths that a later engine adds.

While the file named by `CORRAL_DRAIN_FILE` exists, new requests are answered 503 and running ones finish. Where
`CORRAL_ROW_SOCKETS` names a folder, `corral_row_socket` opens a Unix socket there for batches on the same machine.

A browser asks before it sends a key: preflights of pages named by `CORRAL_ALLOWED_ORIGINS` are passed on to vLLM's
own CORS layer, and refusals carry the header without which a page cannot read them. An unknown path is answered in
OpenAI's shape. `CORRAL_STORE_RESPONSES` lets `/v1/responses` be continued: it is switched on in this process only,
because vLLM compiles a model anew for engines that have another environment.

`CORRAL_ADAPTERS` names a folder of LoRA adapters. vLLM's own directory resolver loads one of them when a request
first names it, after a check of that name: a path would reach other folders. The list of models has all of them. What
is no longer in the folder, or was replaced, is forgotten whenever the list is asked for. vLLM's switch for this opens
two paths, which stay closed, and is likewise set in this process only.

The key is read once from the file named by `CORRAL_KEY_FILE`; it is in no argument, log or environment variable.
Standard library only, nothing of corral: the file is copied to where the engine runs.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import os
import re
import sys
import time
from typing import Any, Awaitable, Callable, Dict, List, Tuple

Scope = Dict[str, Any]
Send = Callable[[Dict[str, Any]], Awaitable[None]]

OPEN_WITHOUT_KEY = frozenset({"/health"})
OPEN_WITH_KEY = frozenset(
    {
        "/metrics",
        "/version",
        "/load",
        "/ping",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/score",
        "/rerank",
        "/v2/rerank",
        "/pooling",
        "/classify",
    }
)
OPEN_PREFIX = "/v1/"
ONE_MODEL = "/v1/models/"  # OpenAI has this path for each model; vLLM has only the list
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}\Z")  # of an adapter; as in engines/adapters.py
RESOLVER = "vllm.plugins.lora_resolvers.filesystem_resolver"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NOT_FOUND = b'{"detail":"Not Found"}'  # as FastAPI answers
if os.environ.get("CORRAL_STORE_RESPONSES"):  # on import: before vLLM reads it, after the engine's process started
    os.environ["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"

if os.environ.get("CORRAL_ADAPTERS"):  # a server without its adapters, or that cannot find them, does not start
    if not os.path.isdir(os.environ["CORRAL_ADAPTERS"]):
        raise RuntimeError("corral guard: there is no folder of adapters %s here" % os.environ["CORRAL_ADAPTERS"])
    importlib.import_module(RESOLVER)
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"

CLOSED_UNDER_PREFIX = frozenset({"load_lora_adapter", "unload_lora_adapter"})


def load_digest(environ: Dict[str, str]) -> bytes:
    """The digest of the key; raises without a usable one, so that no server starts unguarded."""
    path = environ.get("CORRAL_KEY_FILE", "")
    if not path:
        raise RuntimeError("corral guard: CORRAL_KEY_FILE is not set; the server must not run without a key")
    with open(path, "rb") as file:
        key = file.read().strip()
    if len(key) < 16:
        raise RuntimeError("corral guard: the key file holds no usable key")
    return hashlib.sha256(key).digest()


def is_open(path: str) -> bool:
    """Whether a path is for inference or monitoring, not for administration."""
    if "//" in path or "/." in path or "\\" in path:
        return False
    if path in OPEN_WITH_KEY or path in OPEN_WITHOUT_KEY:
        return True
    return path.startswith(OPEN_PREFIX) and path[len(OPEN_PREFIX) :].strip("/") not in CLOSED_UNDER_PREFIX


def offered_key(headers: List[Tuple[bytes, bytes]]) -> bytes:
    """The key in a request: a bearer token, or `x-api-key` as Anthropic's SDK sends it."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:].strip())
        if name == b"x-api-key":
            return bytes(value.strip())
    return b""


class Guard:
    """Passes a request on when its path is open and its key is right."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._digest = load_digest(dict(os.environ))
        self._drain_file = os.environ.get("CORRAL_DRAIN_FILE", "")
        self._origins = frozenset(json.loads(os.environ.get("CORRAL_ALLOWED_ORIGINS", "[]")))
        self._checked, self._draining = float("-inf"), False
        self._rows: Any = None
        folder = os.environ.get("CORRAL_ADAPTERS", "")
        self._adapters = Adapters(folder) if folder else None

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            if self._adapters is not None:
                self._adapters.serve(scope.get("app"))
            await self._open_row_socket(scope.get("app"))
            try:
                await self.app(scope, receive, send)
            finally:
                if self._rows is not None:
                    await self._rows.close()
            return
        if scope["type"] not in ("http", "websocket"):
            return  # a kind of request that cannot be checked
        refusal = self._refusal(scope)
        is_list = self._adapters is not None and scope["path"] == ONE_MODEL[:-1]
        if refusal is None and scope["type"] == "http" and (is_list or scope["path"].startswith(ONE_MODEL)):
            if self._adapters is not None:
                self._adapters.forget()
            path = ONE_MODEL[:-1]
            await self.app(
                dict(scope, path=path, raw_path=path.encode()), receive, Models(scope, send, self._adapters)
            )
        elif refusal is None:
            await self.app(scope, receive, NotFound(scope, send) if scope["type"] == "http" else send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, refusal[0], refusal[1], self._for_browsers(scope))

    async def _open_row_socket(self, owner: Any) -> None:
        """Let batches on this machine send rows to this process; without it, they use HTTP."""
        folder = os.environ.get("CORRAL_ROW_SOCKETS", "")
        if not folder:
            return
        try:
            self._rows = importlib.import_module("corral_row_socket").RowSocket(self.app, owner, self._row_refusal)
            await self._rows.listen(folder)
        except Exception as error:
            sys.stdout.write("corral guard: there is no socket for rows in %s: %s\n" % (folder, error))

    def _refusal(self, scope: Scope) -> Any:
        path = scope["path"]
        if path in OPEN_WITHOUT_KEY and scope.get("method") in ("GET", "HEAD"):
            return None
        preflight = any(name == b"access-control-request-method" for name, _ in scope["headers"])
        if preflight and scope.get("method") == "OPTIONS" and is_open(path) and self._for_browsers(scope):
            return None  # vLLM's CORS layer answers it; nothing behind that layer sees it
        offered = hashlib.sha256(offered_key(scope["headers"])).digest()
        if not hmac.compare_digest(offered, self._digest):
            return 401, "this endpoint needs its owner's key: send 'Authorization: Bearer KEY'"
        return self._refusal_to_owner(path, scope.get("method"))

    def _refusal_to_owner(self, path: str, method: Any) -> Any:
        if not is_open(path):
            return 403, "this path is closed on endpoints that Corral serves"
        if method not in ("GET", "HEAD") and self._is_draining():
            return 503, "this server is about to end: it finishes what runs and accepts nothing new"
        return None

    def _for_browsers(self, scope: Scope) -> List[Tuple[bytes, bytes]]:
        """The headers that let a page of an allowed origin read an answer."""
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        if len(origins) != 1 or not self._origins & {"*", origins[0].decode("latin-1")}:
            return []
        return [(b"access-control-allow-origin", origins[0]), (b"vary", b"Origin")]

    def _row_refusal(self, path: str) -> Any:
        refusal = self._refusal_to_owner(path, "POST")
        return refusal and (refusal[0], _error_body(*refusal))

    def _is_draining(self) -> bool:
        """Whether the server drains; checked twice a second at most, as the file may be on a shared file system."""
        if self._drain_file and not self._draining and time.monotonic() - self._checked > 0.5:
            self._checked, self._draining = time.monotonic(), os.path.exists(self._drain_file)
        return self._draining


class NotFound:
    """Sends an answer on; FastAPI's bare `Not Found` becomes an error that OpenAI's SDKs can show."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._start: Any = None

    async def __call__(self, message: Dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] == 404:
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        start, self._start = self._start, None
        if message.get("body") == NOT_FOUND and not message.get("more_body"):
            body = _error_body(404, self._sentence())
            start, message = _resized(start, body), dict(message, body=body)
        await self._send(start)
        await self._send(message)

    def _sentence(self) -> str:
        routes = getattr(self._scope.get("app"), "routes", [])
        paths = sorted({route.path for route in routes if str(getattr(route, "path", "")).startswith(OPEN_PREFIX)})
        offered = ", ".join(path for path in paths if "{" not in path and is_open(path))
        return "this model's server has no path %s; it has: %s" % (self._scope["path"], offered or "/v1/models")


class Adapters:
    """The folder of LoRA adapters, and what vLLM holds of it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._loaded = {}  # type: Dict[str, Any]  # vLLM's own
        self._stamps = {}  # type: Dict[str, Any]  # of the files that were loaded
        self._times = {}  # type: Dict[str, int]  # that each was resolved

    def serve(self, app: Any) -> None:
        """Let vLLM's directory resolver find the adapters."""
        models = app.state.openai_serving_models
        self._loaded = models.lora_requests
        module = importlib.import_module(RESOLVER)
        self._resolve = module.FilesystemResolver(self.folder)._get_lora_req_from_path
        models.lora_resolvers[:] = [self]

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """vLLM's resolver, for a plain name; the base was compared before the start, and is a path here.

        vLLM keeps what it has computed by an adapter's name and path: a replaced one gets another path.
        """
        stamp = self._stamp(lora_name)
        if stamp is None:
            return None
        path = os.path.join(self.folder, lora_name)
        with open(os.path.join(path, "adapter_config.json")) as file:
            base = json.load(file).get("base_model_name_or_path")
        again = self._times.get(lora_name, 0)
        self._times[lora_name], self._stamps[lora_name] = again + 1, stamp
        return await self._resolve(lora_name, path + "/." * again, base)

    def names(self) -> List[str]:
        """The adapters of the folder; none while it cannot be read."""
        try:
            return sorted(name for name in os.listdir(self.folder) if self._stamp(name) is not None)
        except OSError:
            return []

    def forget(self) -> None:
        """Let go of adapters that were removed or replaced."""
        for name in list(self._loaded):
            if name in self._stamps and self._stamp(name) != self._stamps[name]:
                del self._loaded[name]

    def _stamp(self, name: str) -> Any:
        """Which files an adapter is; None where there is none."""
        if not PLAIN_NAME.match(name):
            return None
        try:
            found = [os.stat(os.path.join(self.folder, name, file)) for file in ADAPTER_FILES]
        except OSError:
            return None
        return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in found]


class Models:
    """Sends vLLM's list of models with every adapter, or one model's entry of it, or that there is none."""

    def __init__(self, scope: Scope, send: Send, adapters: Any) -> None:
        self._name, self._send, self._adapters = scope["path"][len(ONE_MODEL) :], send, adapters
        self._start: Any = None
        self._body = b""

    async def __call__(self, message: Dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        status, body = self._start["status"], self._body
        if status == 200 and body:
            page = json.loads(body)
            page["data"] += self._not_loaded(page["data"])
            found = [card for card in page["data"] if card["id"] == self._name] if self._name else [page]
            status = 200 if found else 404
            body = (
                json.dumps(found[0]).encode()
                if found
                else _error_body(404, "this server has no model %r" % self._name)
            )
        await self._send(_resized(dict(self._start, status=status), body))
        await self._send({"type": "http.response.body", "body": body})

    def _not_loaded(self, cards: List[Any]) -> List[Any]:
        """Entries of adapters that no request has named yet."""
        names = self._adapters.names() if self._adapters is not None else []
        base, listed = cards[0] if cards else {}, {card["id"] for card in cards}
        shared = {name: value for name, value in base.items() if name != "max_model_len"}
        return [dict(shared, id=name, parent=base.get("id")) for name in names if name not in listed]


def _resized(start: Dict[str, Any], body: bytes) -> Dict[str, Any]:
    """The start of an answer that has another body now."""
    kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    return dict(start, headers=[*kept, (b"content-length", str(len(body)).encode())])


def _error_body(status: int, message: str) -> bytes:
    kinds = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
    kind = kinds.get(status, "permission_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


async def _answer(send: Send, status: int, message: str, more: List[Tuple[bytes, bytes]]) -> None:
    body = _error_body(status, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 503:  # the second is for `corral proxy`: ask another server, this one is about to end
        headers += [(b"retry-after", b"10"), (b"x-corral-state", b"draining")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

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

The key is read once from the file named by `CORRAL_KEY_FILE`; it is in no argument, log or environment variable.
Standard library only, nothing of corral: the file is copied to where the engine runs.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import os
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
NOT_FOUND = b'{"detail":"Not Found"}'  # as FastAPI answers
if os.environ.get("CORRAL_STORE_RESPONSES"):  # on import: before vLLM reads it, after the engine's process started
    os.environ["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"

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

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
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
        if refusal is None and scope["type"] == "http" and scope["path"].startswith(ONE_MODEL):
            await self.app(
                dict(scope, path=ONE_MODEL[:-1], raw_path=ONE_MODEL[:-1].encode()), receive, OneModel(scope, send)
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


class OneModel:
    """Sends one model's entry of vLLM's list, or that there is none."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._name, self._send = scope["path"][len(ONE_MODEL) :], send
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
            found = [json.dumps(card).encode() for card in json.loads(body)["data"] if card["id"] == self._name]
            status = 200 if found else 404
            body = found[0] if found else _error_body(404, "this server has no model %r" % self._name)
        await self._send(_resized(dict(self._start, status=status), body))
        await self._send({"type": "http.response.body", "body": body})


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

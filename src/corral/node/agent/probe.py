"""The engine's HTTP server, probed from its own node: whether it is ready, guarded and the engine's, and still works.

A line of counters is kept every few minutes, so that the load of the last hours can be looked up.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
import threading
import time
from typing import Any, Callable, Dict, NamedTuple, Optional, Set, Tuple

from ..exposition import live_figures, load_figures
from ..processes import descendants
from ..sockets import listener_users, listeners, peer_users, sockets_of
from ..states import Reason
from .container import Container

Json = Dict[str, Any]
HEALTH_EVERY_S = 5.0
COMPLETION_EVERY_S = 60.0
EVERY_S = 300.0
MOST_BYTES = 4 << 20  # some weeks; then the older half is dropped


# one request of each task; the answer to it is what makes a server ready
REQUESTS: Dict[str, Tuple[str, Json]] = {
    "generate": ("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0}),
    "embed": ("/v1/embeddings", {"input": "Hello"}),
    "classify": ("/classify", {"input": "Hello"}),
    "rerank": ("/rerank", {"query": "Hello", "documents": ["Hello"]}),
}
_BOUNDARY = "corral-probe"


def silence(seconds: float = 1.0) -> bytes:
    """A WAV file without a sound: what a model that transcribes is asked with."""
    data = bytes(int(seconds * 16000) * 2)
    form = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    return b"RIFF%bWAVEfmt %bdata%b%b" % (
        struct.pack("<I", 36 + len(data)), form, struct.pack("<I", len(data)), data
    )  # fmt: skip


def _upload(model: str) -> bytes:
    """The body of a form with that file."""
    head = '--%s\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n' % (_BOUNDARY, model)
    head += '--%s\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n' % _BOUNDARY
    head += "Content-Type: audio/wav\r\n\r\n"
    return head.encode() + silence() + ("\r\n--%s--\r\n" % _BOUNDARY).encode()


class LoadLog:
    """Appends counters to one file; on a full disk, lines are lost and nothing else."""

    def __init__(self, path: str) -> None:
        self._path, self._noted = path, float("-inf")

    def note(self, page: bytes, own: int) -> None:
        """Append the counters of a metrics page, unless the last line is recent; `own` of the requests are the
        agent's.
        """
        now = time.monotonic()
        if not self._path or now - self._noted < EVERY_S:
            return
        self._noted = now
        line = dict(load_figures(page), t=round(time.time(), 1), own=own)
        with contextlib.suppress(OSError):
            self._cut()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write((json.dumps(line) + "\n").encode())

    def _cut(self) -> None:
        """Keep the newer half of a file that has grown too long."""
        if not os.path.exists(self._path) or os.path.getsize(self._path) < MOST_BYTES:
            return
        with open(self._path, "rb") as file:
            file.seek(-(MOST_BYTES // 2), os.SEEK_END)
            kept = file.read().partition(b"\n")[2]
        with open(self._path, "wb") as file:
            file.write(kept)


class Server:
    """The engine's HTTP server."""

    def __init__(self, serve: Json) -> None:
        everywhere = serve["host"] in ("0.0.0.0", "::", "")  # noqa: S104
        self.host = "127.0.0.1" if everywhere else serve["host"]
        self.port, self.model, self.key_file = serve["port"], serve["model"], serve["key_file"]
        self.task = serve.get("task", "generate")
        self.page = b""  # the metrics, as last read
        self.requests = 0  # completions that the agent itself asked for
        self.users: Optional[Set[int]] = None  # who may own the server's socket, once it is known to be the engine's

    def call(
        self, method: str, path: str, body: Any = None, key: bool = True, timeout_s: float = 10
    ) -> Tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            kind = "multipart/form-data; boundary=" + _BOUNDARY if isinstance(body, bytes) else "application/json"
            headers = {"Content-Type": kind}
            connection.connect()
            if key:
                if self.users is not None and peer_users(connection.sock) - self.users:
                    raise OSError("another user took port %d" % self.port)
                with open(self.key_file) as file:
                    headers["Authorization"] = "Bearer " + file.read().strip()
            data = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def accepts(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), 1).close()
        except OSError:
            return False
        return True

    def ask(self, timeout_s: float) -> Tuple[int, str]:
        """One small request of the model's task."""
        self.requests += 1
        if self.task == "transcribe":
            return self.call("POST", "/v1/audio/transcriptions", _upload(self.model), timeout_s=timeout_s)
        path, body = REQUESTS.get(self.task, REQUESTS["generate"])
        return self.call("POST", path, dict(body, model=self.model), timeout_s=timeout_s)

    def counters(self) -> Tuple[float, float]:
        """(requests running or waiting, a sum that moves while they do) from the engine's own metrics.

        Tokens are counted when a prompt is done; the share of the KV cache in use also moves within a long prompt.
        """
        status, text = self.call("GET", "/metrics")
        if status != 200:
            raise OSError("metrics answered %d" % status)
        self.page = text.encode("utf-8", "replace")
        figures = live_figures(self.page)
        busy = figures.get("running", 0.0) + figures.get("waiting", 0.0)
        return busy, sum(figures.get(name, 0.0) for name in ("generated_tokens", "prompt_tokens", "kv_use"))


class Fault(NamedTuple):
    """What is wrong with a server."""

    reason: str
    text: str
    explained: bool = False  # the text is the cause: the engine's log need not be searched for one

    def details(self) -> Json:
        return {"text": self.text, "explained": self.explained}


class Probe(threading.Thread):
    """Probes the server in a thread of its own: first until it is ready, then whether it still works."""

    def __init__(
        self,
        server: Server,
        patience: Json,
        container: Container,
        report: Callable[[str], None],
        gang: bool,
        load: LoadLog,
    ) -> None:
        super().__init__(daemon=True)
        self.server, self.container, self.report, self.load = server, container, report, load
        self.hung_s = hung_s = float(patience["hung_s"])
        # over several nodes a rank can be gone while /health still answers 200: idle engines are asked often
        self.answer_s = min(float(patience["node_s"]), hung_s) if gang else hung_s
        self.probe_every_s = min(HEALTH_EVERY_S, hung_s / 4, *([self.answer_s / 4] if gang else []))
        self.ask_every_s = self.answer_s / 2 if gang else COMPLETION_EVERY_S
        self.ready: Optional[Json] = None
        self.fault: Optional[Fault] = None
        self.stopping = threading.Event()
        self.refusals = 0  # completions in a row that the server could not answer
        self.trouble = ""  # the last error of the probe itself

    def run(self) -> None:
        while self.fault is None and not self.stopping.wait(self._pause_s()):
            self._probe()

    def _pause_s(self) -> float:
        if self.ready:
            return self.probe_every_s
        return 1.0 if self.refusals else 0.1

    def _probe(self) -> None:
        """Probe once. An error of the probe is reported, and counts as no answer: probing must never stop."""
        try:
            if self.ready:
                self._watch()
            else:
                self._try_ready()
        except (OSError, http.client.HTTPException):
            pass  # no answer yet, or just now
        except Exception as error:
            trouble = "%s: %s" % (type(error).__name__, error)
            if trouble != self.trouble:
                self.trouble = trouble
                self.report(trouble)
        if self.ready and self.fault is None and time.monotonic() - self._moved > self.hung_s:
            last = " (the last probe failed: %s)" % self.trouble if self.trouble else ""
            self.fault = Fault(Reason.ENGINE_HUNG, "no answer and no token for %d s%s" % (self.hung_s, last))

    def _try_ready(self) -> None:
        if not self.server.accepts():
            return
        # vLLM binds early and listens late: in the meantime another server may answer here
        listening = listeners(self.server.host, self.server.port)
        foreign = listening - sockets_of(descendants(os.getpid()))
        if foreign and not self.container.owns(foreign, self.server.port):
            self.fault = Fault(Reason.PORT_TAKEN, "another process took port %d first" % self.server.port)
            return
        self.server.users = listener_users(self.server.port, listening) | {0, os.getuid()}
        if self.server.call("GET", "/health", key=False)[0] != 200:
            return
        if self.server.call("GET", "/v1/models", key=False)[0] not in (401, 403):
            self.fault = Fault(Reason.NOT_GUARDED, "the server answers without a key")
            return
        began = time.monotonic()
        status, text = self.server.ask(timeout_s=self.hung_s)
        if status == 200:
            self._moved, self._tokens, self._asked = time.monotonic(), -1.0, time.monotonic()
            self.ready = {"first_completion_s": round(time.monotonic() - began, 3)}
            return
        self.refusals += 1
        if status < 500 or self.refusals >= 20:
            self.fault = Fault(
                Reason.ENGINE_EXITED,
                "the first request (%s) was answered %d: %s" % (self.server.task, status, text[:300]),
                True,
            )

    def _watch(self) -> None:
        if self.server.call("GET", "/health", key=False)[0] == 503:
            self.fault = Fault(Reason.ENGINE_EXITED, "/health says that the engine behind the server is dead", True)
            return
        busy, tokens = self.server.counters()
        self.load.note(self.server.page, self.server.requests)
        now = time.monotonic()  # not before: the file system of the key's file may have hung meanwhile
        self.trouble = ""
        if tokens != self._tokens:
            self._tokens, self._moved = tokens, now
        elif not busy and now - self._asked >= self.ask_every_s:
            self._asked = now
            self._moved = now
            status, text = self._ask()
            self.refusals = self.refusals + 1 if status >= 500 else 0
            if self.refusals >= 3:
                self.fault = Fault(
                    Reason.ENGINE_EXITED, "requests (%s) are answered %d: %s" % (self.server.task, status, text[:300])
                )
        elif not busy:
            self._moved = now

    def _ask(self) -> Tuple[int, str]:
        """Ask an idle engine for one token; silence is a fault, unless a long prompt came just before."""
        try:
            return self.server.ask(timeout_s=self.answer_s)
        except socket.timeout:
            busy, tokens = self.server.counters()
            if busy > 1 or tokens != self._tokens:
                self._moved = time.monotonic()
                return 200, ""
            text = "an idle engine did not answer one small request (%s) within %d s" % (
                self.server.task,
                self.answer_s,
            )
            self.fault = Fault(Reason.ENGINE_HUNG, text)
            raise

"""The answer to one request: its tokens are written as they are due, or it breaks off where a fault says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from corral.client.errors import error_body
from corral.client.http1 import response
from corral.fake.connection import FakeConnection
from corral.fake.faults import Fault
from corral.fake.metrics import Metrics, TruthLog
from corral.fake.pace import FakeEngine, FakeJob
from corral.fake.query import FakeRefusedError, Query
from corral.fake.shapes import FakeStream, dumps, framed, full_body
from corral.fake.words import Answer

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_MID = ("reset", "cut", "error", "abort", "hang", "garbage")
_KINDS = {400: "BadRequestError", 429: "Too Many Requests", 503: "ServiceUnavailableError"}


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of the server that an exchange uses."""

    model: str
    created: int
    engine: FakeEngine
    metrics: Metrics
    log: TruthLog
    on_death: Callable[[int], None]


def refuse(to: FakeConnection, refused: FakeRefusedError) -> None:
    """Answer a request with an error, as vLLM does."""
    extra = b"retry-after: %g\r\n" % refused.retry_after if refused.retry_after else b""
    to.send(response(refused.status, dumps(refused.body()), extra=extra))
    to.done()


class FakeExchange:
    """The engine's sink for one request."""

    __slots__ = (
        "_answers",
        "_break_at",
        "_cached",
        "_context",
        "_counted",
        "_fault",
        "_instant",
        "_job",
        "_name",
        "_number",
        "_parts",
        "_query",
        "_stream",
        "_to",
        "arrival_ns",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        to: FakeConnection,
        query: Query,
        name: str,
        fault: Fault | None,
        arrival_ns: int,
        number: int,
    ) -> None:
        self._context, self._to, self._query, self._name, self._fault = context, to, query, name, fault
        self.arrival_ns, self._number = arrival_ns, number
        self._answers: list[Answer] = []
        self._job: FakeJob | None = None
        self._stream: FakeStream | None = None
        self._cached, self._break_at, self._instant, self._counted = 0, -1, False, 0
        self._parts: list[bytes] = []

    def strikes_at_once(self, fault: Fault) -> bool:
        """Carry out a fault that needs no answer; False when the answer must be made first."""
        kind = fault.kind
        if kind == "status":
            code = fault.code if fault.code > 0 else 500
            error = _KINDS.get(code, "InternalServerError")
            refuse(self._to, FakeRefusedError(code, fault.message, error, retry_after=fault.retry_after))
        elif kind == "die":
            self._context.on_death(max(0, fault.code))
        elif kind == "reset" and fault.when == "before":
            self._to.reset()
        elif kind == "hang" and fault.when == "before":
            pass
        elif kind == "error" and not self._query.stream:
            refuse(self._to, FakeRefusedError(500, "Internal server error", "InternalServerError"))
        elif kind == "garbage" and not self._query.stream:
            self._to.send(response(200, b'{"id":"cmpl-garbage","choices":[{"text": <html>'))
            self._to.done()
        else:
            if kind == "split":
                self._to.split_bytes = max(1, fault.bytes)
            return False
        self._log(time.monotonic_ns(), kind)
        return True

    def begin(self, answers: list[Answer], job: FakeJob, cached: int, instant: bool) -> None:
        """Set the answers whose tokens the engine now paces."""
        self._answers, self._job, self._cached, self._instant = answers, job, cached, instant
        self._to.on_lost = self
        fault = self._fault
        if fault is not None and fault.kind in _MID:
            self._break_at = fault.at if fault.at >= 0 else job.steps // 2
            self._break_at = min(self._break_at, max(0, job.steps - 1))
        if self._query.stream:
            context = self._context
            self._stream = FakeStream(self._query, self._name, context.created, context.model, answers)
            self._write(_STREAM_HEAD)

    def emit(self, step: int, now: int) -> None:
        """Count and write the `step`-th token of every choice."""
        self._count(step)
        stream = self._stream
        if stream is None:
            return
        if step == 1:
            self._write(
                stream.opening() + stream.step(1) if self._query.chat else stream.step(1), self._break_at == 0
            )
        elif step - 1 != self._break_at:
            self._write(stream.step(step))
        if step - 1 == self._break_at:
            self._break()

    def _count(self, step: int) -> None:
        """Count the tokens of the steps so far; one wake-up may stand for many steps."""
        tokens = sum(min(answer.count, step) for answer in self._answers)
        self._context.metrics.generation_tokens += tokens - self._counted
        self._counted = tokens

    def finish(self, now: int) -> None:
        """Write the end of the answer."""
        self._to.on_lost = None
        if self._stream is not None:
            if not self._job or not self._job.steps:
                self._write(self._stream.opening() + self._bare_event("stop"))
            self._parts.append(self._stream.closing())
            self._to.send(b"".join(self._parts))
        elif not self._finish_full():
            return
        self._log(now, self._answers[0].finish_reason)
        self._to.done()

    def lost(self) -> None:
        """The client went away."""
        if self._job is not None and self._job.epoch >= 0:
            self._context.engine.cancel(self._job)
            self._log(time.monotonic_ns(), "gone")

    def _write(self, data: bytes, skip: bool = False) -> None:
        if skip:
            return
        if self._instant:
            self._parts.append(data)
        else:
            self._to.send(data)

    def _finish_full(self) -> bool:
        """Send an answer that is not streamed, or break off in it; True when it went out whole."""
        fault, context = self._fault, self._context
        if fault is not None and fault.kind == "abort":
            for answer in self._answers:
                keep = min(answer.count, max(0, self._break_at))
                answer.texts, answer.finish_reason = answer.texts[:keep], "abort"
        body = full_body(self._query, self._name, context.created, context.model, self._answers)
        whole = response(200, body)
        if fault is None or fault.kind not in ("reset", "cut", "hang"):
            self._to.send(whole)
            return True
        self._to.send(whole[: len(whole) - len(body) // 2])
        self._break()
        return False

    def _break(self) -> None:
        """Break off the answer here, as the fault says."""
        fault, to = self._fault, self._to
        assert fault is not None
        assert self._job is not None
        to.on_lost = None
        if self._job.running:
            self._context.engine.cancel(self._job)
        self._job.epoch = -1
        to.send(b"".join(self._parts))
        self._log(time.monotonic_ns(), fault.kind)
        if fault.kind == "reset":
            asyncio.get_running_loop().call_later(0.005, to.reset)  # let the bytes so far arrive first
        elif fault.kind == "cut":
            if fault.clean and self._stream is not None:
                to.send(b"0\r\n\r\n")
                to.done()
            else:
                to.close()
        elif fault.kind == "error":
            to.send(
                framed(dumps(error_body("Internal server error", "InternalServerError", 500)))
                + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
            )
            to.done()
        elif fault.kind == "garbage":
            to.send(framed(b'{"id":"cmpl-garbage","choices":[{"te'))
            to.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            to.done()
        elif fault.kind == "abort":
            to.send(self._bare_event("abort") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            to.done()

    def _bare_event(self, finish: str) -> bytes:
        """A chunk without text that ends the answer."""
        assert self._stream is not None
        text = b'"delta":{"content":""}' if self._query.chat else b'"text":""'
        end = b'"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null' % finish.encode()
        return framed(b'%b,"choices":[{"index":0,%b,%b}]}' % (self._stream.top, text, end))

    def _log(self, now: int, finish: str) -> None:
        job, metrics = self._job, self._context.metrics
        tokens = 0
        start = first = 0
        if job is not None:
            tokens = sum(a.count for a in self._answers) if job.step >= job.steps else job.step * job.width
            start, first = job.started_ns, job.first_ns
        if finish in metrics.success and job is not None:
            metrics.success[finish] += 1
            metrics.queue.add((start - self.arrival_ns) / 1e9)
            metrics.ttft.add((first - self.arrival_ns) / 1e9)
            metrics.e2e.add((now - self.arrival_ns) / 1e9)
            metrics.prompts.add(sum(self._query.prompt_tokens))
            metrics.outputs.add(tokens)
            if job.steps > 1:
                metrics.itl.add((now - first) / 1e9 / (job.steps - 1), job.steps - 1)
        if self._context.log.wanted:
            self._write_log(start, first, now, tokens, finish)

    def _write_log(self, start: int, first: int, now: int, tokens: int, finish: str) -> None:
        query = self._query
        fault = b'"%b"' % self._fault.kind.encode() if self._fault else b"null"
        self._context.log.add(
            b'{"n":%d,"id":"%b","chat":%b,"stream":%b,"arrival_ns":%d,"start_ns":%d,"first_ns":%d,"last_ns":%d,'
            b'"prompt_tokens":%d,"cached_tokens":%d,"completion_tokens":%d,"finish":"%b","fault":%b}\n'
            % (
                self._number, self._name.encode(), b"true" if query.chat else b"false",
                b"true" if query.stream else b"false", self.arrival_ns, start, first, now, sum(query.prompt_tokens),
                self._cached, tokens, finish.encode(), fault,
            )
        )  # fmt: skip

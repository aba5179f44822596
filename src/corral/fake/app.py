"""What the fake server answers: paths, completions, faults and the log of true times.

The answer to a request depends on nothing but the request (see `words`), ids and creation times included, so two
runs can be compared byte for byte; a client's `X-Request-Id` takes the place of the id.

The log has one JSON line for each completion or chat request, on this machine's monotonic clock in nanoseconds:
`arrival_ns` (the last byte of the request was read), `start_ns` (it left the queue), `first_ns` and `last_ns` (just
before the bytes of the first and last token were written; for answers that are not streamed the first is when it
was due). Requests that failed on demand say so in `fault`; those whose client left have `"finish":"gone"`.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import re
import traceback
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from corral.base.errors import CorralError
from corral.client.http1 import response
from corral.fake import words
from corral.fake.connection import FakeConnection, FakeRequest
from corral.fake.exchange import Context, FakeExchange, refuse
from corral.fake.faults import Fault, FaultBook, parse_fault
from corral.fake.metrics import Metrics, TruthLog
from corral.fake.pace import FakeEngine, FakeJob, Pace
from corral.fake.query import FakeRefusedError, Query, instance_of, messages_text, read_query, scripted_call
from corral.fake.shapes import dumps

_BLOCK_BYTES = 64  # about 16 tokens: the block of the prefix cache
_CACHE_BLOCKS = 200_000
VERSION = "0.32.0"
_decode = msgspec.json.Decoder().decode


def _decoded(body: bytes) -> Any:
    """A body's JSON; as in vLLM, values that only Python's decoder accepts (NaN, half a surrogate pair) are read."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(body)


@dataclass(frozen=True)
class FakeOptions:
    """The settings of the fake server."""

    model: str = "fake"
    host: str = "127.0.0.1"
    port: int = 0
    max_model_len: int = 8192
    key_file: Path | None = None
    log: Path | None = None
    seed: int = 0
    answer_tokens: tuple[int, int] | None = (16, 256)  # an answer ends by itself within; None: never
    prefix_cache: bool = True
    control: bool = False
    created: int = 1_700_000_000
    uvloop: bool = True
    pace: Pace = field(default_factory=Pace)
    faults: tuple[Fault, ...] = ()
    tool_calls: tuple[tuple[str, str], ...] = ()  # name and arguments, in the order of a conversation
    answer: str = ""  # to everything
    adapters: Path | None = None  # a folder: its folders are served beside the model, by their names
    thoughts: int = 0  # tokens of every chat answer that come first, as `reasoning`


class App:
    """The server's state inside its event loop."""

    def __init__(
        self, options: FakeOptions, loop: asyncio.AbstractEventLoop, on_death: Callable[[int], None]
    ) -> None:
        self.options = options
        self.connections: set[FakeConnection] = set()
        self.engine = FakeEngine(loop, options.pace)
        self.metrics = Metrics()
        self.book = FaultBook(seed=options.seed)
        self.book.set(options.faults)
        self.log = TruthLog(options.log)
        self._context = Context(options.model, options.created, self.engine, self.metrics, self.log, on_death)
        self.requests = 0
        self.key = b"Bearer " + options.key_file.read_bytes().strip() if options.key_file else b""
        self.healthy = True
        self._cache: dict[int, None] = {}
        self._pages: dict[bytes, Callable[[FakeConnection, bytes], None]] = {
            b"/health": self._health,
            b"/ping": self._health,
            b"/v1/models": self._models,
            b"/version": lambda to, _: self._json(to, {"version": VERSION}),
            b"/metrics": self._metrics_page,
            b"/tokenize": self._tokenize,
            b"/detokenize": self._detokenize,
            b"/v1/embeddings": self._embeddings,
            b"/v1/rerank": self._rerank,
            b"/rerank": self._rerank,
            b"/v1/score": self._score,
            b"/score": self._score,
            b"/classify": self._classify,
            b"/v1/audio/transcriptions": self._transcribe,
            b"/tokenizer_info": lambda to, _: self._json(to, {"bos_token": words.FIRST, "eos_token": None}),
        }

    def handle(self, to: FakeConnection, request: FakeRequest, arrival: int) -> None:
        """Answer one request, now or later."""
        try:
            method, body = request.method, request.body
            path = request.path.partition(b"?")[0]
            sent_key = request.headers.get(b"authorization", b"")
            is_open = not self.key or path in (b"/health", b"/ping", b"/version", b"/metrics")
            if not is_open and not hmac.compare_digest(sent_key, self.key):
                self._json(to, {"error": "Unauthorized"}, 401)
                return
            if path == b"/v1/completions" or path == b"/v1/chat/completions":
                self._expect(method, b"POST")
                self._complete(to, path == b"/v1/chat/completions", request, arrival)
            elif path in self._pages:
                posted = path.endswith(
                    (b"tokenize", b"embeddings", b"rerank", b"score", b"classify", b"transcriptions")
                )
                self._expect(method, b"POST" if posted else b"GET")
                self._pages[path](to, body)
            elif path.startswith(b"/control/") and self.options.control:
                self._control(to, method, path, body)
            else:
                raise FakeRefusedError(404, "Not Found", "Not Found")
        except FakeRefusedError as refused:
            refuse(to, refused)
        except Exception as error:
            # a bug of the fake server must look like a server error, not like a hang
            traceback.print_exc()
            refuse(to, FakeRefusedError(500, f"fake server: {error}", "InternalServerError"))

    def _json(self, to: FakeConnection, value: Any, status: int = 200) -> None:
        to.send(response(status, dumps(value)))
        to.done()

    @staticmethod
    def _expect(method: bytes, expected: bytes) -> None:
        if method != expected:
            raise FakeRefusedError(405, "Method Not Allowed", "Method Not Allowed")

    def _body(self, body: bytes) -> dict[str, Any]:
        try:
            value = _decoded(body)
        except ValueError as error:
            at = getattr(error, "pos", 0)
            message = (
                f"1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body.{at}', 'msg': 'JSON decode error'}}"
            )
            raise FakeRefusedError(400, message, "Bad Request", f"body.{at}") from None
        if not isinstance(value, dict):
            raise FakeRefusedError(
                400, "1 validation error:\n  Input should be a valid dictionary", "Bad Request", "body"
            )
        return value

    def _check_model(self, body: dict[str, Any]) -> None:
        name = body.get("model")
        if name and name != self.options.model and name not in self._adapters():
            message = f"The model `{name}` does not exist. Valid aliases: {self.options.model}."
            raise FakeRefusedError(404, message, "NotFoundError", "model")

    def _complete(self, to: FakeConnection, chat: bool, request: FakeRequest, arrival: int) -> None:
        raw = request.body
        body = self._body(raw)
        self._check_model(body)
        options = self.options
        query = read_query(body, chat, options.max_model_len)
        if chat and options.tool_calls:
            query.call = scripted_call(body, options.tool_calls)
        if chat:
            query.thoughts = options.thoughts
        self.requests += 1
        fault = None
        if self.book.faults:
            prompt = b"\n".join(query.prompts)
            fault = self.book.choose(self.requests, query.keys[0] ^ zlib.crc32(raw), prompt)
        sent_id = request.headers.get(b"x-request-id")
        name = re.sub(r"[^\w.:-]", "", sent_id.decode("latin-1")) if sent_id else f"{query.keys[0]:016x}"
        exchange = FakeExchange(
            self._context, to, query, ("chatcmpl-" if chat else "cmpl-") + name, fault, arrival, self.requests
        )
        if fault is not None and exchange.strikes_at_once(fault):
            return
        answers = [self._answer(query, i, c, fault) for i in range(len(query.prompts)) for c in range(query.n)]
        cached = self._cached(query) if options.prefix_cache and query.prompt_logprobs is None else 0
        prompt_tokens = sum(query.prompt_tokens)
        self.metrics.prompt_tokens += prompt_tokens
        self.metrics.prefix_queries += prompt_tokens
        self.metrics.prefix_hits += cached
        steps = max(a.count for a in answers)
        job = FakeJob(
            exchange, len(answers), steps, prompt_tokens, prompt_tokens - cached, query.stream, query.keys[0]
        )
        if fault is not None and fault.kind == "slow":
            job.slow = fault.factor or 10.0
        exchange.begin(answers, job, cached, instant=self.engine.pace.instant and job.slow == 1)
        self.engine.submit(job, arrival)

    def _answer(self, query: Query, index: int, choice: int, fault: Fault | None) -> words.Answer:
        key = (query.keys[index] + choice * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        limit = query.limit(index, self.options.max_model_len)
        if query.call:
            return words.answer_of(query.call[1], key, limit, "tool_calls")
        if query.form is not None and not self.options.answer:
            return words.answer_of(json.dumps(instance_of(query.form)), key, limit)
        if self.options.answer:
            return words.answer_of(self.options.answer, key, limit)
        natural = None
        if self.options.answer_tokens and not query.ignore_eos:
            low, high = self.options.answer_tokens
            natural = max(low + (key >> 30) % (high - low + 1), query.min_tokens)
        kind = fault.kind if fault else ""
        if kind == "length" and fault:
            limit = max(1, int(limit * (fault.factor or 0.5)))
        answer = words.answer(key, 0 if kind == "zero" else limit, natural, query.stops)
        if kind == "zero":
            answer.finish_reason = "stop"
        return answer

    def _cached(self, query: Query) -> int:
        """How many prompt tokens are in the prefix cache, in whole blocks."""
        cache, hits = self._cache, 0
        for text, count in zip(query.prompts, query.prompt_tokens, strict=True):
            chain, known, blocks = 0, True, 0
            for at in range(0, len(text) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
                chain = zlib.crc32(text[at : at + _BLOCK_BYTES], chain) | at << 32
                if known and chain in cache:
                    blocks += 1
                else:
                    known = False
                    cache[chain] = None
            hits += min(blocks * 16, count - 1)
        while len(cache) > _CACHE_BLOCKS:
            del cache[next(iter(cache))]
        return hits

    def _health(self, to: FakeConnection, _: bytes) -> None:
        ok = self.healthy and self.book.of_kind("health") is None
        to.send(response(200 if ok else 503, b""))
        to.done()

    def _adapters(self) -> list[str]:
        folder = self.options.adapters
        return sorted(one.name for one in folder.iterdir() if one.is_dir() and one.name[0] != ".") if folder else []

    def _models(self, to: FakeConnection, _: bytes) -> None:
        o = self.options
        flags = {"allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True}
        flags |= {"allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False}
        permission = {"id": "modelperm-fake", "object": "model_permission", "created": o.created, **flags}
        permission |= {"organization": "*", "group": None, "is_blocking": False}
        card = {"id": o.model, "object": "model", "created": o.created, "owned_by": "vllm", "root": o.model}
        card |= {"parent": None, "max_model_len": o.max_model_len, "permission": [permission]}
        adapters = [{**card, "id": name, "root": f"/{name}", "parent": o.model} for name in self._adapters()]
        self._json(to, {"object": "list", "data": [card, *adapters]})

    def _metrics_page(self, to: FakeConnection, _: bytes) -> None:
        engine, pace = self.engine, self.engine.pace
        kv = pace.kv_tokens or 1_000_000
        gauges = {
            "num_requests_running": float(engine.running_jobs),
            "num_requests_waiting": float(engine.waiting_jobs),
            "kv_cache_usage_perc": min(1.0, engine.kv_used / kv),
        }
        cache = {"block_size": "16", "num_gpu_blocks": str(kv // 16), "gpu_memory_utilization": "0.92"}
        cache |= {"enable_prefix_caching": str(self.options.prefix_cache), "cache_dtype": "auto", "engine": "0"}
        page = self.metrics.text(self.options.model, gauges, engine.preemptions, cache)
        to.send(response(200, page.encode(), b"text/plain; version=1.0.0; charset=utf-8"))
        to.done()

    def _tokenize(self, to: FakeConnection, raw: bytes) -> None:
        body = self._body(raw)
        self._check_model(body)
        prompt = body.get("prompt")
        if not isinstance(prompt, str) and "messages" not in body:
            raise FakeRefusedError(400, "1 validation error:\n  prompt: field required", "Bad Request", "body.prompt")
        text = prompt.encode("utf-8", "replace") if isinstance(prompt, str) else messages_text(body["messages"])
        ids = words.encode(text)
        strings = (
            [p.decode("utf-8", "replace") for p in words.pieces(text)] if body.get("return_token_strs") else None
        )
        limit = self.options.max_model_len
        self._json(to, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    def _detokenize(self, to: FakeConnection, raw: bytes) -> None:
        body = self._body(raw)
        self._check_model(body)
        try:
            text = words.decode(body["tokens"]).decode("utf-8", "replace")
        except (KeyError, TypeError, ValueError) as error:
            raise FakeRefusedError(400, f"tokens: {error}", "Bad Request", "body.tokens") from None
        self._json(to, {"prompt": text})

    def _texts(self, value: Any, name: str) -> list[str]:
        """The texts of a field, each within the context; they count as prompts."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
            raise FakeRefusedError(400, f"{name}: a text or a list of texts is needed", "Bad Request", f"body.{name}")
        for text in texts:
            count = len(words.encode(text.encode("utf-8", "replace")))
            if count > self.options.max_model_len:
                message = f"This model's maximum context length is {self.options.max_model_len} tokens, not {count}."
                raise FakeRefusedError(400, message, "BadRequestError", name)
            self.metrics.prompt_tokens += count
        self.requests += 1
        return texts

    def _pooled(self, to: FakeConnection, texts: list[str], **fields: Any) -> None:
        self.metrics.success["stop"] += 1
        tokens = sum(len(words.encode(text.encode("utf-8", "replace"))) for text in texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        o = self.options
        self._json(to, {"id": "pool-fake", "created": o.created, "model": o.model, **fields, "usage": usage})

    def _embeddings(self, to: FakeConnection, raw: bytes) -> None:
        body = self._body(raw)
        self._check_model(body)
        texts = self._texts(body.get("input"), "input")
        rows = [words.vector(text, int(body.get("dimensions") or words.DIMENSIONS)) for text in texts]
        data: list[Any] = rows
        if body.get("encoding_format") == "base64":  # what OpenAI's SDK asks for
            data = [base64.b64encode(array("f", row).tobytes()).decode() for row in rows]
        listed = [{"index": i, "object": "embedding", "embedding": one} for i, one in enumerate(data)]
        self._pooled(to, texts, object="list", data=listed)

    def _rerank(self, to: FakeConnection, raw: bytes) -> None:
        body = self._body(raw)
        self._check_model(body)
        query, documents = self._texts(body.get("query"), "query"), self._texts(body.get("documents"), "documents")
        scores = sorted(((words.nearness(query[0], one), -i) for i, one in enumerate(documents)), reverse=True)
        results = [
            {"index": -i, "document": {"text": documents[-i]}, "relevance_score": score}
            for score, i in scores[: body.get("top_n") or None]
        ]
        self._pooled(to, [*query, *documents], results=results)

    def _score(self, to: FakeConnection, raw: bytes) -> None:
        body = self._body(raw)
        self._check_model(body)
        one = self._texts(body.get("queries", body.get("text_1")), "queries")
        other = self._texts(body.get("documents", body.get("text_2")), "documents")
        pairs = zip(one * len(other) if len(one) == 1 else one, other, strict=False)
        data = [{"index": i, "object": "score", "score": words.nearness(*pair)} for i, pair in enumerate(pairs)]
        self._pooled(to, [*one, *other], object="list", data=data)

    def _classify(self, to: FakeConnection, raw: bytes) -> None:
        body = self._body(raw)
        self._check_model(body)
        texts = self._texts(body.get("input"), "input")
        halves = [words.vector(text, 1)[0] for text in texts]
        data = [
            {"index": i, "label": f"LABEL_{int(one > 0)}", "probs": [0.5 - one / 2, 0.5 + one / 2], "num_classes": 2}
            for i, one in enumerate(halves)
        ]
        self._pooled(to, texts, object="list", data=data)

    def _transcribe(self, to: FakeConnection, raw: bytes) -> None:
        fields = {}
        for part in raw.split(raw.partition(b"\r\n")[0])[1:-1]:
            head, _, content = part[2:-2].partition(b"\r\n\r\n")
            if name := re.search(rb'name="([^"]*)"', head):
                fields[name[1].decode()] = content
        if not fields.get("file"):
            raise FakeRefusedError(400, "1 validation error:\n  file: field required", "Bad Request", "body.file")
        self._check_model({"model": fields.get("model", b"").decode("utf-8", "replace")})
        self.requests += 1
        text = f"{len(fields['file'])} bytes {zlib.crc32(fields['file']):08x} {fields.get('language', b'').decode()}"
        self._json(to, {"text": text.strip(), "usage": {"type": "duration", "seconds": 1}})

    def _control(self, to: FakeConnection, method: bytes, path: bytes, raw: bytes) -> None:
        what = unquote(path.decode("latin-1")).removeprefix("/control/")
        body = self._body(raw) if method == b"POST" else None
        try:
            if what == "faults":
                if body is not None:
                    self.book.set(parse_fault(f) for f in body["faults"])
                now = zip(self.book.faults, self.book.fired, strict=True)
                self._json(
                    to, {"faults": [{"fault": f.spec(), "fired": n} for f, n in now], "requests": self.requests}
                )
            elif what == "health" and body is not None:
                self.healthy = bool(body["ok"])
                self._json(to, {"ok": self.healthy})
            elif what == "pace":
                self.engine.pace = replace(self.engine.pace, **(body or {}))
                self._json(to, {f: getattr(self.engine.pace, f) for f in Pace.__dataclass_fields__})
            else:
                raise FakeRefusedError(404, "Known: faults, health, pace.", "Not Found")
        except (CorralError, KeyError, TypeError) as error:
            raise FakeRefusedError(400, f"{error} {getattr(error, 'remedy', '')}") from None

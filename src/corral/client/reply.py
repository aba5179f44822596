"""The answer to a request: text, tokens with log-probabilities, usage, and when each piece arrived.

A reply exists only for answers that are complete: every choice has a finish reason that is neither "abort" nor
"error", and a stream ended with [DONE]. Anything else is an error (`errors`).

Times are monotonic nanoseconds. `chunk_ns` has one entry for each streamed chunk that carried a token (the chunk
that only names the role, and the one that only carries usage, do not count); several chunks in one network read
share its time. `first_token_ns` is the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from corral.client.errors import (
    AbortedError,
    CutStreamError,
    MalformedReplyError,
    ServerFailedError,
    error_from_chunk,
)
from corral.client.wire import Exchange


class Token(msgspec.Struct, frozen=True, gc=False):
    """One token with its log-probability; `rank` and `id` where the server tells them."""

    text: str
    logprob: float | None
    rank: int | None = None
    id: int | None = None
    bytes: tuple[int, ...] | None = None
    top: tuple[Token, ...] = ()  # the likeliest tokens at this place, best first


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None

    @property
    def cached_tokens(self) -> int | None:
        return (self.prompt_tokens_details or {}).get("cached_tokens")


class Timing(msgspec.Struct, gc=False):
    """The times of one request."""

    asked_ns: int  # the request was given to the client
    sent_ns: int  # it was written to the connection
    first_byte_ns: int
    done_ns: int
    chunk_ns: list[int]

    @property
    def first_token_ns(self) -> int | None:
        return self.chunk_ns[0] if self.chunk_ns else None

    @property
    def last_token_ns(self) -> int | None:
        return self.chunk_ns[-1] if self.chunk_ns else None

    @property
    def ttft_s(self) -> float | None:
        return (self.chunk_ns[0] - self.sent_ns) / 1e9 if self.chunk_ns else None

    @property
    def total_s(self) -> float:
        return (self.done_ns - self.sent_ns) / 1e9


class ToolCall(msgspec.Struct, gc=False):
    """A call of a tool, or one streamed part of it; its arguments are the text that the model wrote."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Choice(msgspec.Struct, gc=False):
    """One answer of a reply."""

    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    reasoning: str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None  # as the server sent them
    prompt_logprobs: Any = None
    asked_top: int | None = None
    message: Any = None  # of a chat answer that was not streamed, as the server sent it
    tool_calls: list[ToolCall] = []

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The answer's tokens (with `echo`, the prompt's before them); empty unless logprobs were asked for."""
        if not self.logprobs:
            return ()
        if "content" in self.logprobs:
            return tuple(_chat_token(entry) for entry in self.logprobs["content"] or ())
        log = self.logprobs
        ids: Sequence[int | None] = self.token_ids or ()
        if len(ids) != len(log["tokens"]):
            ids = [None] * len(log["tokens"])
        columns = zip(log["tokens"], log["token_logprobs"], log["top_logprobs"], ids, strict=True)
        return tuple(_completion_token(*column, self.asked_top) for column in columns)

    @property
    def prompt_tokens(self) -> tuple[Token, ...]:
        """The prompt's tokens; empty unless prompt_logprobs were asked for. The first has no log-probability."""
        return tuple(map(_prompt_token, self.prompt_logprobs or ()))


def _chat_token(entry: Mapping[str, Any]) -> Token:
    top = [
        Token(t["token"], t["logprob"], i, None, _bytes(t)) for i, t in enumerate(entry.get("top_logprobs") or (), 1)
    ]
    rank = next((t.rank for t in top if t.text == entry["token"]), None)
    return Token(entry["token"], entry["logprob"], rank, None, _bytes(entry), tuple(top))


def _bytes(entry: Mapping[str, Any]) -> tuple[int, ...] | None:
    given = entry.get("bytes")
    return None if given is None else tuple(given)


def _completion_token(
    text: str, logprob: float | None, top: Mapping[str, float] | None, token: int | None, asked: int | None
) -> Token:
    best = sorted((top or {}).items(), key=lambda t: -t[1])
    # The server lists the k likeliest, and the token itself even if it is not among them: then it comes last, and
    # its rank is known only to be beyond k.
    at = next((i for i, (t, _) in enumerate(best, 1) if t == text), None)
    known = at is not None and (at < len(best) or (asked is not None and at <= asked))
    if asked is not None:
        best = best[:asked]
    alternatives = tuple(Token(t, p, i) for i, (t, p) in enumerate(best, 1))
    return Token(text, logprob, at if known else None, token, None, alternatives)


def _prompt_token(entry: Mapping[str, Any] | None) -> Token:
    if not entry:
        return Token("", None)
    tokens = [Token(v.get("decoded_token") or "", v["logprob"], v.get("rank"), int(k)) for k, v in entry.items()]
    taken = tokens[0]  # vLLM puts the prompt's own token first
    top = tuple(sorted(tokens, key=lambda t: -(t.logprob or 0.0)))
    return Token(taken.text, taken.logprob, taken.rank, taken.id, None, top)


class Reply(msgspec.Struct, gc=False):
    """One complete answer."""

    choices: list[Choice]
    usage: Usage | None
    timing: Timing
    id: str
    model: str
    status: int
    raw: bytes  # the body, or the events of a stream, one a line

    def __repr__(self) -> str:
        tokens = f", {self.usage.completion_tokens} tokens" if self.usage else ""
        return f"<Reply {self.texts if len(self.choices) > 1 else self.text!r}{tokens}, {self.model}>"

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.choices[0].tokens

    @property
    def prompt_tokens(self) -> tuple[Token, ...]:
        return self.choices[0].prompt_tokens

    def json(self) -> Any:
        """The server's body, or a list of its events."""
        if self.timing.chunk_ns:
            return [msgspec.json.decode(line) for line in self.raw.split(b"\n")]
        return msgspec.json.decode(self.raw)


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    role: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same, as older servers call it
    tool_calls: Any = None

    @property
    def thought(self) -> str | None:
        return self.reasoning or self.reasoning_content


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    message: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None


class _Body(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    prompt_logprobs: Any = None
    id: str = ""
    model: str = ""


class Piece(msgspec.Struct, gc=False):
    """One streamed piece of one choice."""

    index: int
    text: str
    finish_reason: str | None
    at_ns: int
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tokens: int | None = None  # of the answer so far, where the stream says (`continuous_usage_stats`)


_BODY = msgspec.json.Decoder(_Body)
_EVENTS = msgspec.json.Decoder(list[_Body])
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding hostile bytes may raise


def read_piece(event: bytes, at_ns: int) -> list[Piece]:
    """The pieces in one event, as they arrive; malformed events and errors give none (the reply reports them)."""
    try:
        body = _BODY.decode(event)
    except _NOT_JSON:
        return []
    pieces = []
    for choice in body.choices or ():
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        thought = delta.thought if delta else None
        calls = _tool_calls(delta.tool_calls) if delta else []
        if text or thought or calls or choice.finish_reason:
            tokens = body.usage.completion_tokens if body.usage else None
            pieces.append(Piece(choice.index, text or "", choice.finish_reason, at_ns, thought, calls, tokens))
    return pieces


def _tool_calls(value: Any) -> list[ToolCall]:
    """The calls of a message, or their parts in a streamed one; what is no call is left out."""
    calls = []
    for number, one in enumerate(value if isinstance(value, list) else ()):
        function = one.get("function") if isinstance(one, dict) else None
        if isinstance(function, dict):
            index = one.get("index")
            texts = (text if isinstance(text, str) else "" for text in
                     (one.get("id"), function.get("name"), function.get("arguments")))  # fmt: skip
            calls.append(ToolCall(index if isinstance(index, int) else number, *texts))
    return calls


def read_reply(exchange: Exchange, where: str) -> Reply:
    """The complete answer of a successful exchange, or the error that says why it is none."""
    return _read_stream(exchange, where) if exchange.stream else _read_whole(exchange, where)


def _read_whole(exchange: Exchange, where: str) -> Reply:
    raw = exchange.parts[0] if len(exchange.parts) == 1 else b"".join(exchange.parts)
    try:
        body = _BODY.decode(raw)
    except _NOT_JSON as error:
        raise _malformed(where, raw, error) from None
    if not body.choices:
        raise error_from_chunk(raw, where) if body.error is not None else _malformed(where, raw, "no choices")
    choices = []
    for c in body.choices:
        _check_finish(c.finish_reason, where)
        message = c.message
        whole = (
            None if message is None else _Message(**{name: message.get(name) for name in _Message.__struct_fields__})
        )
        prompt = c.prompt_logprobs if c.prompt_logprobs is not None else body.prompt_logprobs
        finish = c.finish_reason or ""
        choices.append(
            Choice(
                c.index,
                (c.text if whole is None else whole.content) or "",
                finish,
                c.stop_reason,
                whole.thought if whole else None,
                c.token_ids,
                c.logprobs,
                prompt,
                exchange.top,
                message,
                _tool_calls(whole.tool_calls) if whole else [],
            )
        )
    timing = Timing(exchange.asked_ns, exchange.sent_ns, exchange.first_byte_ns, exchange.last_ns, [])
    return Reply(choices, body.usage, timing, body.id, body.model, exchange.status, raw)


class Assembly:
    """Puts a streamed answer together, a slice of its events at a time.

    Decoding a long stream in one go would hold up the event loop, and with it the time stamps of everything else.
    """

    def __init__(self, exchange: Exchange, where: str) -> None:
        self._exchange, self._where = exchange, where
        self._at = 0
        self._usage: Usage | None = None
        self._chunk_ns: list[int] = []
        self._texts: list[str] = []
        self._last: _Choice | None = None
        self._simple = True
        self._bodies: list[_Body] = []

    def step(self, count: int) -> bool:
        """Decode the next `count` events; True when all are decoded."""
        events, at = self._exchange.events[self._at : self._at + count], self._at
        try:
            bodies = _EVENTS.decode(b"[%b]" % b",".join(events))
        except _NOT_JSON as error:
            raise _malformed(self._where, events[-1], error) from None
        texts, chunk_ns, times = self._texts, self._chunk_ns, self._exchange.times
        for body in bodies:
            if body.usage is not None:
                self._usage = body.usage
            if not body.choices:
                if body.error is not None or body.choices is None:
                    raise error_from_chunk(self._exchange.events[at], self._where)
                at += 1
                continue
            choice = self._last = body.choices[0]
            delta = choice.delta
            if delta is None:
                texts.append(choice.text or "")
                chunk_ns.append(times[at])
            elif delta.content or not delta.role or choice.finish_reason is not None:
                texts.append(delta.content or "")
                chunk_ns.append(times[at])
                if delta.thought or delta.tool_calls:
                    self._simple = False
            at += 1
            if choice.index or choice.logprobs is not None or len(body.choices) > 1 or choice.token_ids is not None:
                self._simple = False
        self._bodies += bodies
        self._at = at
        return at >= len(self._exchange.events)

    def reply(self) -> Reply:
        """The whole answer, once all events are decoded."""
        exchange, last = self._exchange, self._last
        if not exchange.done or last is None:
            message = f"the stream from {self._where} ended before [DONE]."
            raise CutStreamError(message, "Try again; look at the engine's log.")
        if self._simple:
            _check_finish(last.finish_reason, self._where)
            choices = [Choice(0, "".join(self._texts), last.finish_reason or "", last.stop_reason)]
        else:
            choices = _merge(self._bodies, self._where, exchange.top)
        times = Timing(exchange.asked_ns, exchange.sent_ns, exchange.first_byte_ns, exchange.last_ns, self._chunk_ns)
        first = self._bodies[0]
        return Reply(choices, self._usage, times, first.id, first.model, exchange.status, b"\n".join(exchange.events))


def _read_stream(exchange: Exchange, where: str) -> Reply:
    assembly = Assembly(exchange, where)
    if exchange.events:
        assembly.step(len(exchange.events))
    return assembly.reply()


def _merge(bodies: list[_Body], where: str, asked_top: int | None) -> list[Choice]:
    """Put the chunks of several choices, or with log-probabilities, together."""
    merged: dict[int, Choice] = {}
    for body in bodies:
        for c in body.choices or ():
            whole = merged.setdefault(c.index, Choice(c.index, "", "", asked_top=asked_top))
            whole.text += (c.text if c.delta is None else c.delta.content) or ""
            if c.delta and c.delta.thought:
                whole.reasoning = (whole.reasoning or "") + c.delta.thought
            for part in _tool_calls(c.delta.tool_calls) if c.delta else ():
                add_tool_call(whole.tool_calls, part)
            if c.finish_reason:
                whole.finish_reason, whole.stop_reason = c.finish_reason, c.stop_reason
            if c.token_ids is not None:
                whole.token_ids = (whole.token_ids or []) + c.token_ids
            if c.logprobs:
                whole.logprobs = whole.logprobs or {}
                for name, values in c.logprobs.items():
                    whole.logprobs.setdefault(name, []).extend(values or ())
    for choice in merged.values():
        _check_finish(choice.finish_reason, where)
    return [merged[i] for i in sorted(merged)]


def add_tool_call(calls: list[ToolCall], part: ToolCall) -> bool:
    """Add one streamed part to the calls so far; whether it begins another call."""
    call = next((one for one in calls if one.index == part.index), None)
    if call is None:
        calls.append(ToolCall(part.index, part.id, part.name, part.arguments))
        return True
    call.id, call.name, call.arguments = call.id or part.id, call.name or part.name, call.arguments + part.arguments
    return False


def _check_finish(reason: str | None, where: str) -> None:
    if reason == "abort":
        raise AbortedError(
            f'{where} aborted the request (finish_reason "abort").', "Try again; is the server being stopped?"
        )
    if reason == "error":
        raise ServerFailedError(f'{where} failed while answering (finish_reason "error").', "Look at its log.")
    if not reason:
        raise CutStreamError(f"an answer from {where} has no finish reason.", "Try again; look at the engine's log.")


def _malformed(where: str, raw: bytes, why: object) -> MalformedReplyError:
    shown = raw[:200].decode("utf-8", "replace")
    return MalformedReplyError(
        f"{where} sent something that is not an answer ({why}): {shown!r}", "Is it an OpenAI-compatible server?"
    )

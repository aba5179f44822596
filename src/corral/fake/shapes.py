"""Response bodies with the fields of vLLM 0.32, in its order.

Plain text is written from prepared bytes (`FakeStream`); log-probabilities, echo, token ids and continuous usage
are encoded from dictionaries, which is slower.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring as quoted
from typing import Any

from corral.fake import words
from corral.fake.query import Query
from corral.fake.words import Answer, Ranked

FINGERPRINT = "corral-fake"
_USAGE = '{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}'
_FULL_USAGE = _USAGE[:-1] + ',"prompt_tokens_details":null,"completion_tokens_details":null}'


def dumps(value: Any) -> bytes:
    """JSON as vLLM writes it: compact, not escaped beyond what JSON needs."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def full_body(query: Query, name: str, created: int, model: str, answers: list[Answer]) -> bytes:
    """The body of an answer that is not streamed."""
    completion = sum(a.count for a in answers)
    prompt = sum(query.prompt_tokens)
    if query.plain and query.n == 1 and len(answers) == 1:
        return _plain_body(query, name, created, model, answers[0], prompt)
    kind = "chat.completion" if query.chat else "text_completion"
    choices = [_full_choice(query, i, a) for i, a in enumerate(answers)]
    body: dict[str, Any] = {"id": name, "object": kind, "created": created, "model": model, "choices": choices}
    body |= {"service_tier": None, "system_fingerprint": FINGERPRINT}
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    body["usage"] = usage(prompt, completion) | details
    if query.chat:
        body["prompt_logprobs"] = _prompt_logprobs(query, 0)
        body["prompt_token_ids"] = query.ids(0) if query.return_token_ids else None
        body["prompt_text"] = None
    return dumps(body | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None})


def _plain_body(query: Query, name: str, created: int, model: str, answer: Answer, prompt: int) -> bytes:
    text, model = quoted(answer.text), quoted(model)
    spent = _FULL_USAGE % (prompt, prompt + answer.count, answer.count)
    stop = quoted(answer.stop_reason) if answer.stop_reason else "null"
    tail = f'"service_tier":null,"system_fingerprint":"{FINGERPRINT}","usage":{spent}'
    end = '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    if query.chat:
        return (
            f'{{"id":"{name}","object":"chat.completion","created":{created},"model":{model},"choices":[{{"index":0,'
            f'"message":{{"role":"assistant","content":{text},"refusal":null,"annotations":null,"audio":null,'
            f'"function_call":null,"reasoning":null}},"logprobs":null,"finish_reason":"{answer.finish_reason}",'
            f'"stop_reason":{stop},"token_ids":null,"routed_experts":null}}],{tail},"prompt_logprobs":null,'
            f'"prompt_token_ids":null,"prompt_text":null,{end}'
        ).encode("utf-8", "replace")
    return (
        f'{{"id":"{name}","object":"text_completion","created":{created},"model":{model},"choices":[{{"index":0,'
        f'"text":{text},"logprobs":null,"finish_reason":"{answer.finish_reason}","stop_reason":{stop},'
        f'"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}}],{tail},{end}'
    ).encode("utf-8", "replace")


def _full_choice(query: Query, index: int, answer: Answer) -> dict[str, Any]:
    at = index // query.n
    ids = answer.ids() if query.return_token_ids else None
    end = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason, "token_ids": ids}
    if query.chat:
        nothing = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, **nothing}
        if query.thoughts:
            thought = "".join(answer.texts[: query.thoughts])
            message |= {"reasoning": thought, "content": answer.text[len(thought) :]}
        if query.call:
            message |= {"content": None, "tool_calls": [_call(query.call[0], answer.text, answer.key)]}
        logprobs = _chat_logprobs(query, answer, range(answer.count))
        return {"index": index, "message": message, "logprobs": logprobs, **end, "routed_experts": None}
    text = answer.text
    if query.echo:
        text = ("" if query.return_token_ids else query.prompts[at].decode("utf-8", "replace")) + text
    return {
        "index": index,
        "text": text,
        "logprobs": _completion_logprobs(query, at, answer, range(answer.count), 0, echo=query.echo),
        **end,
        "prompt_logprobs": _prompt_logprobs(query, at),
        "prompt_token_ids": query.ids(at) if query.return_token_ids else None,
        "routed_experts": None,
    }


def _call(name: str, arguments: str, key: int) -> dict[str, Any]:
    """A call of a tool, or its beginning."""
    return {"id": f"call_{key:016x}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _generated(query: Query, at: int, answer: Answer, steps: range, count: int) -> list[list[Ranked]]:
    ids = answer.ids()
    last = query.ids(at)[-1]
    rows = []
    for i in steps:
        before = ids[i - 1] if i else last
        text = answer.tokens[i] or words.EOS_TEXT
        rows.append(words.ranked(before, ids[i], text, count, 1 if query.greedy else None))
    return rows


def _name(query: Query, token: Ranked) -> str:
    return f"token_id:{token.token}" if query.tokens_as_ids else token.text


def _prompt_texts(query: Query, at: int) -> list[str]:
    return [words.piece_of(t).decode("utf-8", "replace") for t in query.ids(at)]


def _prompt_rows(query: Query, at: int, count: int) -> list[list[Ranked] | None]:
    ids = query.ids(at)
    texts = _prompt_texts(query, at)
    rows: list[list[Ranked] | None] = [None]
    rows += [words.ranked(ids[i - 1], ids[i], texts[i], count) for i in range(1, len(ids))]
    return rows


def _prompt_logprobs(query: Query, at: int) -> list[dict[str, Any] | None] | None:
    if query.prompt_logprobs is None:
        return None
    return [
        None if row is None else {
            str(r.token): {"logprob": r.logprob, "rank": r.rank, "decoded_token": r.text} for r in row
        }
        for row in _prompt_rows(query, at, query.prompt_logprobs)
    ]  # fmt: skip


def _completion_logprobs(
    query: Query, at: int, answer: Answer, steps: range, offset: int, echo: bool
) -> dict[str, Any] | None:
    if query.logprobs is None:
        return None
    rows: list[list[Ranked] | None] = []
    texts: list[str] = []
    if echo:
        rows += _prompt_rows(query, at, query.logprobs)
        texts += _prompt_texts(query, at)
    rows += _generated(query, at, answer, steps, query.logprobs)
    texts += [answer.tokens[i] or words.EOS_TEXT for i in steps]
    shown = [text if row is None else _name(query, row[0]) for text, row in zip(texts, rows, strict=True)]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if row is None else row[0].logprob for row in rows],
        "tokens": shown,
        "top_logprobs": [None if row is None else {_name(query, r): r.logprob for r in row} for row in rows],
    }


def _chat_logprobs(query: Query, answer: Answer, steps: range) -> dict[str, Any] | None:
    if query.logprobs is None:
        return None

    def entry(r: Ranked) -> dict[str, Any]:
        return {"token": _name(query, r), "logprob": r.logprob, "bytes": list(r.text.encode())}

    rows = _generated(query, 0, answer, steps, query.logprobs)
    content = []
    for row in rows:
        likely = sorted(row, key=lambda r: r.rank)[: query.logprobs]
        content.append(entry(row[0]) | {"top_logprobs": [entry(r) for r in likely]})
    return {"content": content}


class FakeStream:
    """Makes the server-sent events of one streamed answer, in HTTP chunks."""

    def __init__(self, query: Query, name: str, created: int, model: str, answers: list[Answer]) -> None:
        self.query, self.answers = query, answers
        kind = "chat.completion.chunk" if query.chat else "text_completion"
        self.base = {"id": name, "object": kind, "created": created, "model": model}
        self.top = dumps(self.base)[:-1]
        choice = b',"choices":[{"index":%d,' + (b'"delta":{"content":"' if query.chat else b'"text":"')
        self._heads = [b"data: " + self.top + choice % i for i in range(len(answers))]
        self._tail = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n\r\n'
        if not query.chat:
            self._tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null,' + (
                b'"prompt_token_ids":null,"token_ids":null}]}\n\n\r\n'
            )
        self._tail = b'"' + self._tail
        self._plain = query.plain
        self._sizes = [len(h) + len(self._tail) - 2 for h in self._heads]
        self._offsets = [0] * len(answers)

    def opening(self) -> bytes:
        """The chunks with the role, for chat."""
        if not self.query.chat:
            return b""
        parts = []
        for i in range(len(self.answers)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            event = self.base | {"choices": [choice]}
            ids = self.query.ids(0) if self.query.return_token_ids else None
            event |= {"prompt_token_ids": ids, "prompt_text": None}
            if self.query.continuous_usage:
                event["usage"] = usage(sum(self.query.prompt_tokens), 0)
            parts.append(framed(dumps(event)))
        return b"".join(parts)

    def step(self, step: int) -> bytes:
        """The chunks of the `step`-th token (from 1), one for each choice that still has one."""
        if len(self.answers) == 1 and self._plain and step < self.answers[0].count:
            escaped = self.answers[0].escaped[step - 1]
            size = self._sizes[0] + len(escaped)
            return b"%x\r\n%b%b%b" % (size, self._heads[0], escaped, self._tail)
        return b"".join(self._event(i, step) for i, a in enumerate(self.answers) if step <= a.count)

    def _event(self, i: int, step: int) -> bytes:
        answer = self.answers[i]
        if self._plain and step < answer.count:
            escaped = answer.escaped[step - 1]
            return b"%x\r\n%b%b%b" % (self._sizes[i] + len(escaped), self._heads[i], escaped, self._tail)
        query, at, last = self.query, i // self.query.n, step == answer.count
        finish = answer.finish_reason if last else None
        text, steps = answer.texts[step - 1], range(step - 1, step)
        ids = [answer.ids()[step - 1]] if query.return_token_ids else None
        choice: dict[str, Any] = {"index": i}
        if query.chat:
            delta: dict[str, Any] = {"reasoning" if step <= query.thoughts else "content": text}
            if query.call:
                part = _call(query.call[0], text, answer.key) if step == 1 else {"function": {"arguments": text}}
                delta = {"tool_calls": [{"index": 0, **part}]}
            choice |= {"delta": delta, "logprobs": _chat_logprobs(query, answer, steps)}
            choice["finish_reason"] = finish
            if last:
                choice["stop_reason"] = answer.stop_reason
            choice["token_ids"] = ids
        else:
            echo = query.echo and step == 1
            logprobs = _completion_logprobs(query, at, answer, steps, self._offsets[i], echo)
            if logprobs:
                self._offsets[i] = logprobs["text_offset"][-1] + len(answer.tokens[step - 1] or words.EOS_TEXT)
            if echo and not query.return_token_ids:
                text = query.prompts[at].decode("utf-8", "replace") + text
            prompt_ids = query.ids(at) if query.return_token_ids and step == 1 else None
            choice |= {"text": text, "logprobs": logprobs, "finish_reason": finish}
            choice |= {"stop_reason": answer.stop_reason if last else None, "prompt_token_ids": prompt_ids}
            choice["token_ids"] = ids
        event: dict[str, Any] = {**self.base, "choices": [choice]}
        if query.continuous_usage:
            event["usage"] = usage(query.prompt_tokens[at], step)
        if last and not query.include_usage:
            event["system_fingerprint"] = FINGERPRINT
        return framed(dumps(event))

    def closing(self) -> bytes:
        """The usage chunk if it was asked for, and the end."""
        parts = []
        if self.query.include_usage:
            spent = usage(sum(self.query.prompt_tokens), sum(a.count for a in self.answers))
            parts.append(
                framed(dumps(self.base | {"choices": [], "usage": spent, "system_fingerprint": FINGERPRINT}))
            )
        parts.append(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return b"".join(parts)


def framed(data: bytes) -> bytes:
    """One server-sent event in one HTTP chunk."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)

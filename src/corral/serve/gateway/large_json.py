"""What routing needs of a large JSON body, found while it arrives: decoding it at once would hold up all streams.

Only the fields of the outermost object are told apart. What they hold is followed to its end by its quotes and
brackets, and is otherwise the server's to check: of a body that is valid JSON both find the same fields, and the
server refuses any other. A body that could be taken for another model's is refused here: two fields `model`, or one
`Model`.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import msgspec

LARGE_BYTES = 1 << 20  # a smaller body is decoded at once, in a few milliseconds
MOST_FIELDS = 1000  # of the outermost object
MOST_NESTED = 1 << 20  # lists and objects that hold others
LONGEST_NAME = 256  # bytes, as written; a longer one matters to nobody

_space = re.compile(rb"[ \t\r\n]*+").match
_text = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL).match  # to its quote, or to where the body ends for now
_scalar = re.compile(rb'[^\]\[{}",: \t\r\n]*+').match
# to the next bracket or text that does not end yet; texts, and lists and objects of numbers, are passed over
_flat = re.compile(rb'[^"{}[\]]*+(?:(?:"(?:[^"\\]++|\\.)*+"|[\[{][^"{}[\]]*+[\]}])[^"{}[\]]*+)*+', re.DOTALL).match
_opening, _closing = re.compile(rb"[\[{]++").match, re.compile(rb"[\]}]++").match
_name = msgspec.json.Decoder(str).decode
_QUOTE, _COLON, _COMMA, _OPEN, _END = b'":,{}'


class BadBodyError(ValueError):
    """A body that is not a JSON object, or too deep, or with numbers and texts that JSON does not have."""


class LargeJsonReader:
    """Finds the fields of the JSON object that arrives in `body`."""

    __slots__ = ("_body", "_end", "_nested", "_problem", "_spans", "_steps")

    def __init__(self, body: bytearray) -> None:
        self._body = body
        self._spans: dict[str, tuple[int, int]] = {}
        self._nested = self._end = 0
        self._problem: BadBodyError | None = BadBodyError("it ends too early")
        self._steps: Generator[None, None, int] | None = self._object()

    def advance(self) -> None:
        """The body has grown."""
        try:
            if self._steps is not None:
                next(self._steps)
        except StopIteration as end:
            self._steps, self._problem, self._end = None, None, end.value
        except BadBodyError as error:
            self._steps, self._problem = None, error

    def fields(self, most_bytes: int) -> tuple[dict[str, msgspec.Raw], dict[str, int]]:
        """The fields of the whole body, each at most so many bytes of it, and how long they are."""
        self.advance()
        if self._problem is not None:
            raise self._problem
        rest = self._body[self._end : self._end + LARGE_BYTES]
        if rest.strip(b" \t\r\n") or len(rest) == LARGE_BYTES:
            raise BadBodyError("something follows its end")
        cut = {
            name: msgspec.Raw(bytes(self._body[start : min(end, start + most_bytes)]))
            for name, (start, end) in self._spans.items()
        }
        return cut, {name: end - start for name, (start, end) in self._spans.items()}

    def _object(self) -> Generator[None, None, int]:
        """Where the outermost object ends; yields where more of the body is needed."""
        body = self._body
        at = yield from self._after_space(0)
        if body[at] != _OPEN:
            raise BadBodyError("it is not an object")
        at = yield from self._after_space(at + 1)
        for _ in range(MOST_FIELDS):
            if body[at] == _END:
                return at + 1
            if body[at] != _QUOTE:
                raise BadBodyError(f"a name is expected at byte {at:,}")
            start, at = at, (yield from self._end_of_text(at + 1))
            name = _decoded_name(bytes(body[start:at])) if at - start <= LONGEST_NAME else ""
            at = yield from self._after_space(at)
            if body[at] != _COLON:
                raise BadBodyError(f"a colon is expected at byte {at:,}")
            start = yield from self._after_space(at + 1)
            at = yield from self._end_of_value(start)
            if name.lower() == "model" and (name != "model" or name in self._spans):
                raise BadBodyError("it names a model more than once, or in a field that is not 'model'")
            self._spans[name] = (start, at)
            at = yield from self._after_space(at)
            if body[at] == _COMMA:
                at = yield from self._after_space(at + 1)
            elif body[at] != _END:
                raise BadBodyError(f"a comma or the end is expected at byte {at:,}")
        raise BadBodyError(f"it has more than {MOST_FIELDS:,} fields")

    def _after_space(self, at: int) -> Generator[None, None, int]:
        while (at := _space(self._body, at).end()) >= len(self._body):  # type: ignore[union-attr]  # it always matches
            yield
        return at

    def _end_of_text(self, at: int) -> Generator[None, None, int]:
        body = self._body
        while (at := _text(body, at).end()) >= len(body) or body[at] != _QUOTE:  # type: ignore[union-attr]
            yield
        return at + 1

    def _end_of_value(self, at: int) -> Generator[None, None, int]:
        body, depth = self._body, 0
        if body[at] == _QUOTE:
            return (yield from self._end_of_text(at + 1))
        if body[at] not in b"[{":
            while (at := _scalar(body, at).end()) >= len(body):  # type: ignore[union-attr]  # it always matches
                yield
            return at
        while True:
            if at == len(body):
                yield
            elif run := _opening(body, at):
                depth, at = depth + run.end() - at, run.end()
            elif run := _closing(body, at):
                closed = min(depth, run.end() - at)
                depth, at = depth - closed, at + closed
                if not depth:
                    return at
            else:
                at = yield from self._end_of_text(at + 1)
            self._nested += 1
            if self._nested > MOST_NESTED:
                raise BadBodyError(f"it has more than {MOST_NESTED:,} lists and objects in others")
            at = _flat(body, at).end()  # type: ignore[union-attr]  # it always matches


def _decoded_name(written: bytes) -> str:
    try:
        return _name(written)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadBodyError(str(error)[:200]) from None

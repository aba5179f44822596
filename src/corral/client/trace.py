"""Traces: requests with their times and lengths, one JSON object per line, as measured elsewhere and replayed here.

    {"time_s": 0.5, "prompt_tokens": 100, "output_tokens": 200}
    {"timestamp": 500, "input_length": 100, "output_length": 200}     the same request: milliseconds, as Mooncake's
    {"time_s": 0.5, "tokens": 300}                                    where only the sum counts

The one reader of `corral bench`, `corral simulate` and `corral fleet simulate`. Times may begin anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import DataError
from corral.base.files import existing_file
from corral.base.untrusted import parse_json, plain

LATEST_S = 1e15
LONGEST_TOKENS = 10**8
LONGEST_LINE = 1 << 20
REMEDY = (
    'Write {"time_s": 0.5, "prompt_tokens": 100, "output_tokens": 200},'
    ' or with milliseconds {"timestamp": 500, "input_length": 100, "output_length": 200}.'
)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace; where only the sum is known, all of it stands as the prompt."""

    time_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def read_trace(path: str | Path, *, sums: bool = False, ordered: bool = False) -> Iterator[TracedRequest]:
    """The requests of a file, line by line.

    With `sums`, a line may give `tokens` in place of both lengths; with `ordered`, times that go back are refused.
    """
    before_s, some = -LATEST_S, False
    try:
        with existing_file(path).open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                where = f"line {number} of {path}"
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{where} is longer than {LONGEST_LINE:,} bytes.", "Write one request per line.")
                if not line.strip():
                    continue
                found = _request(line, where, sums)
                if ordered and found.time_s < before_s:
                    times = f"{found.time_s:g} s after {before_s:g} s"
                    raise DataError(f"{where} is earlier than the one before: {times}.", "Sort it by time.")
                before_s, some = found.time_s, True
                yield found
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Check its permissions.") from None
    if not some:
        raise DataError(f"{path} contains no requests.", "Give a file with at least one line.")


def _request(line: bytes, where: str, sums: bool) -> TracedRequest:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8 text.", "Save the file as UTF-8.") from None
    body = parse_json(text, where, remedy=REMEDY)
    if not isinstance(body, dict):
        raise DataError(f"{where} is not a JSON object: {_shown(body)}.", REMEDY)
    if "timestamp" in body:
        time_s, names = _number(body, "timestamp", where) / 1000, ("input_length", "output_length")
    else:
        time_s, names = _number(body, "time_s", where), ("prompt_tokens", "output_tokens")
    if sums and "tokens" in body:
        found = TracedRequest(time_s, _length(body, "tokens", where), 0)
    else:
        found = TracedRequest(time_s, _length(body, names[0], where), _length(body, names[1], where))
    if not found.tokens:
        raise DataError(f"{where} has a request of no tokens: {_shown(body)}.", "Leave it out.")
    return found


def _number(body: dict[str, Any], name: str, where: str) -> float:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LATEST_S <= value <= LATEST_S:
        raise _unusable(body, name, where)
    return float(value)


def _length(body: dict[str, Any], name: str, where: str) -> int:
    value = _number(body, name, where)
    if not value.is_integer() or not 0 <= value <= LONGEST_TOKENS:
        raise _unusable(body, name, where)
    return int(value)


def _unusable(body: dict[str, Any], name: str, where: str) -> DataError:
    return DataError(f'{where} has no usable "{name}": {_shown(body.get(name, body))}.', REMEDY)


def _shown(value: Any) -> str:
    return plain(json.dumps(value), 80)

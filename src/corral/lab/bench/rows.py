"""The raw row of one request: everything a summary is made of, one JSON line each.

Times are nanoseconds after the start of the run on the monotonic clock. `chunk_ns` has one entry per streamed chunk
that carried a token. A failed request has `error` (its kind) and no tokens; it is never averaged in.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from corral.base.errors import DataError


class RequestRow(msgspec.Struct, gc=False, omit_defaults=True):
    """One request as it went."""

    n: int
    intended_ns: int  # when it was due
    asked_ns: int  # when it was given to the client: where latencies start, as in `vllm bench serve`
    sent_ns: int  # when its bytes were written
    done_ns: int
    chunk_ns: list[int] = []
    input_tokens: int = 0
    output_tokens: int = 0
    asked_input: int | None = None  # None: unknown beforehand
    asked_output: int = 0
    cached_tokens: int | None = None
    finish: str = ""
    turn: int = 0
    error: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def lag_s(self) -> float:
        """How much later than intended the request left: the generator's own fault."""
        return (self.sent_ns - self.intended_ns) / 1e9

    @property
    def ttft_s(self) -> float:
        return (self.chunk_ns[0] - self.asked_ns) / 1e9

    @property
    def e2el_s(self) -> float:
        return (self.chunk_ns[-1] - self.asked_ns) / 1e9

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_ns[-1] - self.chunk_ns[0]) / 1e9 / (self.output_tokens - 1)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RequestRow)


def write_rows(path: Path, rows: Iterable[RequestRow]) -> None:
    try:
        with path.open("wb") as file:
            for row in rows:
                file.write(_ENCODER.encode(row) + b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}.", "Free space, or choose another home."
        ) from error


def read_rows(path: Path) -> list[RequestRow]:
    rows = []
    try:
        with path.open("rb") as file:
            for line in file:
                rows.append(_DECODER.decode(line))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Was the run moved?") from error
    except msgspec.MsgspecError as error:
        raise DataError(f"line {len(rows) + 1} of {path} is not a row: {error}.", "Restore the file.") from error
    return rows

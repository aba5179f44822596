"""What a failed request means: for the row, for the endpoint, for the whole job.

    ROW       the row is at fault (HTTP 400): error file, at once
    AGAIN     bad luck (5xx, abort, cut answer, timeout): try again later, a bounded number of times
    LATER     the server asks for patience (429, 503): try again, with less at once; not the row's fault
    GONE      the connection broke while the row was under way: try again when the server is back; counts a little,
              so that a row that kills the engine does not do so for ever
    AWAY      the server cannot be reached, or somebody else has its port: wait for it; counts nothing
    FATAL     nothing will ever work (key refused, model unknown): stop

The table of errors themselves is in `corral.client.errors`.
"""

from __future__ import annotations

import enum

from corral.client.errors import (
    KeyRefusedError,
    OverloadedError,
    RequestError,
    ServerGoneError,
    StrangerError,
    TimedOutError,
    UnknownModelError,
    UnknownPathError,
)


class Verdict(enum.Enum):
    ROW = "row"
    AGAIN = "again"
    LATER = "later"
    GONE = "gone"
    AWAY = "away"
    FATAL = "fatal"


def judge(error: RequestError) -> Verdict:
    """What to do after this error."""
    if isinstance(error, (ServerGoneError, TimedOutError)) and not error.reached:
        return Verdict.AWAY
    if isinstance(error, StrangerError):
        return Verdict.AWAY
    if isinstance(error, ServerGoneError):
        return Verdict.GONE
    if isinstance(error, OverloadedError):
        return Verdict.LATER
    if isinstance(error, (KeyRefusedError, UnknownModelError, UnknownPathError)):
        return Verdict.FATAL
    return Verdict.AGAIN if error.retryable else Verdict.ROW

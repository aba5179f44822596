"""The one tree of errors that users see.

Every error says what failed, with which value, and what to do next. The command line catches `CorralError`
once, prints the message and the remedy, and exits with the class's code; a traceback appears only under `--debug`.

    CorralError                 1   something failed that has no better name
    ├── UsageError              2   a value the user gave cannot be used
    ├── NotFoundError           3   no such deployment, model, engine, profile, input file
    ├── ConflictError           4   the name, port, lock or file is held by somebody else
    ├── DoesNotFitError         5   the model cannot run on that hardware as asked
    ├── AccessError             6   a gated model, a missing token, a refused key
    ├── EngineError             7   the engine is missing, broken, or refused an argument
    ├── LaunchError             8   a deployment ended before it was ready, or died
    ├── UnreachableError        9   a server, host or registry did not answer
    ├── DataError              10   an input file is malformed, or a file could not be read or written
    └── UncountedError         11   a model whose size does not follow from what is known of it
    (interrupted by Ctrl-C)   130
"""

from __future__ import annotations

from typing import Any, ClassVar

INTERRUPTED = 130
BARELY_FITS = 12  # `plan`: it would run, with less than most uses need


class CorralError(Exception):
    """A failure: one sentence, which is also its `str()`, a remedy and, for programs, details."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details

    @property
    def in_full(self) -> str:
        """The sentence, and the remedy after it where there is one."""
        return f"{self.message} {self.remedy}".strip()

    def to_json(self) -> dict[str, Any]:
        """The error as `--json` prints it."""
        body = {"kind": type(self).__name__, "message": self.message, "remedy": self.remedy}
        return {"error": {**body, **self.details}, "exit_code": self.exit_code}


class UsageError(CorralError):
    exit_code = 2


class NotFoundError(CorralError):
    exit_code = 3


class ConflictError(CorralError):
    exit_code = 4


class DoesNotFitError(CorralError):
    exit_code = 5


class AccessError(CorralError):
    exit_code = 6


class EngineError(CorralError):
    exit_code = 7


class LaunchError(CorralError):
    exit_code = 8


class UnreachableError(CorralError):
    exit_code = 9


class DataError(CorralError):
    exit_code = 10


class UncountedError(CorralError):
    exit_code = 11

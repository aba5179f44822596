"""An answer that is not the one that was asked for, in OpenAI's shape."""

from __future__ import annotations

import re
from typing import Any

_PATH = re.compile(r"(?<![\w:/.~-])/(?:[^\s/'\"`]+/)+")


class Refusal(Exception):  # noqa: N818 - an answer, not an error of ours
    """Ends a request with a status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": None}}


def without_paths(text: str) -> str:
    """A text for clients: where the server keeps a file is not theirs to know, only what it is called."""
    return _PATH.sub("…/", text)

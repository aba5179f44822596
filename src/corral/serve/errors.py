"""Errors in the form of OpenAI's API, as the gateway and the ASGI servers answer them."""

from __future__ import annotations

from typing import Any


def error_body(message: str, kind: str, code: int | str | None = None, param: str | None = None) -> dict[str, Any]:
    """The JSON body of an error; `kind` is OpenAI's `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

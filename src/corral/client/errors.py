"""What can go wrong with one request, each with its remedy and whether trying again can help.

    RequestError
    ├── ServerGoneError      9  retry   refused, reset, or closed before an answer
    ├── TimedOutError        9  retry   no bytes for too long, or no end in time
    ├── OverloadedError      9  retry   429 or 503, with the server's Retry-After
    ├── CutStreamError       9  retry   the answer broke off (EOF before [DONE], body too short)
    ├── AbortedError         7  retry   finish_reason "abort": the engine dropped the request
    ├── ServerFailedError    7  retry   5xx, or an error chunk inside a stream that began with 200
    ├── MalformedReplyError  7  retry   200 with something that is not an answer
    ├── KeyRefusedError      6          401 or 403
    ├── StrangerError        6          another user of this machine holds the port: no key is sent
    ├── UnknownModelError    3          404 for the model's name
    ├── UnknownPathError     3          404 for the path
    ├── PromptTooLongError   2          400, with the numbers
    └── BadRequestError      2          400 and other 4xx, in the server's words

No failed request is reported as a success with less text. Each error is also one of the tree in `corral.base.errors`.
`error_body` writes the errors of Corral's own servers, in OpenAI's shape.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from corral.base.errors import AccessError, CorralError, EngineError, NotFoundError, UnreachableError, UsageError


class RequestError(CorralError):
    """One request failed."""

    retryable: ClassVar[bool] = False
    status: int | None = None
    answer: bytes = b""  # the server's own, where there is one


class ServerGoneError(RequestError, UnreachableError):
    """`reached` is False when no connection could be made: the request cannot have done anything."""

    retryable = True
    reached: bool = True


class TimedOutError(RequestError, UnreachableError):
    """`reached` is False when the time passed before there was a connection."""

    retryable = True
    reached: bool = True


class OverloadedError(RequestError, UnreachableError):
    """The server is overloaded; `retry_after_s` is how long to wait, if it said so."""

    retryable = True
    retry_after_s: float | None = None


class CutStreamError(RequestError, UnreachableError):
    retryable = True


class AbortedError(RequestError, EngineError):
    retryable = True


class ServerFailedError(RequestError, EngineError):
    retryable = True


class MalformedReplyError(RequestError, EngineError):
    retryable = True


class KeyRefusedError(RequestError, AccessError):
    pass


class StrangerError(RequestError, AccessError):
    """Another user holds the server's port; the server itself may come back."""


class UnknownModelError(RequestError, NotFoundError):
    pass


class UnknownPathError(RequestError, NotFoundError):
    pass


class PromptTooLongError(RequestError, UsageError):
    """`limit_tokens` is the context length, `prompt_tokens` what was sent (None if the server did not say)."""

    limit_tokens: int | None = None
    prompt_tokens: int | None = None


class BadRequestError(RequestError, UsageError):
    pass


# vLLM 0.32: "maximum context length is 8192 tokens. However, your prompt contains 9000 input tokens". Before 0.20:
# "… However, you requested 9100 tokens (9000 in the messages, 100 in the completion)"; "prompt (length 9000) is
# longer than the maximum model length of 8192".
_TOO_LONG = re.compile(
    r"maximum context length|longer than the maximum model length|exceeds model's maximum context", re.I
)
_LIMIT = re.compile(r"(?:context length is|model length of|context length \()\s*(\d+)", re.I)
_PROMPT = re.compile(
    r"contains (?:at least )?(\d+) input tokens|\(length (\d+)\)|(\d+) in the |Input length \((\d+)\)", re.I
)


def error_body(message: str, kind: str, code: int | str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body of an error answer as OpenAI's API and vLLM write it: the one shape for all of Corral's servers."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


LARGEST_ANSWER_BYTES = 1 << 16


def _message_and_code(body: bytes) -> tuple[str, Any]:
    """The server's message and code, from vLLM's, OpenAI's or FastAPI's error shape."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:300].decode("utf-8", "replace").strip(), None
    error = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)[:2000], error.get("code")
    return str(error)[:2000], None


def error_from_status(
    status: int, body: bytes, retry_after: bytes | None, where: str, model: str = ""
) -> RequestError:
    """The error for an HTTP status other than 200."""
    message, _ = _message_and_code(body)
    error = _from_status(status, message, where, model)
    error.status, error.answer = status, body[:LARGEST_ANSWER_BYTES]
    error.details["status"] = status
    if isinstance(error, OverloadedError) and retry_after:
        try:
            error.retry_after_s = max(0.0, float(retry_after))
            error.details["retry_after_s"] = error.retry_after_s
        except ValueError:  # an HTTP date: inference servers send seconds
            pass
    return error


def _from_status(status: int, message: str, where: str, model: str) -> RequestError:
    quote = f" It said: {message}" if message else ""
    if status in (401, 403):
        return KeyRefusedError(
            f"{where} refused the key (HTTP {status}).",
            "Check the key: --key-file, OPENAI_API_KEY, or the file `key` in the deployment's folder.",
        )
    if status == 404:
        if "model" in message.lower():
            return UnknownModelError(
                f"{where} does not serve {model or 'that model'}.{quote}", "GET /v1/models lists what it serves."
            )
        return UnknownPathError(f"{where} has no such path (HTTP 404).{quote}", "Check the base URL.")
    if status in (429, 503):
        return OverloadedError(
            f"{where} is overloaded (HTTP {status}).{quote}", "Try again later, or with less load."
        )
    if status >= 500:
        return ServerFailedError(f"{where} failed (HTTP {status}).{quote}", "Look at the engine's log.")
    if status < 400:
        return MalformedReplyError(
            f"{where} answered HTTP {status}.{quote}", "Check the base URL; is a proxy in between?"
        )
    if _TOO_LONG.search(message):
        return _too_long(message, where)
    return BadRequestError(f"{where} refused the request (HTTP {status}).{quote}", "Correct the request.")


def _too_long(message: str, where: str) -> PromptTooLongError:
    limit, prompt = _LIMIT.search(message), _PROMPT.search(message)
    limit_tokens = int(limit[1]) if limit else None
    prompt_tokens = int(next(g for g in prompt.groups() if g)) if prompt else None
    error = PromptTooLongError(
        f"the prompt is too long for {where}: {prompt_tokens or 'more'} tokens, and the context holds "
        f"{limit_tokens or 'fewer'}. It said: {message}",
        "Shorten the prompt, or serve the model with a longer context.",
        limit_tokens=limit_tokens,
        prompt_tokens=prompt_tokens,
    )
    error.limit_tokens, error.prompt_tokens = limit_tokens, prompt_tokens
    return error


def error_from_chunk(body: bytes, where: str) -> RequestError:
    """The error for an error chunk inside a stream that began with 200."""
    message, code = _message_and_code(body)
    if isinstance(code, int) and 400 <= code < 500 and code != 429:
        error: RequestError = _from_status(code, message, where, "")
    else:
        error = ServerFailedError(
            f"{where} failed in the middle of its answer: {message}",
            "Try again; if it stays, look at the engine's log.",
        )
    error.status = code if isinstance(code, int) else None
    return error

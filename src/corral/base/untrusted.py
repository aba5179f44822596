"""Untrusted input: bounded JSON, and text without control characters.

It comes from another machine (a node's answer, a courier's event, a hub's page) or from a file that anybody may have
written or damaged. Hostile input must not use up all memory, end a command with a traceback, or control the user's
terminal. Which names and numbers are allowed in a value is decided by the decoder of its kind; all decoders use this
module.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from corral.base.errors import DataError

DEEPEST = 64  # levels of lists and objects
LONGEST_NUMBER = 40  # characters
MOST_BYTES = 64 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str, most: int | None = None) -> str:
    """The text with every control character but tab and newline shown as �; its beginning, where it is longer."""
    if not text.isascii() or not text.isprintable():
        text = _CONTROL.sub("�", text.replace("\r\n", "\n"))
    return text if most is None or len(text) <= most else text[:most] + " …"


def parse_json(
    data: bytes | str, what: str, most_bytes: int = MOST_BYTES, remedy: str = "", infinities: bool = False
) -> Any:
    """The value of a JSON text; `what` names it in the error. Endless numbers are refused, and NaN and infinities
    where they are not expected.
    """
    if len(data) > most_bytes:
        raise DataError(f"{what} has {len(data):,} bytes; at most {most_bytes:,} are read.", remedy)
    try:
        constant = float if infinities else _finite
        value = json.loads(data, parse_int=_whole, parse_float=_finite, parse_constant=constant)
    except RecursionError:
        raise DataError(f"{what} is nested more than {DEEPEST} levels deep.", remedy) from None
    except ValueError as error:  # also for bytes that are not UTF-8
        raise DataError(f"{what} is not valid JSON: {plain(str(error), 200)}", remedy) from None
    if deeper_than(value, DEEPEST):
        raise DataError(f"{what} is nested more than {DEEPEST} levels deep.", remedy)
    return value


def plain_json(value: Any) -> Any:
    """The value with all its texts and keys made `plain`."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): plain_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain_json(one) for one in value]
    return value


def last_object(text: str, what: str, most_bytes: int = MOST_BYTES, remedy: str = "") -> dict[str, Any]:
    """The object in the last line that begins with a brace; what a login shell prints before it is skipped."""
    line = next((row for row in reversed(text.split("\n")) if row.startswith("{")), "")
    if not line:
        raise DataError(f"{what} holds no answer.", remedy)
    value: dict[str, Any] = plain_json(parse_json(line, what, most_bytes, remedy))
    return value


def _whole(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    """A number with a point or an exponent; refuses NaN, Infinity and -Infinity."""
    value = float(text) if len(text) <= LONGEST_NUMBER else math.inf
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a number")
    return value


def deeper_than(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        level = [child for one in level if isinstance(one, (dict, list)) for child in _children(one)]
        if not level:
            return False
    return True


def _children(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value

"""Numbers of tokens as people say them: 32768, or 32k."""

from __future__ import annotations

import re

from corral.base.errors import UsageError

_TIMES = {"": 1, "k": 1 << 10, "m": 1 << 20}


def token_count(text: str) -> int:
    """The number, at least 1; `k` stands for 1,024, as in the names of context lengths."""
    read = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if read is None or int(read[1]) < 1:
        raise UsageError(f"{text!r} is not a number of tokens.", "Give one such as 32768, or 32k (32,768).")
    return int(read[1]) * _TIMES[read[2]]

"""Whether what a command printed has the shape of what its page shows.

Numbers, paths, addresses, the width of columns and what a model answers may differ; other words may not. `…` in a
page stands for anything within a line, and alone in its line for any number of lines.
"""

from __future__ import annotations

import re

__all__ = ["difference", "shape"]

ANY = "…"
_ADDRESS = re.compile(r"https?://[\w.:-]+")
_PATH = re.compile(r"(?<![\w/])[~.]?/[\w./~+-]+")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_ANSWER = re.compile(r"(?<=answered  )\S.*")
_RULE = re.compile(r"[─━═┄╌_-]{3,}")


def shape(line: str) -> str:
    """A line without what may differ from one machine, or run, to another."""
    for found, instead in ((_ANSWER, "TEXT"), (_ADDRESS, "URL"), (_PATH, "PATH"), (_RULE, "---"), (_NUMBER, "0")):
        line = found.sub(instead, line)
    return re.sub(r"\s+", " ", line).strip()


def difference(shown: tuple[str, ...], printed: str) -> str:
    """What the page shows and the command does not print, or an empty string."""
    left = [shape(line) for line in printed.splitlines() if line.strip()]
    free = True  # the page may begin in the middle
    for line in shown:
        if line.strip() == ANY:
            free = True
            continue
        at = next((index for index, other in enumerate(left) if _alike(line, other)), None)
        if at is None or (at > 0 and not free):
            return f"the page shows\n  {line}\nthe command prints\n  " + "\n  ".join(left[:30])
        left, free = left[at + 1 :], False
    return ""


def _alike(shown: str, printed: str) -> bool:
    parts = [re.escape(shape(part)) for part in shown.split(ANY)]
    return re.fullmatch(r"\s?.*\s?".join(parts), printed) is not None

"""The text that Prometheus reads (exposition format 0.0.4, and the additions of OpenMetrics), as samples.

A page comes from another machine. A line that is not one whole sample is skipped, and so is a value that no counter
or gauge of a server can have: NaN, an infinity, anything beyond 1e18. Timestamps and exemplars are read over. What is
longer than the bounds below is left out. Lines end at a line feed only: a label may hold any other separator.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

__all__ = ["Sample", "samples"]

LARGEST_PAGE_BYTES = 16 << 20  # a server of 64 engines writes about 4 MiB
LONGEST_LINE = 1 << 16
LARGEST_VALUE = 1e18

_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*+")
_QUOTED = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LABEL = re.compile(rf"([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+({_QUOTED})")
_PAIR = rf"[A-Za-z_][A-Za-z0-9_]*+[ \t]*+=[ \t]*+{_QUOTED}"
_LABELS = rf"\{{[ \t]*+(?P<labels>(?:{_PAIR}[ \t]*+(?:,[ \t]*+|(?=\}})))*+)\}}"
_REST = re.compile(
    rf"(?:[ \t]*+{_LABELS}[ \t]*+|[ \t]++)"
    r"(?P<value>[-+]?[0-9.]++(?:[eE][-+]?[0-9]++)?)"
    r"(?:[ \t]++[-+]?[0-9][0-9.eE+-]*+)?"  # a timestamp
    r"(?:[ \t]++#.*+)?"  # an exemplar
    r"[ \t\r]*+"
)
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series."""

    name: str
    label_text: str  # as it stands between the braces
    value: float

    @property
    def labels(self) -> dict[str, str]:
        return {name: _plain(quoted) for name, quoted in _LABEL.findall(self.label_text)}


def _plain(quoted: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], quoted[1:-1])


def samples(page: bytes, wanted: Container[str]) -> Iterator[Sample]:
    """The samples of the wanted names, in the order of the page."""
    for line in page[:LARGEST_PAGE_BYTES].decode("utf-8", "replace").split("\n"):
        name = _NAME.match(line)
        if name is None or name[0] not in wanted or len(line) > LONGEST_LINE:
            continue
        rest = _REST.fullmatch(line, name.end())
        if rest is None:
            continue
        try:
            value = float(rest["value"])
        except ValueError:
            continue
        if abs(value) <= LARGEST_VALUE:
            yield Sample(name[0], rest["labels"] or "", value)

"""The text that Prometheus reads (exposition format 0.0.4, and the additions of OpenMetrics): its reader and writer.

One reader for the agent on a node and for Corral. A page comes from another machine: a line that is not one whole
sample is skipped, and so is a value that no counter or gauge of a server can have (NaN, an infinity, anything beyond
1e18). Timestamps and exemplars are read over. What is longer than the bounds below is left out. Lines end at a line
feed only: a label may hold any other separator.

`load_figures` is what a page says about a server's requests so far: how many, how long, how much of them was cached.
The agent keeps a line of these every few minutes, and Corral compares two. They are counters and lengths only: no
text of a request is in them.

Standard library only: the file is part of what travels to nodes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Any, Container, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Tuple

LARGEST_PAGE_BYTES = 16 << 20  # a server of 64 engines writes about 4 MiB
LONGEST_LINE = 1 << 13
LARGEST_VALUE = 1e18

NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
PAIR = r'[A-Za-z_][A-Za-z0-9_]*[ \t]*=[ \t]*"[^"\\]*(?:\\.[^"\\]*)*"'
LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"')
REST = re.compile(
    r"(?:[ \t]*\{[ \t]*(?P<labels>(?:" + PAIR + r"[ \t]*(?:,[ \t]*|(?=\})))*)\}[ \t]*|[ \t]+)"
    r"(?P<value>[-+]?[0-9.]{1,40}(?:[eE][-+]?[0-9]{1,6})?)"
    r"(?:[ \t]+[-+]?[0-9][0-9.eE+-]*)?"  # a timestamp
    r"(?:[ \t]+#.*)?"  # an exemplar
    r"[ \t\r]*"
)
ESCAPED = re.compile(r"\\(.)")


class Sample(NamedTuple):
    """One value of one series."""

    name: str
    label_text: str  # as it stands between the braces
    value: float

    @property
    def labels(self) -> Dict[str, str]:
        return {name: plain(value) for name, value in LABEL.findall(self.label_text)}


def plain(value: str) -> str:
    """A label's value without its escapes."""
    return ESCAPED.sub(lambda found: "\n" if found.group(1) == "n" else found.group(1), value)


def samples(page: bytes, wanted: Container[str]) -> Iterator[Sample]:
    """The samples of the wanted names, in the order of the page."""
    for line in page[:LARGEST_PAGE_BYTES].decode("utf-8", "replace").split("\n"):
        name = NAME.match(line)
        if name is None or name.group() not in wanted or len(line) > LONGEST_LINE:
            continue
        rest = REST.fullmatch(line, name.end())
        if rest is None:
            continue
        try:
            value = float(rest.group("value"))
        except ValueError:
            continue
        if abs(value) <= LARGEST_VALUE:
            yield Sample(name.group(), rest.group("labels") or "", value)


COUNTERS = {
    "vllm:request_success_total": "finished",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
}
HISTOGRAMS = {
    "vllm:request_prompt_tokens_bucket": "prompts",
    "vllm:request_generation_tokens_bucket": "outputs",
}


def load_figures(page: bytes) -> Dict[str, Any]:
    """Counters, added up over the engines; histograms `{bound: requests up to it}`; what the page lacks is absent."""
    seen = {(one.name, one.label_text): one for one in samples(page, (*COUNTERS, *HISTOGRAMS)) if one.value >= 0}
    found: Dict[str, Any] = {}
    for one in seen.values():
        if one.name in COUNTERS:
            name = COUNTERS[one.name]
            found[name] = found.get(name, 0.0) + one.value
        else:
            bound = one.labels.get("le", "")
            buckets = found.setdefault(HISTOGRAMS[one.name], {})
            buckets[bound] = buckets.get(bound, 0.0) + one.value
    return found


# vLLM's bucket bounds, in seconds
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                  480.0, 960.0, 1920.0, 7680.0)  # fmt: skip


def label_text(labels: Mapping[str, str]) -> str:
    """What stands between the braces of a series."""
    return ",".join('%s="%s"' % (name, escaped(value)) for name, value in labels.items())


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metric_lines(name: str, kind: str, text: str, series: Iterable[Tuple[Mapping[str, str], float]]) -> List[str]:
    """A gauge or counter with all its series; `text` is its help."""
    lines = ["# HELP %s %s" % (name, text), "# TYPE %s %s" % (name, kind)]
    return lines + ["%s{%s} %s" % (name, label_text(labels), float(value)) for labels, value in series]


class Histogram:
    """Counts by bucket, with their sum."""

    def __init__(self, bounds: Tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: Mapping[str, str], headed: bool = True) -> List[str]:
        """Its series; without the `headed` lines where another series of the same name came before."""
        total, lines = 0, ["# HELP %s %s" % (name, name), "# TYPE %s histogram" % name] if headed else []
        shared = label_text(labels)
        for bound, count in zip([repr(bound) for bound in self.bounds] + ["+Inf"], self.counts):  # noqa: B905 - Python 3.8
            total += count
            lines.append('%s_bucket{%s,le="%s"} %s' % (name, shared, bound, float(total)))
        lines.append("%s_count{%s} %s" % (name, shared, float(total)))
        lines.append("%s_sum{%s} %s" % (name, shared, self.sum))
        return lines

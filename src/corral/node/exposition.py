"""Prometheus metrics pages (exposition format 0.0.4, and the additions of OpenMetrics): their reader and writer.

One reader for the agent on a node and for Corral. A page comes from another machine: a line that is not one whole
sample is skipped, and so is a value that no counter or gauge of a server can have (NaN, an infinity, anything beyond
1e18). Timestamps and exemplars are skipped. What exceeds the bounds below is left out. Lines end at a line feed only:
a label may hold any other separator.

A gateway's figures have names of their own, so that what Prometheus adds up over engines has no request twice. Here
they are read as vLLM's: one page is of one server, and whoever reads it need not know which kind.

Of vLLM's page, `live_figures` reads what a server does now, `load_figures` its requests so far: how many, how long,
how much of them was cached. Only counts and lengths: no text of a request is in them.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Any, Container, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Tuple

LARGEST_PAGE_BYTES = 16 << 20  # a server of 64 engines writes about 4 MiB
LONGEST_LINE = 1 << 13
LARGEST_VALUE = 1e18

ENGINE, GATEWAY = "vllm:", "corral_gateway_"  # how names of metrics begin
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
    label_text: str  # the text between the braces
    value: float

    @property
    def labels(self) -> Dict[str, str]:
        return {name: plain(value) for name, value in LABEL.findall(self.label_text)}


def plain(value: str) -> str:
    """A label's value without its escapes."""
    return ESCAPED.sub(lambda found: "\n" if found.group(1) == "n" else found.group(1), value)


def samples(page: bytes, wanted: Container[str]) -> Iterator[Sample]:
    """The samples of the wanted names, in the order of the page; a gateway's go by vLLM's names."""
    for line in page[:LARGEST_PAGE_BYTES].decode("utf-8", "replace").split("\n"):
        found = NAME.match(line)
        if found is None:
            continue
        name = found.group()
        if name.startswith(GATEWAY):
            name = ENGINE + name[len(GATEWAY) :]
        if name not in wanted or len(line) > LONGEST_LINE:
            continue
        rest = REST.fullmatch(line, found.end())
        if rest is None:
            continue
        try:
            value = float(rest.group("value"))
        except ValueError:
            continue
        if abs(value) <= LARGEST_VALUE:
            yield Sample(name, rest.group("labels") or "", value)


GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second: before 0.10
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


def distinct(page: bytes, wanted: Container[str]) -> List[Sample]:
    """The samples of the wanted names that are not negative; of a series that occurs twice, the last."""
    return list({one[:2]: one for one in samples(page, wanted) if one.value >= 0}.values())


def totals(rows: Iterable[Sample], names: Mapping[str, str]) -> Dict[str, float]:
    """Samples added up over the engines, under new names."""
    sums: Dict[str, float] = {}
    for one in rows:
        if one.name in names:
            sums[names[one.name]] = sums.get(names[one.name], 0.0) + one.value
    return sums


def live_figures(page: bytes) -> Dict[str, float]:
    """Requests and tokens added up over the engines, and the mean of their KV use; what the page lacks is absent."""
    rows = distinct(page, (*GAUGES, *KV_USE))
    figures = totals(rows, GAUGES)
    for name in KV_USE:
        uses = [one.value for one in rows if one.name == name]
        if uses:
            figures.setdefault("kv_use", sum(uses) / len(uses))
    return figures


def load_figures(page: bytes) -> Dict[str, Any]:
    """Counters added up over the engines; histograms `{bound: requests up to it}`; what the page lacks is absent."""
    rows = distinct(page, (*COUNTERS, *HISTOGRAMS))
    figures: Dict[str, Any] = dict(totals(rows, COUNTERS))
    for one in rows:
        if one.name in HISTOGRAMS:
            bound = one.labels.get("le", "")
            buckets = figures.setdefault(HISTOGRAMS[one.name], {})
            buckets[bound] = buckets.get(bound, 0.0) + one.value
    return figures


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

    def lines(self, name: str, labels: Mapping[str, str], text: str = "") -> List[str]:
        """Its series, after their help; without `text`, where another series of the same name came before."""
        total, lines = 0, ["# HELP %s %s" % (name, text), "# TYPE %s histogram" % name] if text else []
        shared = label_text(labels)
        for bound, count in zip([repr(bound) for bound in self.bounds] + ["+Inf"], self.counts):  # noqa: B905 - Python 3.8
            total += count
            lines.append('%s_bucket{%s,le="%s"} %s' % (name, shared, bound, float(total)))
        lines.append("%s_count{%s} %s" % (name, shared, float(total)))
        lines.append("%s_sum{%s} %s" % (name, shared, self.sum))
        return lines

"""Rows of requests, and the figures made of them, defined as in `vllm bench serve` (docs/bench.md) with its JSON
keys.

A row is everything that a summary is made of, one JSON line each. Its times are nanoseconds after the start of the
run on the monotonic clock; `chunk_ns` has one entry per streamed chunk with a token. A failed request has `error`
(its kind) and no tokens. Percentiles interpolate linearly between neighbouring values; the standard deviation is that
of the population. Latencies are those of complete answers only; failures are counted apart.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from corral.base.errors import DataError, UsageError
from corral.lab.bench.spec import METRICS, Slo

# what a file may say: years, and more tokens than any request has
Time = Annotated[int, msgspec.Meta(ge=-(10**18), le=10**18)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class RequestRow(msgspec.Struct, gc=False, omit_defaults=True):
    """One request with its times."""

    n: int
    intended_ns: Time  # when it was due
    asked_ns: Time  # when the client got it: latencies start here, as in `vllm bench serve`
    sent_ns: Time  # when its bytes were written
    done_ns: Time
    chunk_ns: list[Time] = []
    input_tokens: Tokens = 0
    output_tokens: Tokens = 0
    asked_input: Tokens | None = None  # None: unknown beforehand
    asked_output: Tokens = 0
    cached_tokens: Tokens | None = None
    finish: str = ""
    turn: int = 0
    error: str = ""
    message: str = ""
    writes: bool = True  # its answer has tokens; of others `chunk_ns` is the end alone

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def lag_s(self) -> float:
        """How much later than intended the request was sent: the lateness of the generator."""
        return (self.sent_ns - self.intended_ns) / 1e9

    @property
    def ttft_s(self) -> float:
        return (self.chunk_ns[0] - self.asked_ns) / 1e9

    @property
    def e2el_s(self) -> float:
        return (self.chunk_ns[-1] - self.asked_ns) / 1e9

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_ns[-1] - self.chunk_ns[0]) / 1e9 / (self.output_tokens - 1)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RequestRow)


def write_rows(path: Path, rows: Iterable[RequestRow]) -> None:
    try:
        with path.open("wb") as file:
            for row in rows:
                file.write(_ENCODER.encode(row) + b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}.", "Free space, or choose another home."
        ) from error


def read_rows(path: Path) -> list[RequestRow]:
    rows = []
    try:
        with path.open("rb") as file:
            for line in file:
                rows.append(_DECODER.decode(line))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Was the run moved?") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"line {len(rows) + 1} of {path} is not a row: {error}.", "Restore the file.") from error
    return rows


@dataclass(frozen=True)
class Spread:
    """The distribution of one metric, in milliseconds."""

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    percentiles: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Summary:
    """The figures of one run."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    lag: Spread
    queue: Spread  # from intended to sent: with a concurrency cap, the wait at the sender
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    mean_concurrency: float
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def input_throughput(self) -> float:
        return self.input_tokens / self.duration_s if self.duration_s else 0.0

    def of(self, metric: str) -> Spread:
        spread_of_metric: Spread = getattr(self, metric)
        return spread_of_metric


def percentile(ordered: Sequence[float], p: float) -> float:
    """A percentile of sorted values, by numpy's default method."""
    if not ordered:
        return 0.0
    at = (len(ordered) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values_s: Iterable[float], percentiles: Sequence[float]) -> Spread:
    """Statistics in milliseconds of values in seconds."""
    ordered = sorted(values_s)
    if not ordered:
        return Spread()
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in ordered) / len(ordered))
    cuts = tuple((p, percentile(ordered, p) * 1000) for p in percentiles)
    return Spread(len(ordered), mean * 1000, percentile(ordered, 50) * 1000, std * 1000, cuts)


def gaps_s(row: RequestRow) -> list[float]:
    """Inter-token latencies: between neighbouring chunks."""
    times = row.chunk_ns
    return [(b - a) / 1e9 for a, b in itertools.pairwise(times)]


def latencies_s(rows: Iterable[RequestRow]) -> dict[str, list[float]]:
    """TTFT, TPOT, ITL and E2EL of the requests that were answered."""
    good = [row for row in rows if row.ok and row.chunk_ns]
    return {
        "ttft": [row.ttft_s for row in good if row.writes],
        "tpot": [t for row in good if (t := row.tpot_s) is not None],
        "itl": [gap for row in good for gap in gaps_s(row)],
        "e2el": [row.e2el_s for row in good],
    }


def summarise(
    rows: Sequence[RequestRow],
    duration_s: float,
    percentiles: Sequence[float] = (50.0, 90.0, 99.0),
    goodput: Sequence[Slo] = (),
    heartbeat_s: Sequence[float] = (),
    capped: bool = False,
) -> Summary:
    """All figures of one run. `heartbeat_s` is how late the generator's own clock ticks came.

    `capped`: requests waited for their turn at the sender, which is not the generator's lag.
    """
    good = [row for row in rows if row.ok and row.chunk_ns]
    waits = [row.lag_s for row in rows if row.sent_ns]
    output = sum(row.output_tokens for row in good)
    total = output + sum(row.input_tokens for row in good)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    limits = [slo for slo in goodput if slo.metric != "itl"]  # a request has many ITLs
    peak_tokens, peak_requests = _peaks(good)
    busy = math.fsum(row.e2el_s for row in good)
    return Summary(
        duration_s=duration_s,
        completed=len(good),
        failed=len(rows) - len(good),
        input_tokens=total - output,
        output_tokens=output,
        request_throughput=len(good) * per_s,
        output_throughput=output * per_s,
        total_token_throughput=total * per_s,
        request_goodput=sum(_is_good(row, limits) for row in good) * per_s if limits else None,
        **{name: spread(values, percentiles) for name, values in latencies_s(good).items()},
        lag=spread([*(() if capped else waits), *heartbeat_s], percentiles),
        queue=spread(waits, percentiles),
        max_output_tokens_per_s=peak_tokens,
        max_concurrent_requests=peak_requests,
        mean_concurrency=busy * per_s,
        errors=dict(Counter(row.error or "no tokens" for row in rows if not (row.ok and row.chunk_ns))),
    )


def _is_good(row: RequestRow, slos: Sequence[Slo]) -> bool:
    for slo in slos:
        value = {"ttft": row.ttft_s, "tpot": row.tpot_s or 0.0, "e2el": row.e2el_s}[slo.metric]
        if value * 1000 > slo.limit_ms:
            return False
    return True


def _peaks(good: Sequence[RequestRow]) -> tuple[float, int]:
    """Most chunks in one second, and most requests that touched one second: vLLM's buckets."""
    if not good:
        return 0.0, 0
    begin = min(row.asked_ns for row in good)
    tokens: Counter[int] = Counter()
    requests: Counter[int] = Counter()
    for row in good:
        tokens.update((t - begin) // 1_000_000_000 for t in row.chunk_ns)
        requests.update(range((row.asked_ns - begin) // 10**9, (row.chunk_ns[-1] - begin) // 10**9 + 1))
    return float(max(tokens.values())), max(requests.values())


def statistic(summary: Summary, slo: Slo) -> float:
    """The value in ms that a service level limits."""
    spread_of_metric = summary.of(slo.metric)
    if not spread_of_metric.count:
        why = f"no answer had the two tokens that {slo.metric} needs" if summary.completed else "nothing was answered"
        raise UsageError(f"{slo} cannot be judged: {why}.", "Raise --output-len, or limit ttft or e2el.")
    if slo.statistic in ("mean", "median"):
        return float(getattr(spread_of_metric, slo.statistic))
    return dict(spread_of_metric.percentiles)[slo.percentile]


def _percentile_name(p: float) -> str:
    return str(int(p)) if int(p) == p else str(p)


def vllm_keys(summary: Summary) -> dict[str, Any]:
    """The figures under the keys of `vllm bench serve`, and some of our own."""
    s = summary
    body: dict[str, Any] = {
        "duration": s.duration_s,
        "completed": s.completed,
        "failed": s.failed,
        "total_input_tokens": s.input_tokens,
        "total_output_tokens": s.output_tokens,
        "request_throughput": s.request_throughput,
        "request_goodput": s.request_goodput,
        "output_throughput": s.output_throughput,
        "total_token_throughput": s.total_token_throughput,
        "max_output_tokens_per_s": s.max_output_tokens_per_s,
        "max_concurrent_requests": s.max_concurrent_requests,
    }
    pooled = s.e2el.count and not s.ttft.count  # answers without tokens
    for metric in ("e2el",) if pooled else METRICS:
        spread_of_metric = s.of(metric)
        body |= {f"{kind}_{metric}_ms": getattr(spread_of_metric, kind) for kind in ("mean", "median", "std")}
        body |= {f"p{_percentile_name(p)}_{metric}_ms": value for p, value in spread_of_metric.percentiles}
    body |= {"input_throughput": s.input_throughput, "mean_concurrency": s.mean_concurrency}
    body |= {"errors_by_kind": s.errors, "median_lag_ms": s.lag.median}
    body |= {f"p{_percentile_name(p)}_lag_ms": value for p, value in s.lag.percentiles}
    return body


def details(rows: Sequence[RequestRow]) -> dict[str, Any]:
    """The per-request lists of `vllm bench serve --save-detailed` (texts are not kept)."""
    complete = [row.ok and bool(row.chunk_ns) for row in rows]
    return {
        "input_lens": [row.input_tokens or row.asked_input or 0 for row in rows],
        "output_lens": [row.output_tokens for row in rows],
        "ttfts": [row.ttft_s if ok else 0.0 for row, ok in zip(rows, complete, strict=True)],
        "itls": [gaps_s(row) for row in rows],
        "latencies": [row.e2el_s if ok else 0.0 for row, ok in zip(rows, complete, strict=True)],
        "start_times": [row.asked_ns / 1e9 for row in rows],
        "queue_times": [max(0.0, row.lag_s) for row in rows],
        "errors": [row.message for row in rows],
    }


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope of a line by least squares, and its standard error; both 0 where there are too few points."""
    n = len(points)
    if n < 3:
        return 0.0, 0.0
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    sxx = sum((x - mean_x) ** 2 for x, _ in points)
    if not sxx:
        return 0.0, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sxx
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, math.sqrt(rest / (n - 2) / sxx)

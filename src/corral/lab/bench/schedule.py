"""Send times, computed before the first request from a seed: nanoseconds after the start.

As in `vllm bench serve`, gaps are gamma-distributed (shape `burstiness`; 1 is a Poisson process, large is even), and
the whole is scaled so that n requests take n / rate seconds: two seeds then offer the same load.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from corral.base.errors import UsageError
from corral.lab.bench.spec import LoadShape


def send_times(load: LoadShape, count: int, seed: int, stamps_s: Sequence[float | None] = ()) -> list[int]:
    """When each of `count` requests is due; `stamps_s` are a trace's own times."""
    if load.arrival == "trace":
        return _trace(load, count, stamps_s)
    if load.rate is None:
        return [0] * count
    gaps = _ramp(load, count) if load.arrival == "ramp" else _gaps(load, count, seed)
    return [int(t * 1e9) for t in itertools.accumulate(gaps)]


def drawn_gaps(load: LoadShape, seed: int) -> Iterator[float]:
    """Seconds from one request to the next, without end: even, Poisson, or gamma."""
    rate = load.rate or 1.0
    if load.arrival == "constant":
        yield from itertools.repeat(1 / rate)
    shape = load.burstiness if load.arrival == "gamma" else 1.0
    draw = random.Random(seed ^ 0x5EED)  # noqa: S311 - not for secrets
    while True:
        yield draw.gammavariate(shape, 1 / (rate * shape))


def _gaps(load: LoadShape, count: int, seed: int) -> list[float]:
    gaps = list(itertools.islice(drawn_gaps(load, seed), count))
    scale = count / (load.rate or 1.0) / sum(gaps) if load.arrival != "constant" else 1.0
    return [gap * scale for gap in gaps]


def _ramp(load: LoadShape, count: int) -> list[float]:
    first, last = load.rate or 1.0, load.ramp_to or 1.0
    return [1 / (first + (last - first) * n / max(1, count - 1)) for n in range(count)]


def _trace(load: LoadShape, count: int, stamps_s: Sequence[float | None]) -> list[int]:
    stamps = [s for s in stamps_s if s is not None]
    if len(stamps) < count:
        raise UsageError(
            "--arrival trace needs a time for every request.", 'Use a JSONL file whose lines have "timestamp".'
        )
    begin = min(stamps[:count])
    times = [round((s - begin) / load.speed * 1e9) for s in stamps[:count]]
    if times != sorted(times):
        raise UsageError("the times of the trace go backwards.", "Sort its lines by timestamp.")
    return times

"""Workloads of a tuning run: presets by name, a file, or what a deployment was asked in the last hour.

Of a deployment only lengths, how they vary, and a rate are known; no text. vLLM's counters only grow. The
deployment's agent writes a line of them every five minutes (`node/agent/probe`), and the difference from the line
of an hour ago is the last hour; for a younger engine it is the time since it started. The agent's own requests, one
token each, are subtracted.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.base.errors import DataError, UsageError
from corral.base.files import read_text
from corral.base.untrusted import parse_json
from corral.base.wording import duration
from corral.client.client import Client
from corral.client.client import run as run_loop
from corral.client.endpoint import Endpoint
from corral.client.metrics import read_page
from corral.lab.bench.spec import Workload
from corral.node.exposition import load_figures

SEEN = "seen"  # the workload's name
HOUR_S = 3600.0
FEWEST = 20  # requests; means of fewer are not used
SHARED_LEAST = 16  # tokens of a block on a GPU: shorter beginnings are never shared
WIDEST = 0.9  # a length varies by at most this share of its mean: uniform lengths go no further
OWN_PROMPT, OWN_OUTPUT = 2, 1  # tokens of the agent's question and its answer
_COUNTERS = ("finished", "prompt_tokens", "output_tokens", "prefix_queries", "prefix_hits", "own")


@dataclass(frozen=True)
class LoadSnapshot:
    """A server's counters at one moment."""

    t: float
    finished: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    own: float = 0.0
    prompts: Mapping[float, float] = field(default_factory=dict)  # requests of at most so many tokens
    outputs: Mapping[float, float] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> LoadSnapshot:
        """From the result of `load_figures`, or a line of it; ValueError and TypeError where it is malformed."""
        numbers = {name: _count(found.get(name, 0.0)) for name in _COUNTERS}
        tables = {
            name: {_bound(at): _count(n) for at, n in found.get(name, {}).items()} for name in ("prompts", "outputs")
        }
        return cls(_count(found["t"]), **numbers, **tables)  # type: ignore[arg-type]

    def since(self, before: LoadSnapshot) -> LoadSnapshot:
        """The difference between two snapshots."""
        grown = {name: getattr(self, name) - getattr(before, name) for name in _COUNTERS}
        tables = {
            name: {at: n - getattr(before, name).get(at, 0.0) for at, n in getattr(self, name).items()}
            for name in ("prompts", "outputs")
        }
        return LoadSnapshot(self.t - before.t, **grown, **tables)  # type: ignore[arg-type]


def _count(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e18:
        raise ValueError(f"{value!r} is not a counter")
    return float(value)


def _bound(text: str) -> float:
    value = math.inf if text == "+Inf" else float(text)
    if not value >= 0:
        raise ValueError(f"{text!r} is not a bound")
    return value


@dataclass(frozen=True)
class SeenLoad:
    """Mean lengths of the requests, how much they vary, and requests per second."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int  # of a prompt, found in the cache
    rate: float
    seconds: float = HOUR_S  # over which it was seen
    varies: float | None = None  # lengths, by ± this share; None: not known

    def workload(self, chat: bool, seed: int) -> Workload:
        """Prompts of these lengths, which vary as seen, or by ± a third where that is not known."""
        shared = self.shared_tokens >= SHARED_LEAST
        varies = 0.33 if self.varies is None else self.varies
        return Workload(
            dataset="prefix_repetition" if shared else "random", input_len=self.prompt_tokens,
            output_len=self.output_tokens, range_ratio=varies, prefix_len=self.shared_tokens if shared else 64,
            chat=chat, seed=seed,
        )  # fmt: skip

    @property
    def words(self) -> str:
        shared = f" ({self.shared_tokens:,} of them cached)" if self.shared_tokens else ""
        spread = "" if self.varies is None else f", lengths ± {self.varies:.0%}"
        return (
            f"{self.requests:,} requests in the last {duration(self.seconds)}, {self.rate:.3g} a second: "
            f"{self.prompt_tokens:,} prompt tokens{shared} and {self.output_tokens:,} output tokens on average"
            f"{spread}"
        )


def read_snapshots(file: Path) -> list[LoadSnapshot]:
    """The snapshots that the agent wrote, oldest first; damaged lines are skipped."""
    found = []
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                found.append(LoadSnapshot.of(json.loads(line)))
    return sorted(found, key=lambda one: one.t)


def seen_load(now: LoadSnapshot, snapshots: Sequence[LoadSnapshot], name: str, ready_at_s: float) -> SeenLoad:
    """The load of the last hour, or since the engine started at `ready_at_s` where that is less."""
    same = _of_one_engine([*snapshots, now])[:-1]
    began = LoadSnapshot(same[0].t if same else ready_at_s)  # the first line is written when the engine is ready
    grown = now.since(max((one for one in same if one.t <= now.t - HOUR_S), key=lambda one: one.t, default=began))
    requests = int(grown.finished - grown.own)
    prompt = (grown.prompt_tokens - OWN_PROMPT * grown.own) / max(1, requests)
    output = (grown.output_tokens - OWN_OUTPUT * grown.own) / max(1, requests)
    if requests < FEWEST or prompt < 1 or output < 1:
        raise UsageError(
            f"{name!r} has answered {max(0, requests)} requests in the last {duration(grown.t)}: too few to derive a "
            "workload.",
            "Name one: --workload chat, or --input-len and --output-len.",
        )
    share = grown.prefix_hits / grown.prefix_queries if grown.prefix_queries else 0.0
    shared = min(round(prompt) - 1, round(share * prompt))
    spreads = [_spread(table, grown.own) for table in (grown.prompts, grown.outputs) if table]
    varies = max((one for one in spreads if one is not None), default=None)
    return SeenLoad(requests, round(prompt), round(output), shared, requests / max(1.0, grown.t), grown.t, varies)


def _of_one_engine(line: Sequence[LoadSnapshot]) -> list[LoadSnapshot]:
    """The last snapshot, and those before it since the counters were last reset."""
    found = [line[-1]]
    for one in reversed(line[:-1]):
        if one.finished > found[0].finished or one.t > found[0].t:
            break
        found.insert(0, one)
    return found


def _spread(buckets: Mapping[float, float], own: float) -> float | None:
    """The share of their mean by which lengths vary, if evenly, from the middles of the buckets.

    The agent's own requests, the shortest ones, are left out.
    """
    below, lower, rows = 0.0, 0.0, []
    for upper, upto in sorted(buckets.items()):
        count = max(0.0, upto - below)
        taken = min(own, count)
        own -= taken
        rows.append(((lower + upper) / 2 if upper < math.inf else 1.5 * lower, count - taken))
        below, lower = upto, upper
    total = sum(count for _, count in rows)
    if not total:
        return None
    mean = sum(middle * count for middle, count in rows) / total
    variance = sum(count * (middle - mean) ** 2 for middle, count in rows) / total
    return round(min(WIDEST, math.sqrt(3 * variance) / mean), 2) if mean else None


def read_seen(endpoint: Endpoint, file: Path, name: str, ready_at_s: float) -> SeenLoad:
    """Read the server's counters now, and compare them with its agent's; `ready_at_s` is wall-clock time."""

    async def read() -> bytes:
        async with Client(endpoint) as client:
            return await read_page(client)

    snapshots = read_snapshots(file)
    found = load_figures(run_loop(read()))
    own = snapshots[-1].own if snapshots else 0.0
    return seen_load(LoadSnapshot.of({**found, "t": time.time(), "own": own}), snapshots, name, ready_at_s)


@dataclass(frozen=True)
class Preset:
    """Tokens of a prompt and of an answer, typical of a use; lengths vary by ± a third."""

    input_len: int
    output_len: int
    shared: int = 0  # of the prompt, the same for many

    @property
    def words(self) -> str:
        shared = f", the first {self.shared} of them shared" if self.shared else ""
        return f"{self.input_len} prompt tokens{shared}, {self.output_len} output tokens"


PRESETS = {
    "chat": Preset(512, 256, 128),
    "rag": Preset(4096, 256),
    "code": Preset(2048, 384),
    "summarise": Preset(6144, 384),
    "batch": Preset(512, 128),
}


def workload_of(word: str, chat: bool, seed: int) -> Workload:
    """A preset by its name, or a file of requests: a trace, a batch file, or prompts with one JSON object a line."""
    preset = PRESETS.get(word)
    if preset is not None:
        dataset = "prefix_repetition" if preset.shared else "random"
        return Workload(
            dataset=dataset, input_len=preset.input_len, output_len=preset.output_len, range_ratio=0.33,
            prefix_len=preset.shared or 64, chat=chat, seed=seed,
        )  # fmt: skip
    if "." not in word and "/" not in word:
        raise UsageError(f"there is no workload called {word!r}.", f"Known: {', '.join(PRESETS)}; or give a file.")
    return Workload(dataset=_kind(word), file=str(Path(word).expanduser().absolute()), chat=chat, seed=seed)


def _kind(file: str) -> str:
    """The dataset of a file, by its first line."""
    first = next((line for line in read_text(file).splitlines() if line.strip()), "")
    try:
        found = parse_json(first, file)
    except DataError:
        found = None
    names = set(found) if isinstance(found, dict) else set()
    if names & {"custom_id", "body"}:
        return "batch"
    return "trace" if names & {"timestamp", "time_s"} and "prompt" not in names else "custom"

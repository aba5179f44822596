"""The validity gate: every reason not to trust a run, named. A run is valid, to be read with caution, or invalid.

| problem | when | verdict |
|---|---|---|
| zero_tokens | no answer has a token | invalid |
| stopped | the run ended before all was sent (server gone, key refused, Ctrl-C) | invalid |
| failures | more failed than allowed (1%) | invalid |
| generator_lag | P99 of the generator's own lateness over 5 ms, and over 5% of the median TTFT | invalid |
| output_lengths | over 1% of the answers have another length than asked, though `ignore_eos` was set | invalid |
| input_lengths | the server counts other prompt lengths than asked | caution |
| words | the server has no tokenizer to ask: prompt lengths are not as asked | caution |
| prefix_cache | over 5% of prompt tokens came from the prefix cache, and none should have | invalid |
| few_samples | fewer than 5 requests lie beyond a percentile that was asked for | caution |
| warm_up | the first requests took over twice as long as the later ones | caution |
| other_traffic | the server answered other clients during the run | invalid |
| preemptions | the KV cache was full and requests started over | caution |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from corral.lab.bench.metrics import RequestRow, Summary, percentile
from corral.lab.bench.server_metrics import ServerDelta
from corral.lab.bench.spec import Spec

LAG_MS = 5.0
_LAG_SHARE = 0.05
_HIT_SHARE = 0.05
_BEYOND = 5


@dataclass(frozen=True)
class Problem:
    """One reason for doubt."""

    kind: str
    severity: str  # invalid | caution
    text: str


def verdict(problems: Sequence[Problem]) -> str:
    if any(problem.severity == "invalid" for problem in problems):
        return "invalid"
    return "caution" if problems else "valid"


def needed(p: float) -> int:
    """The samples that a percentile needs, so that it does not rest on single requests."""
    return math.ceil(_BEYOND / (1 - p / 100) - 1e-6)


def judge(
    spec: Spec,
    rows: Sequence[RequestRow],
    summary: Summary,
    server: ServerDelta | None,
    stopped: str = "",
    exact: bool = True,
) -> tuple[Problem, ...]:
    """All problems of a run, gravest first."""
    found = [
        *_complete(spec, summary, stopped),
        *_generator(summary),
        *_lengths(spec, rows, exact),
        *_server(spec, rows, summary, server),
        *_samples(spec, rows, summary),
    ]
    return tuple(sorted(found, key=lambda problem: problem.severity != "invalid"))


def _complete(spec: Spec, summary: Summary, stopped: str) -> list[Problem]:
    found = []
    if stopped:
        found.append(Problem("stopped", "invalid", stopped))
    if not (summary.output_tokens if spec.workload.writes else summary.completed):
        found.append(
            Problem(
                "zero_tokens",
                "invalid",
                "no answer has a token: nothing was measured" if spec.workload.writes else "nothing was answered",
            )
        )
    sent = summary.completed + summary.failed
    if sent and summary.failed / sent > spec.failures_allowed:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in summary.errors.items())
        text = f"{summary.failed} of {sent} requests failed ({kinds}); {spec.failures_allowed:.0%} are allowed"
        found.append(Problem("failures", "invalid", text))
    return found


def _generator(summary: Summary) -> list[Problem]:
    late_ms = dict(summary.lag.percentiles).get(99.0, max((v for _, v in summary.lag.percentiles), default=0.0))
    allowed = max(LAG_MS, _LAG_SHARE * (summary.ttft if summary.ttft.count else summary.e2el).median)
    if late_ms <= allowed:
        return []
    text = (
        f"the load generator itself was late: P99 {late_ms:.1f} ms, allowed {allowed:.1f} ms; use a less busy machine"
    )
    return [Problem("generator_lag", "invalid", text)]


def _lengths(spec: Spec, rows: Sequence[RequestRow], exact: bool) -> list[Problem]:
    good = [row for row in rows if row.ok]
    found = []
    wrong = [row for row in good if row.asked_output and row.output_tokens != row.asked_output]
    if spec.workload.ignore_eos and spec.workload.dataset != "batch" and len(wrong) > 0.01 * len(good):
        row = wrong[0]
        text = (
            f"{len(wrong)} of {len(good)} answers are not as long as asked "
            f"(request {row.n}: {row.output_tokens} tokens, asked {row.asked_output})"
        )
        found.append(Problem("output_lengths", "invalid", text))
    if not exact:
        text = "the server's tokenizer cannot be asked: prompts are words, their lengths as the server counts them"
        found.append(Problem("words", "caution", text))
    ranks = spec.workload.task == "rerank"  # query and document become one text, with a template of the model's
    added = {row.input_tokens - row.asked_input for row in good if row.asked_input is not None and not ranks}
    # a chat template adds a few tokens, and may merge one with the text
    slack = 2 if spec.workload.chat else 0
    if added and (max(added) - min(added) > slack or (added != {0} and not spec.workload.chat)):
        text = f"the server counts {min(added):+d} to {max(added):+d} tokens per prompt beside the lengths asked for"
        found.append(Problem("input_lengths", "caution", text))
    return found


def _server(spec: Spec, rows: Sequence[RequestRow], summary: Summary, server: ServerDelta | None) -> list[Problem]:
    found = []
    good = [row for row in rows if row.ok]
    cached = [row.cached_tokens for row in good if row.cached_tokens is not None]
    share = sum(cached) / max(1, summary.input_tokens) if cached else (server.prefix_hit_share if server else 0.0)
    if share > _HIT_SHARE and not spec.workload.shares_prefixes and spec.workload.synthetic:
        text = f"{share:.0%} of the prompt tokens came from the prefix cache: the seed was used before; use a new one"
        found.append(Problem("prefix_cache", "invalid", text))
    elif share > _HIT_SHARE and not spec.workload.shares_prefixes:
        text = f"{share:.0%} of the prompt tokens came from the prefix cache: the file was sent before, or repeats"
        found.append(Problem("prefix_cache", "caution", text))
    if server is None:
        return found
    if server.running_before >= 1:
        text = f"{server.running_before:.0f} requests of others were running when the measurement began"
        found.append(Problem("other_traffic", "invalid", text))
    elif spec.workload.task == "rerank":
        pass  # one request may be several to the engine
    elif server.finished > len(rows) * 1.01 + 1 or server.prompt_tokens > summary.input_tokens * 1.05 + 4096:
        text = f"the server finished {server.finished:.0f} requests while {len(rows)} were sent: others used it too"
        if not summary.failed:
            found.append(Problem("other_traffic", "invalid", text))
    if server.preemptions >= 1:
        text = f"the server preempted {server.preemptions:.0f} requests: its KV cache was full"
        found.append(Problem("preemptions", "caution", text))
    return found


def _samples(spec: Spec, rows: Sequence[RequestRow], summary: Summary) -> list[Problem]:
    found = []
    lacking = [p for p in spec.percentiles if summary.completed < needed(p)]
    if lacking and summary.completed:
        most = max(lacking)
        text = (
            f"{summary.completed} requests are too few for "
            f"{' and '.join(f'P{p:g}' for p in lacking)}: P{most:g} needs {needed(most)}"
        )
        found.append(Problem("few_samples", "caution", text))
    concurrency = spec.load.concurrency or 0
    good = [row for row in rows if row.ok and row.chunk_ns and not row.turn]
    if not spec.load.open and concurrency and len(good) >= 3 * concurrency and len(good) >= 8:
        ordered = sorted(good, key=lambda row: row.asked_ns)
        first = median(row.e2el_s / max(1, row.output_tokens) for row in ordered[:concurrency])
        later = percentile(sorted(row.e2el_s / max(1, row.output_tokens) for row in ordered[concurrency:]), 50)
        if later > 0 and first > 2 * later:
            text = (
                f"the first {concurrency} requests took {first / later:.1f} times as long as later ones: warm up more"
            )
            found.append(Problem("warm_up", "caution", text))
    return found

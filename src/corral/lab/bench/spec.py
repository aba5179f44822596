"""The spec of a measurement: the workload (what is sent), the load (when), and how it is judged.

A `Spec` is saved with its run and is enough to repeat it. Metrics are named as `vllm bench serve` names them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from corral.base.errors import UsageError
from corral.base.record import nearest

DATASETS = ("random", "sharegpt", "custom", "prefix_repetition", "batch", "multi_turn", "trace")
ARRIVALS = ("poisson", "constant", "gamma", "ramp", "trace")
METRICS = ("ttft", "tpot", "itl", "e2el")
TASKS = ("generate", "embed", "rerank", "classify")  # that can be measured


@dataclass(frozen=True)
class Workload:
    """What is sent. `seed` decides every prompt: two runs with one seed send the same bytes."""

    dataset: str = "random"
    file: str | None = None
    num_prompts: int = 100
    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0  # lengths vary by ± this share
    prefix_len: int = 64  # prefix_repetition: tokens shared by requests of one prefix
    num_prefixes: int = 10
    turns: int = 3  # multi_turn: requests of one conversation
    chat: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    task: str = ""  # what the requests are; empty: what the deployment is for

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            guesses = nearest(self.dataset, DATASETS) or DATASETS
            raise UsageError(f"there is no dataset {self.dataset!r}.", f"Known: {', '.join(guesses)}.")
        for name in ("num_prompts", "input_len", "output_len", "num_prefixes", "turns"):
            if not 1 <= getattr(self, name) <= 10**8:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} cannot be {getattr(self, name)}.", "Give a whole number, 1 or more.")
        if not 0 <= self.range_ratio < 1:
            raise UsageError(f"--range-ratio cannot be {self.range_ratio:g}.", "Give a number from 0 to below 1.")
        if not 0 <= self.prefix_len <= 10**8:
            raise UsageError(f"--prefix-len cannot be {self.prefix_len}.", "Give a whole number, 0 or more.")
        if self.file is None and self.dataset in ("sharegpt", "custom", "batch", "trace"):
            raise UsageError(f"--dataset {self.dataset} needs a file.", "Add --dataset-path FILE.")

    @property
    def writes(self) -> bool:
        """Whether answers have tokens."""
        return self.task in ("", "generate")

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests are meant to hit the prefix cache."""
        return self.dataset in ("prefix_repetition", "multi_turn")

    @property
    def longest_tokens(self) -> int | None:
        """The tokens of the longest request with its answer; None where they are in a file."""
        if self.file is not None:
            return None
        one = int((self.input_len + self.output_len * self.writes) * (1 + self.range_ratio))
        return one * (self.turns if self.dataset == "multi_turn" else 1) + self.shared_len

    @property
    def shared_len(self) -> int:
        """Tokens at the beginning of a prompt that other prompts share."""
        return self.prefix_len if self.dataset == "prefix_repetition" else 0

    @property
    def one_token(self) -> bool:
        """Whether every answer has one token only, so that there is no time between two."""
        return self.output_len == 1 and self.dataset not in ("custom", "batch", "trace")

    @property
    def synthetic(self) -> bool:
        return self.dataset in ("random", "prefix_repetition", "multi_turn", "trace")


@dataclass(frozen=True)
class LoadShape:
    """When it is sent: closed loop (`concurrency`), or open loop (`rate`, or a trace's own times).

    With both, the rate decides when, and requests past `concurrency` wait at the sender; the wait counts as queueing.
    """

    concurrency: int | None = None
    rate: float | None = None
    arrival: str = "poisson"
    burstiness: float = 1.0
    ramp_to: float | None = None
    speed: float = 1.0  # of a replayed trace
    seconds: float | None = None  # send nothing after this long

    def __post_init__(self) -> None:
        if self.arrival not in ARRIVALS:
            raise UsageError(f"there is no arrival {self.arrival!r}.", f"Known: {', '.join(ARRIVALS)}.")
        for name in ("concurrency", "rate", "burstiness", "ramp_to", "speed", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                flag = {"rate": "--request-rate", "speed": "--trace-speed"}.get(name, "--" + name.replace("_", "-"))
                raise UsageError(f"{flag} cannot be {value:.15g}.", "Give a number above 0.")
        if self.arrival == "ramp" and (self.rate is None or self.ramp_to is None):
            raise UsageError("a ramp needs its first and its last rate.", "Give --request-rate and --ramp-to.")

    @property
    def open(self) -> bool:
        return self.rate is not None or self.arrival == "trace"

    @property
    def label(self) -> str:
        if self.arrival == "trace":
            return "a replayed trace" + (f" at {self.speed:g}× its speed" if self.speed != 1 else "")
        if self.rate is None:
            return f"concurrency {self.concurrency}" if self.concurrency else "all at once"
        text = {
            "poisson": f"{self.rate:g} req/s, Poisson",
            "constant": f"{self.rate:g} req/s, evenly",
            "gamma": f"{self.rate:g} req/s, gamma {self.burstiness:g}",
            "ramp": f"{self.rate:g} to {self.ramp_to or 0:g} req/s",
        }[self.arrival]
        return text + (f", at most {self.concurrency} at once" if self.concurrency else "")


_SLO = re.compile(r"^(ttft|tpot|itl|e2el)(?:_(p\d+(?:\.\d+)?|mean|median))?=(\d+(?:\.\d+)?)(ms|s|us)?$")


@dataclass(frozen=True)
class Slo:
    """One service level: a statistic of a metric that stays at or below a limit."""

    metric: str
    statistic: str  # p99, mean, median; goodput has the limit for each request
    limit_ms: float

    @property
    def key(self) -> str:
        return f"{self.statistic}_{self.metric}_ms"

    @property
    def percentile(self) -> float:
        return float(self.statistic[1:]) if self.statistic.startswith("p") else 50.0

    def __str__(self) -> str:
        return f"{self.metric}_{self.statistic} ≤ {self.limit_ms:g} ms"


def parse_slos(text: str) -> tuple[Slo, ...]:
    """`ttft_p99=1s,tpot_p99=50ms` as service levels, in milliseconds unless a unit is given, p99 unless a statistic
    is.
    """
    found = []
    for part in filter(None, (p.strip() for p in text.replace(" ", ",").split(","))):
        match = _SLO.match(part.lower().replace(":", "="))
        if match is None:
            raise UsageError(f"{part!r} is not a service level.", "For example: ttft_p99=1s,tpot_p99=50ms.")
        metric, statistic, number, unit = match.groups()
        scale = {"s": 1000.0, "ms": 1.0, "us": 0.001, None: 1.0}[unit]
        if statistic and statistic.startswith("p"):
            if not 0 < float(statistic[1:]) < 100:
                raise UsageError(f"{part!r}: a percentile lies between 0 and 100.", "For example p99.")
            statistic = f"p{float(statistic[1:]):g}"  # as figures are named
        found.append(Slo(metric, statistic or "p99", float(number) * scale))
    if not found:
        raise UsageError("no service level was given.", "For example: ttft_p99=1s,tpot_p99=50ms.")
    return tuple(found)


def parse_percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not all(0 < p < 100 for p in found):
        raise UsageError(f"{text!r} is not a list of percentiles.", "For example: --percentiles 90,99.")
    return found


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    workload: Workload = field(default_factory=Workload)
    load: LoadShape = field(default_factory=LoadShape)
    warmup: int = 1
    percentiles: tuple[float, ...] = (90.0, 99.0)
    goodput: tuple[Slo, ...] = ()
    stall_s: float = 600.0
    failures_allowed: float = 0.01
    label: str = ""

    def for_task(self, task: str) -> Spec:
        """The spec for a model of this task; what has no meaning there is refused."""
        work = replace(self.workload, task=self.workload.task or task)
        if work.writes:
            return self
        if work.task not in TASKS:
            raise UsageError(
                f"a model that {_DOES.get(work.task, work.task)} cannot be measured.",
                f"`corral bench` sends texts, to models that {', '.join(map(_DOES.__getitem__, TASKS))}.",
            )
        if work.chat or work.dataset == "multi_turn" or work.dataset == "batch":
            what = "--chat" if work.chat else f"--dataset {work.dataset}"
            raise UsageError(
                f"{what} is for models that write; this one {_DOES[work.task]}.", "Use --dataset random or custom."
            )
        refuse_tokens(work, self.goodput)
        return replace(self, workload=work)


_DOES = {"generate": "writes", "embed": "embeds", "rerank": "ranks", "classify": "classifies",
         "transcribe": "transcribes"}  # fmt: skip


def refuse_tokens(work: Workload, slos: Sequence[Slo]) -> None:
    """Refuse service levels about tokens of answers that have none."""
    for slo in slos:
        if not work.writes and slo.metric != "e2el":
            raise UsageError(
                f"{slo.metric} cannot be limited: the model {_DOES[work.task]}, and its answers have no tokens.",
                "Limit e2el, the time of the whole answer.",
            )

"""Two folders of results, item by item: what a change of the model did to each task, with a 95% interval.

The interval is of the paired difference, over items: what items have in common cancels out, so it is far narrower
than two standard errors side by side. For values of 0 and 1 it is Agresti and Min's, which has a width also where no
item changed; otherwise Student's. Perplexities are compared by the sums of log-likelihoods that they are made of. How
a metric is made of its items is found by computing it again; one that is made otherwise gets no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import DataError, UsageError
from corral.base.wording import counted
from corral.lab.bench.compare import t_quantile
from corral.lab.bench.fingerprint import differences
from corral.lab.eval.store import EvalRecord, TaskResult, load_items, load_record

_LIMIT = 200  # items of a task that are kept
_Z = 1.96


@dataclass(frozen=True)
class MetricChange:
    """One metric of a task on both sides; `low` and `high` bound the difference where it has an interval."""

    task: str
    metric: str
    a: float
    b: float
    items: int  # in both
    higher_is_better: bool
    low: float | None = None
    high: float | None = None
    better: int = 0  # items
    worse: int = 0

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return "no interval"
        if self.low <= 0 <= self.high:
            return "no difference shown"
        return "better" if (self.difference > 0) == self.higher_is_better else "worse"

    @property
    def sentence(self) -> str:
        head = f"{self.task} {self.metric}: {self.a:.4g} → {self.b:.4g}"
        if self.low is None or self.high is None:
            return f"{head}; no interval, because it is no mean over items."
        change = f"{self.difference:+.4g} (95% interval {self.low:+.4g} to {self.high:+.4g})"
        moved = f"{counted(self.better, 'item')} better, {self.worse} worse"
        return f"{head}, {change} over {counted(self.items, 'item')}: {self.verdict}; {moved}."


@dataclass(frozen=True)
class ChangedItem:
    """An item whose value of a metric changed."""

    task: str
    metric: str
    item: int
    prompt: str
    target: str
    answers: tuple[str, str]
    values: tuple[float, float]


@dataclass(frozen=True)
class EvalComparison:
    """What differs between the results of two models."""

    changes: tuple[MetricChange, ...]
    items: tuple[ChangedItem, ...]
    differs: tuple[tuple[str, str, str], ...]  # of the models and settings: name, the one's value, the other's
    only: tuple[tuple[str, ...], tuple[str, ...]]  # tasks that one side alone has


def compared(one: Path, other: Path) -> EvalComparison:
    """Compare the tasks that both folders have."""
    a, b = load_record(one), load_record(other)
    common = [task for task in a.tasks if task in b.tasks]
    if not common:
        raise UsageError(
            f"{one} and {other} have no task in common.",
            f"The first has {', '.join(a.tasks) or 'none'}; the other {', '.join(b.tasks) or 'none'}.",
        )
    changes: list[MetricChange] = []
    items: list[ChangedItem] = []
    for task in common:
        pairs = _pairs(task, load_items(one, a.tasks[task]), load_items(other, b.tasks[task]))
        for key in a.tasks[task].metrics:
            if key in b.tasks[task].metrics:
                change, moved = _compare(task, key, a.tasks[task], b.tasks[task], pairs)
                changes.append(change)
                items += moved
    only = (tuple(t for t in a.tasks if t not in common), tuple(t for t in b.tasks if t not in common))
    return EvalComparison(tuple(changes), tuple(items), tuple(_differences(a, b, common)), only)


Item = Mapping[str, Any]
Pair = tuple[Item, Item]


def _pairs(task: str, ones: Sequence[Item], others: Sequence[Item]) -> list[Pair]:
    """The items of both sides, by number and filter; they must be of the same documents."""
    second = {(item["doc_id"], item["filter"]): item for item in others}
    pairs = [(item, second[key]) for item in ones if (key := (item["doc_id"], item["filter"])) in second]
    if any(a["doc_hash"] != b["doc_hash"] for a, b in pairs):
        raise DataError(
            f"the items of {task} are other documents on the two sides.", "Run both with the same data files."
        )
    if not pairs:
        raise DataError(f"the two sides have no item of {task} in common.", "Run both with the same --limit.")
    return pairs


def _compare(
    task: str, key: str, a: TaskResult, b: TaskResult, pairs: Sequence[Pair]
) -> tuple[MetricChange, list[ChangedItem]]:
    metric, _, filter_name = key.partition(",")
    pairs = [pair for pair in pairs if pair[0]["filter"] == filter_name and metric in pair[0] and metric in pair[1]]
    up = a.higher_is_better.get(metric, True)
    values = [(_parts(one[metric]), _parts(other[metric])) for one, other in pairs]
    sides = [a.metrics[key], b.metrics[key]]
    name = metric if filter_name == "none" else key
    if not values or not all(x and y for x, y in values):
        return MetricChange(task, name, sides[0], sides[1], len(pairs), up), []
    known = [(x, y) for x, y in values if x and y]
    whole = len(pairs) == a.items == b.items
    made = next((one for one in _MADE if not whole or _is_made(one, known, sides)), None)
    if made is None:
        return MetricChange(task, name, sides[0], sides[1], len(pairs), up), []
    sides = [made(_mean([pair[side] for pair in known])) for side in (0, 1)]
    low, high = _interval(known, made, sides[0])
    gains = [(y[0] / y[1] - x[0] / x[1]) * (1 if up or made is not _itself else -1) for x, y in known]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    change = MetricChange(task, name, sides[0], sides[1], len(pairs), up, low, high, better, worse)
    moved = sorted((pair for pair in zip(gains, pairs, strict=True) if pair[0]), key=lambda pair: -abs(pair[0]))
    return change, [_changed(task, metric, name, pair) for _, pair in moved[:_LIMIT]]


Value = tuple[float, float]  # of an item: a sum and its weight


def _parts(value: Any) -> Value | None:
    """A number, or a log-likelihood with its number of words or bytes."""
    if isinstance(value, bool | int | float):
        return (float(value), 1.0)
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(one, int | float) for one in value)
        and value[1]
    ):
        return (float(value[0]), float(value[1]))
    return None


def _mean(values: Sequence[Value]) -> float:
    return math.fsum(value for value, _ in values) / math.fsum(weight for _, weight in values)


def _itself(mean: float) -> float:
    return mean


def _perplexity(mean: float) -> float:
    return math.exp(-mean) if mean > -700 else math.inf


def _bits(mean: float) -> float:
    return -mean / math.log(2)


_MADE: tuple[Callable[[float], float], ...] = (_itself, _perplexity, _bits)


def _is_made(made: Callable[[float], float], values: Sequence[tuple[Value, Value]], sides: Sequence[float]) -> bool:
    """Whether both sides' figures are this function of the mean over items."""
    found = [made(_mean([pair[side] for pair in values])) for side in (0, 1)]
    return all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9) for x, y in zip(found, sides, strict=True))


def _interval(
    values: Sequence[tuple[Value, Value]], made: Callable[[float], float], before: float
) -> tuple[float | None, float | None]:
    """The bounds of the difference of the two sides."""
    count = len(values)
    if all(value in ((0.0, 1.0), (1.0, 1.0)) for pair in values for value in pair):
        up = sum(y[0] > x[0] for x, y in values)
        down = sum(y[0] < x[0] for x, y in values)
        middle = (up - down) / (count + 2)
        half = _Z * math.sqrt(up + down + 1 - (up - down) ** 2 / (count + 2)) / (count + 2)
        return middle - half, middle + half
    if count < 2:
        return None, None
    weight = math.fsum(x[1] for x, _ in values)
    change = _mean([(y[0] - x[0], x[1]) for x, y in values])
    spread = math.fsum((y[0] - x[0] - change * x[1]) ** 2 for x, y in values)
    half = t_quantile(count - 1) * math.sqrt(spread * count / (count - 1)) / weight
    start = _mean([x for x, _ in values])
    bounds = sorted(made(start + change + sign * half) - before for sign in (-1, 1))
    return bounds[0], bounds[1]


def _changed(task: str, metric: str, name: str, pair: Pair) -> ChangedItem:
    a, b = pair
    values = [_parts(one[metric]) or (0.0, 1.0) for one in pair]
    prompt = str(a["arguments"][0][0])
    return ChangedItem(
        task, name, int(a["doc_id"]), prompt[-400:], str(a["target"])[:200], (_answer(a), _answer(b)),
        (values[0][0] / values[0][1], values[1][0] / values[1][1]),
    )  # fmt: skip


def _answer(item: Item) -> str:
    """What the model said, or which choice it found likeliest."""
    found = item["filtered_resps"]
    if len(found) > 1 and all(isinstance(one, list) and len(one) == 2 for one in found):
        best = max(range(len(found)), key=lambda i: float(found[i][0]))
        return f"{item['arguments'][best][1]!s} ({float(found[best][0]):.3f})"
    one = found[0] if found else ""
    return f"{float(one[0]):.3f}" if isinstance(one, list) and len(one) == 2 else str(one)[:400]


def _differences(a: EvalRecord, b: EvalRecord, tasks: Sequence[str]) -> list[tuple[str, str, str]]:
    """What was not the same: model, settings, circumstances."""
    found = []
    for name in ("model", "engine", "revision", "number_format", "context", "chat_template"):
        one, other = str(getattr(a.model, name)), str(getattr(b.model, name))
        if one != other:
            found.append((name.replace("_", " "), one[:100], other[:100]))
    for task in tasks:
        mine, theirs = a.tasks[task], b.tasks[task]
        pairs = [(name, value, getattr(theirs.settings, name)) for name, value in vars(mine.settings).items()]
        pairs += [(name, getattr(mine, name), getattr(theirs, name)) for name in ("version", "items", "harness")]
        found += [(f"{task}: {name}", str(x), str(y)) for name, x, y in pairs if x != y]
    return [*found, *differences(a.model.fingerprint, b.model.fingerprint)]

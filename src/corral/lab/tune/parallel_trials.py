"""Several trials at once: which ones may run side by side, and on which hardware.

The next trial is a function of the trials made (`race`). A trial may begin beside others when it would come next for
every outcome of theirs, which is tried with several assumed outcomes. So a screen runs as wide as there is room, a
final in pairs, and nothing is decided before it is known.

Each trial has nodes or GPUs to itself, or several share the GPUs of a machine in turns: their servers start together
while nothing is measured, and are measured one by one. A start takes a minute and a measurement seconds, and most of
a start is work of single cores: four servers of an 8B model on an H200 were ready after 70 to 120 s together, one
alone after 57 s (docs/measurements/gpu-settings.md). A start would slow down a measurement, so neither happens beside
the other. Each server has its part of every GPU's memory, and a KV cache as the plan sizes it: vLLM would count what
the others allocate meanwhile as its own.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from math import exp
from threading import Condition

from corral.base.errors import CorralError, DoesNotFitError, UsageError
from corral.deploy.lifecycle.decision import DeployRequest, sized
from corral.deploy.targets.base import Queue, load_target
from corral.engines.flags import flag_name
from corral.lab.tune.race import Race, expected_costs, next_order
from corral.lab.tune.trials import Trial, TrialOrder, mean_score
from corral.plan.candidate import SHORTEST
from corral.plan.contract import UTILISATION, Plan
from corral.plan.hardware.inventory import NodeSlice

_OUTCOMES = ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (0.5, 2.0), (2.0, 0.5))  # of those under way, by turns


def next_beside(
    race: Race, trials: Sequence[Trial], under_way: Sequence[TrialOrder], in_turns: bool = False
) -> TrialOrder | None:
    """A trial that can begin now; None when it depends on those under way, or when there is none."""
    found = {
        next_order(race, [*trials, *_assumed(race, trials, under_way, factors, in_turns)]) for factors in _OUTCOMES
    }
    return found.pop() if len(found) == 1 else None


def _assumed(
    race: Race,
    trials: Sequence[Trial],
    under_way: Sequence[TrialOrder],
    factors: tuple[float, float],
    in_turns: bool,
) -> list[Trial]:
    """The trials under way with assumed outcomes; they run at the same time, except for measurements `in_turns`."""
    short_s, long_s = expected_costs(race, trials)
    made = []
    for at, order in enumerate(under_way):
        took_s = short_s if order.measure_s <= race.measure_s else long_s
        score = exp(mean_score(trials)) * factors[at % 2]
        further_s = max(order.measure_s, took_s - race.start_s) if in_turns else 0.0
        made.append(Trial(order.setup, order.purpose, score, took_s, spent_s=further_s if at else took_s))
    return made


MakeTrial = Callable[[TrialOrder, int, int], Trial]  # of an order, the trial's number, and its slot


def run_beside(
    race: Race,
    trials: list[Trial],
    slots: int,
    make: MakeTrial,
    begins: Callable[[int, TrialOrder], None],
    ended: Callable[[Trial], None],
    abandon: Callable[[], None],
    in_turns: bool = False,
) -> None:
    """Make trials, as many at once as there are slots, until there is nothing left to learn or no time.

    `abandon` stops the servers of those under way when an error or an interrupt ends this; their threads are joined.
    """
    under_way: dict[Future[Trial], tuple[TrialOrder, int]] = {}
    numbers, clock = itertools.count(len(trials) + 1), time.monotonic()

    def fill() -> None:
        orders = [order for order, _ in under_way.values()]
        while len(under_way) < slots and (order := next_beside(race, trials, orders, in_turns)):
            number = next(numbers)
            slot = min(set(range(slots)) - {taken for _, taken in under_way.values()})
            begins(number, order)
            under_way[pool.submit(make, order, number, slot)] = (order, slot)
            orders.append(order)

    with ThreadPoolExecutor(slots) as pool:
        try:
            fill()
            while under_way:
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    del under_way[future]
                    now = time.monotonic()
                    trials.append(replace(future.result(), spent_s=round(now - clock, 2)))
                    clock = now
                    ended(trials[-1])
                fill()
        except BaseException:
            abandon()
            raise


MOST_IN_TURNS = 4  # beyond, there is no room for what lies outside the budget (CUDA graphs, contexts)
KEPT = 0.97  # of the plan's KV cache: a plan is right within 2%
_KV_BYTES = "--kv-cache-memory-bytes"
_REMEDY = "Leave out --side-by-side."


def with_part(request: DeployRequest, slots: int) -> DeployRequest:
    """The request of one of several servers that share the memory of each GPU: the same with a smaller KV cache.

    Its longest request is what that cache holds, unless a context was asked for.
    """
    if any(flag_name(word) == _KV_BYTES for word in request.extra_args):
        raise UsageError(f"{_KV_BYTES} is for a server that has a GPU to itself.", _REMEDY)
    whole = sized(request)[1].plan
    share = min(whole.settings.gpu_memory_utilization, UTILISATION) / slots
    part = replace(request, fixed={**request.fixed, **_settings(whole), "gpu_memory_utilization": f"{share:.4f}"})
    try:
        plan = sized(part)[1].plan
    except DoesNotFitError as error:
        raise UsageError(f"{slots} servers do not fit the same GPUs: {error.message}", _REMEDY) from None
    if (plan.precision, plan.parallel) != (whole.precision, whole.parallel):
        text = f"{slots} servers fit the same GPUs only as {plan.parallel} in {plan.precision.weights}"
        raise UsageError(f"{text}, and one alone is {whole.parallel} in {whole.precision.weights}.", _REMEDY)
    held_tokens = int(KEPT * plan.memory.kv_cache_tokens_per_replica) - plan.settings.block_size
    context = min(plan.max_model_len, held_tokens // 256 * 256)
    fixed_length = request.fixed.get("max_model_len")
    context_wanted = fixed_length if fixed_length not in (None, "auto") else request.goal.context
    if context < (plan.max_model_len if context_wanted else min(SHORTEST, plan.model.max_context)):
        text = f"each of {slots} servers on the same GPUs holds {max(0, held_tokens):,} KV tokens"
        raise UsageError(f"{text}, a request may have {plan.max_model_len:,}.", f"{_REMEDY} Or shorten --context.")
    kept = int(KEPT * plan.memory.kv_cache_bytes_per_gpu)
    fixed = {**part.fixed, "max_model_len": str(context)}
    return replace(part, fixed=fixed, extra_args=(*part.extra_args, _KV_BYTES, str(kept)))


def _settings(plan: Plan) -> dict[str, str]:
    """Settings that a plan with less memory might choose differently."""
    names = ("max_num_seqs", "max_num_batched_tokens", "api_servers", "stream_interval", "max_graph_size")
    return {name: str(value) for name in names if (value := getattr(plan.settings, name)) is not None}


def refuse_part(request: DeployRequest, slots: int, seats: int, tokens: int | None) -> None:
    """Refuse a server that does not fit its part of the GPUs, or whose part cannot hold the load."""
    refuse_beyond(sized(with_part(request, slots))[1].plan, slots, seats, tokens)


def refuse_beyond(plan: Plan, slots: int, seats: int, tokens: int | None) -> None:
    """Refuse a load of known lengths that the part of the KV cache cannot hold: it would decide the result."""
    if tokens is None:
        return
    if tokens > plan.max_model_len:
        raise UsageError(
            f"{slots} servers on the same GPUs hold {plan.max_model_len:,} tokens of one request each, and the "
            f"longest here has {tokens:,}.",
            f"{_REMEDY} Or make requests shorter: --input-len, --output-len.",
        )
    room = int(KEPT * plan.memory.kv_cache_tokens)
    if room < (needed := seats * tokens):
        raise UsageError(
            f"{slots} servers on the same GPUs have {room:,} KV tokens each, and {seats:,} requests at once of "
            f"{tokens:,} tokens need {needed:,}.",
            f"{_REMEDY} Or give fewer requests at once: --concurrency {max(1, room // tokens)}.",
        )


class Turns:
    """Lets servers start, or one of them be measured; without shared hardware nothing waits."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._changed = Condition()
        self._starting = self._waiting = 0  # `_waiting`: waiting for a measurement, or being measured
        self._measuring = self._ended = False

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Wait until a server may start, beside other starts; those that are ready are measured first."""
        with self._changed:
            self._until(lambda: not self._waiting)
            self._starting += 1
        try:
            yield
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def measurement(self) -> Iterator[None]:
        """Wait until nothing else starts or is measured."""
        with self._changed:
            self._waiting += 1
            try:
                self._until(lambda: not self._starting and not self._measuring)
            except CorralError:
                self._waiting -= 1
                raise
            self._measuring = True
        try:
            yield
        finally:
            with self._changed:
                self._measuring = False
                self._waiting -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Wake up all that wait, with an error."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _until(self, may: Callable[[], bool]) -> None:
        if self._shared:
            self._changed.wait_for(lambda: self._ended or may())
        if self._ended:
            raise CorralError("the run was ended.", "Continue it: corral tune last.")


def shares_for(request: DeployRequest, slots: int) -> tuple[tuple[NodeSlice, ...], bool]:
    """A part of the hardware for each slot, and whether they are measured in turns.

    A job of a scheduler has nodes of its own. Otherwise the GPUs of one machine are divided, or their memory, where
    there are fewer GPUs than slots.
    """
    if slots == 1:
        return (), False
    target = load_target(request.target, request.target_options)
    if isinstance(target, Queue):
        return (NodeSlice(),) * slots, False
    here = target.inventory()
    remedy = "Leave out --side-by-side, or tune on SLURM, where each server is a job of its own."
    if here.gpu is None:
        raise UsageError("on the same cores, servers side by side would measure each other.", remedy)
    if here.nodes > 1:
        raise UsageError(f"servers side by side need one machine; here: {here.nodes} nodes.", remedy)
    each = here.gpus_per_node // slots
    if not each and slots > MOST_IN_TURNS:
        text = f"{here.gpus_per_node} x {here.gpu} hold {MOST_IN_TURNS} servers side by side at most, not {slots}."
        raise UsageError(text, f"Try --side-by-side {MOST_IN_TURNS}.")
    if not each:
        return (NodeSlice(),) * slots, True
    return tuple(NodeSlice(gpus=tuple(range(at * each, (at + 1) * each))) for at in range(slots)), False

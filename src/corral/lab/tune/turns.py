"""Several servers on the same GPUs: they start together while nothing is measured, and are measured one by one.

A start takes a minute and a measurement seconds, and most of a start is work of single cores: four servers of an 8B
model on an H200 were ready after 70 to 120 s together, one alone after 57 s (docs/log.md). What starts would take
time from what is measured, so neither happens beside the other. Each server has its part of every GPU's memory, and a
KV cache as the plan sizes it: vLLM would take what the others allocate meanwhile for its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Condition

from corral.base.errors import CorralError, DoesNotFitError, UsageError
from corral.deploy.lifecycle.bringup import Wish, sized
from corral.engines.flags import flag_name
from corral.plan.candidate import SHORTEST
from corral.plan.contract import UTILISATION, Plan

MOST_IN_TURNS = 4  # beyond, what lies outside the budget (CUDA graphs, contexts) has no room
KEPT = 0.97  # of the plan's KV cache: a plan is right within 2%
_KV_BYTES = "--kv-cache-memory-bytes"
_REMEDY = "Leave out --side-by-side."


def with_part(wish: Wish, places: int) -> Wish:
    """One of so many servers that share the memory of each GPU: the same server with less of a KV cache.

    Its longest request is what that cache holds, where no other was asked for.
    """
    if any(flag_name(word) == _KV_BYTES for word in wish.extra_args):
        raise UsageError(f"{_KV_BYTES} is for a server that has a GPU to itself.", _REMEDY)
    whole = sized(wish)[1].plan
    share = min(whole.settings.gpu_memory_utilization, UTILISATION) / places
    part = replace(wish, fixed={**wish.fixed, **_settings(whole), "gpu_memory_utilization": f"{share:.4f}"})
    try:
        plan = sized(part)[1].plan
    except DoesNotFitError as error:
        raise UsageError(f"{places} servers do not fit the same GPUs: {error.message}", _REMEDY) from None
    if (plan.precision, plan.parallel) != (whole.precision, whole.parallel):
        held = f"{places} servers fit the same GPUs only as {plan.parallel} in {plan.precision.weights}"
        raise UsageError(f"{held}, and one alone is {whole.parallel} in {whole.precision.weights}.", _REMEDY)
    held_tokens = int(KEPT * plan.memory.kv_cache_tokens_per_replica) - plan.settings.block_size
    context = min(plan.max_model_len, held_tokens // 256 * 256)
    said = wish.fixed.get("max_model_len")
    asked = said if said not in (None, "auto") else wish.goal.context
    if context < (plan.max_model_len if asked else min(SHORTEST, plan.model.max_context)):
        held = f"each of {places} servers on the same GPUs holds {max(0, held_tokens):,} KV tokens"
        raise UsageError(f"{held}, a request may have {plan.max_model_len:,}.", f"{_REMEDY} Or shorten --context.")
    kept = int(KEPT * plan.memory.kv_cache_bytes_per_gpu)
    fixed = {**part.fixed, "max_model_len": str(context)}
    return replace(part, fixed=fixed, extra_args=(*part.extra_args, _KV_BYTES, str(kept)))


def _settings(plan: Plan) -> dict[str, str]:
    """What a plan with less memory might choose otherwise."""
    names = ("max_num_seqs", "max_num_batched_tokens", "api_servers", "stream_interval", "max_graph_size")
    return {name: str(value) for name in names if (value := getattr(plan.settings, name)) is not None}


def refuse_part(wish: Wish, places: int, seats: int, tokens: int | None) -> None:
    """Refuse a server that does not fit its part of the GPUs, or whose part cannot hold the load."""
    refuse_beyond(sized(with_part(wish, places))[1].plan, places, seats, tokens)


def refuse_beyond(plan: Plan, places: int, seats: int, tokens: int | None) -> None:
    """Refuse a load, of known lengths, that a part of the KV cache cannot hold: it would be memory that is tuned."""
    if tokens is None:
        return
    if tokens > plan.max_model_len:
        raise UsageError(
            f"{places} servers on the same GPUs hold {plan.max_model_len:,} tokens of one request each, and the "
            f"longest here has {tokens:,}.",
            f"{_REMEDY} Or make requests shorter: --input-len, --output-len.",
        )
    room = int(KEPT * plan.memory.kv_cache_tokens)
    if room < (needed := seats * tokens):
        raise UsageError(
            f"{places} servers on the same GPUs have {room:,} KV tokens each, and {seats:,} requests at once of "
            f"{tokens:,} tokens need {needed:,}.",
            f"{_REMEDY} Or give fewer requests at once: --concurrency {max(1, room // tokens)}.",
        )


class Turns:
    """Who may start, and who may be measured; where hardware is not shared, everybody may."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._changed = Condition()
        self._starting = self._waiting = 0  # `_waiting`: for a measurement, or measured now
        self._measuring = self._ended = False

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Beside other starts; those that are ready are measured first."""
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
        """Alone."""
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
        """Let nobody wait any longer."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _until(self, may: Callable[[], bool]) -> None:
        if self._shared:
            self._changed.wait_for(lambda: self._ended or may())
        if self._ended:
            raise CorralError("the run was ended.", "Continue it: corral tune last.")

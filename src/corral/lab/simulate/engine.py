"""One engine of vLLM V1: waiting and running requests, a token budget, blocks of KV cache, preemption.

Decoding sequences come first, each with one token; what is left of the budget goes to prompts, in chunks, first come,
first served. A request is admitted when there are blocks for its whole prompt. Where a step finds too few, the
youngest request gives its blocks back and is computed again later. Sequences that decode all move by one token a
step, so nothing is done for each of them in each step: the engine jumps over all steps in which nothing begins or
ends, and an arrival cuts the jump where it falls. Tokens are streamed by API servers that take their time for each.

Not covered: speculative decoding, KV connectors, priorities, limits on long prompts, blocks of sliding windows.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from corral.lab.simulate.prefix_cache import PrefixCache
from corral.lab.simulate.requests import SimRequest
from corral.lab.simulate.steptime import StepTime


@dataclass(frozen=True)
class EngineShape:
    """The settings of one engine that decide what runs when."""

    token_budget: int = 8192
    max_seqs: int = 256
    block_size: int = 16
    blocks: int = 1 << 40
    prefix_cache: bool = True
    lookahead: bool = False  # a step is decided while the one before runs: an arrival waits for one more
    wake_s: float = 0.0  # by which the first step is longer when nothing ran before
    request_s: float = 0.0  # time of the API server for each request
    stream_s: float = 0.0  # and for each token that it streams

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_size


@dataclass(slots=True, eq=False)
class SimSequence:
    """A request inside an engine."""

    request: SimRequest
    member: int = 0  # of the fleet, that has it
    prefill_work: float = 0.0  # as the gateway counts it
    output_work: float = 0.0
    ready_s: float = 0.0  # when the engine has it
    order: int = 0
    target: int = 0  # tokens to compute before it decodes
    computed: int = 0
    made: int = 0
    finish_step: int = -1  # while it decodes
    residue: int = 0
    shared_blocks: int = 0  # of its blocks, those that count for its group
    admitted: bool = False
    first_s: float = math.nan
    cached: int = 0


class EngineWatcher(Protocol):
    """Receives what an engine did."""

    def first_token(self, sequence: SimSequence, at_s: float) -> None: ...

    def finished(self, sequence: SimSequence, at_s: float) -> None: ...


class SimEngine:
    """An engine as the module describes it; its driver calls `add` at a request's time and `settle` at `end_s`."""

    def __init__(self, shape: EngineShape, steps: StepTime, watcher: EngineWatcher) -> None:
        self.shape, self._steps, self._watcher = shape, steps, watcher
        self.now_s, self.end_s = 0.0, math.inf
        self.waiting: deque[SimSequence] = deque()
        self.preemptions = self.computed_tokens = self.cached_tokens = self.made_tokens = 0
        self._cache = PrefixCache(shape.block_size)
        self._groups = False
        self._prefilling: deque[SimSequence] = deque()
        self._decoding: list[tuple[int, int, SimSequence]] = []
        self._young: list[SimSequence] = []  # in the order in which they were let in
        self._count = self._kv = self._step = self._order = 0
        self._residues = [0] * shape.block_size
        self._reserved = 0  # blocks of prompts that are being computed
        self._discount = 0  # blocks of decoding sequences that count for their groups
        self._jump = 0  # steps of the current jump; 0 while a mixed step runs
        self._chunks: list[tuple[SimSequence, int]] = []
        self._decided_s, self._streamed_s = math.inf, -math.inf

    @property
    def running(self) -> int:
        return self._count + len(self._prefilling)

    @property
    def kv_use(self) -> float:
        """The share of blocks that are in use."""
        return 1 - self._free(0) / self.shape.blocks

    def fits(self, request: SimRequest) -> bool:
        return -(-(request.prompt + request.output) // self.shape.block_size) <= self.shape.blocks

    def add(self, sequence: SimSequence, at_s: float) -> None:
        """A request arrives at the engine; the caller has checked that it `fits`."""
        sequence.ready_s, sequence.target = at_s, sequence.request.prompt
        self.waiting.append(sequence)
        self._groups = self._groups or sequence.request.group >= 0
        if self.end_s == math.inf:
            self.now_s = at_s + self.shape.wake_s
            self._begin()
        elif self._jump > 1:
            cost = self._steps.decode(self._count)
            self._jump = cost.steps_within(self._kv, self._count, at_s - self.now_s, self._jump)
            self.end_s = self.now_s + cost.span(self._kv, self._count, self._jump)

    def settle(self) -> None:
        """End the current jump or mixed step: report its tokens, and begin the next."""
        steps, chunks = self._jump or 1, self._chunks
        tokens, self.now_s, self._chunks = self._count * steps, self.end_s, []
        self._step += steps
        self._kv += tokens
        done = [one for one, size in chunks if one.computed + size == one.target]
        seen_s = self._stream(steps, self._count + len(done))
        self.made_tokens += tokens + len(done)
        if self._groups:
            self._cache.shrink(self.shape.blocks - self._in_use(0))
        while self._decoding and self._decoding[0][0] <= self._step:
            finish_step, _, sequence = heapq.heappop(self._decoding)
            if sequence.finish_step == finish_step:
                self._retire(sequence, seen_s)
        for sequence, size in chunks:
            self._compute(sequence, size, seen_s)
        self._begin()

    def _stream(self, steps: int, tokens: int) -> float:
        """When the API server has streamed the tokens of the last step."""
        own_s = self.shape.stream_s * tokens
        if not own_s:
            return self.now_s
        self._streamed_s = max(self._streamed_s + steps * own_s, self.now_s + own_s)
        return self._streamed_s

    # what a step does to a sequence

    def _compute(self, sequence: SimSequence, size: int, seen_s: float) -> None:
        sequence.computed += size
        self.computed_tokens += size
        if sequence.computed < sequence.target:
            return
        request = sequence.request
        self._prefilling.remove(sequence)
        self._reserved -= self._own_blocks(sequence)
        sequence.made += 1
        if math.isnan(sequence.first_s):
            sequence.first_s = seen_s
            self._watcher.first_token(sequence, seen_s)
        if sequence.made >= request.output:
            self._release(sequence, sequence.target)
            self._watcher.finished(sequence, seen_s)
            return
        sequence.finish_step = self._step + request.output - sequence.made
        sequence.residue = (sequence.target - self._step) % self.shape.block_size
        self._residues[sequence.residue] += 1
        self._count += 1
        self._kv += sequence.target
        self._discount += sequence.shared_blocks
        heapq.heappush(self._decoding, (sequence.finish_step, sequence.order, sequence))

    def _leave_decoding(self, sequence: SimSequence, context: int) -> None:
        self._count -= 1
        self._kv -= context
        self._residues[sequence.residue] -= 1
        self._discount -= sequence.shared_blocks
        sequence.finish_step = -1

    def _retire(self, sequence: SimSequence, seen_s: float) -> None:
        context = sequence.request.prompt + sequence.request.output - 1
        self._leave_decoding(sequence, context)
        self._release(sequence, context)
        self._watcher.finished(sequence, seen_s)

    def _release(self, sequence: SimSequence, context: int) -> None:
        """Leave its blocks in the cache until others need the room."""
        sequence.admitted = False
        if not self._groups:
            return
        request, whole = sequence.request, context // self.shape.block_size
        if request.group >= 0 and self.shape.prefix_cache:
            kept = whole if request.grows else sequence.shared_blocks
            self._cache.release(request.group, kept)
            whole -= kept
        self._cache.leave(whole)

    def _own_blocks(self, sequence: SimSequence) -> int:
        return -(-sequence.target // self.shape.block_size) - sequence.shared_blocks

    # blocks

    def _decoding_blocks(self, steps: int) -> int:
        """Blocks of decoding sequences after so many more steps, those of groups included."""
        size, at = self.shape.block_size, self._step + steps
        short = sum([count * (-(residue + at) % size) for residue, count in enumerate(self._residues) if count])
        return (self._kv + steps * self._count + short) // size

    def _in_use(self, steps: int) -> int:
        return self._reserved + self._cache.pinned_blocks + self._decoding_blocks(steps) - self._discount

    def _free(self, steps: int) -> int:
        return self.shape.blocks - self._in_use(steps)

    def _fits_loosely(self, steps: int, further: int = 0) -> bool:
        """A quick bound that looks at no sequence: true only where there are enough blocks."""
        size = self.shape.block_size
        most = (self._kv + self._count * (steps + size - 1)) // size + 1
        return self._reserved + self._cache.pinned_blocks + most - self._discount + further <= self.shape.blocks

    def _steps_until_full(self, most: int) -> int:
        if self._fits_loosely(most):
            return most
        low, high = 1, most  # one step fits, after preemption
        while low < high:
            middle = (low + high + 1) // 2
            if self._free(middle) >= 0:
                low = middle
            else:
                high = middle - 1
        return low

    # what comes next

    def _begin(self) -> None:
        preempted = False
        while not self._fits_loosely(1) and self._free(1) < 0:
            self._preempt()
            preempted = True
        if not self.running:  # nothing is in flight: the next step is decided at once
            self._decided_s = math.inf
        early = self.shape.lookahead and bool(self.waiting) and self.waiting[0].ready_s > self._decided_s
        tokens = attended = 0
        if self._prefilling or (self.waiting and not preempted):
            tokens, attended = self._schedule(preempted)
        self._decided_s = self.now_s
        self._jump = 0
        if tokens:
            self.end_s = self.now_s + self._steps.mixed(self._count, self._kv, tokens, attended)
        elif self._count:
            self._jump = 1 if early else self._decode_steps()
            self.end_s = self.now_s + self._steps.decode(self._count).span(self._kv, self._count, self._jump)
        else:
            self.end_s = math.inf

    def _decode_steps(self) -> int:
        """The number of steps until something can end or begin."""
        while self._decoding[0][2].finish_step != self._decoding[0][0]:
            heapq.heappop(self._decoding)  # it was preempted
        return self._steps_until_full(self._decoding[0][0] - self._step)

    def _schedule(self, preempted: bool) -> tuple[int, int]:
        """Spend the budget on prompts; returns their tokens and the sum of their contexts."""
        budget = self.shape.token_budget - self._count
        attended = total = 0
        for sequence in self._prefilling:
            size = min(budget, sequence.target - sequence.computed)
            if size <= 0:
                break
            budget -= size
            total, attended = total + size, attended + self._give(sequence, size)
        while budget > 0 and self.waiting and not preempted and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            size = min(budget, sequence.target - sequence.computed)
            budget -= size
            total, attended = total + size, attended + self._give(sequence, size)
        return total, attended

    def _give(self, sequence: SimSequence, size: int) -> int:
        self._chunks.append((sequence, size))
        return size * sequence.computed + size * size // 2

    def _admit(self, sequence: SimSequence) -> bool:
        """Admit a request, where there is a seat and there are blocks for all of its prompt."""
        shape, request = self.shape, sequence.request
        if self.running >= shape.max_seqs or (shape.lookahead and sequence.ready_s > self._decided_s):
            return False
        grouped = request.group >= 0 and shape.prefix_cache
        shared = request.shared // shape.block_size if grouped else 0
        hit = self._cache.hit(request.group, min(request.shared, sequence.target - 1)) if grouped else 0
        needed = -(-sequence.target // shape.block_size) - shared
        needed += self._cache.further_pinned(request.group, shared) if grouped else 0
        if not self._fits_loosely(1, needed) and self._free(1) < needed:
            return False
        sequence.shared_blocks = shared
        sequence.computed = sequence.cached = hit * shape.block_size
        self.cached_tokens += sequence.cached
        if grouped:
            self._cache.use(request.group, sequence.shared_blocks)
        self._order += 1
        sequence.order, sequence.admitted = self._order, True
        self._reserved += self._own_blocks(sequence)
        self._prefilling.append(sequence)
        self._remember(sequence)
        return True

    def _remember(self, sequence: SimSequence) -> None:
        """Keep who can be preempted, the youngest last; finished ones are removed now and then."""
        self._young.append(sequence)
        if len(self._young) > 64 + 4 * self.shape.max_seqs:
            self._young = [one for one in self._young if one.admitted]

    def _preempt(self) -> None:
        """Take all blocks of the youngest request, which then is the first to wait."""
        sequence = self._young.pop()
        while not sequence.admitted:
            sequence = self._young.pop()
        request = sequence.request
        if sequence.finish_step >= 0:
            sequence.made = request.output - (sequence.finish_step - self._step)
            self._leave_decoding(sequence, request.prompt + sequence.made - 1)
        else:
            self._prefilling.remove(sequence)
            self._reserved -= self._own_blocks(sequence)
        sequence.admitted = False
        if self._groups and request.group >= 0 and self.shape.prefix_cache:
            self._cache.release(request.group)
        sequence.target, sequence.computed = request.prompt + sequence.made, 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

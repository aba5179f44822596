"""How large CUDA graphs are captured, and which steps are beyond them.

A step that no graph covers is launched kernel by kernel, and takes as long as that at least: an H200 with an 8B model
and 1,000 sequences gave 20,100 tokens a second with vLLM's own sizes, up to 512, and 30,300 with sizes up to 1,024,
for 3 s of capturing and 0.3 GiB (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from corral.engines.flags import flag_name
from corral.plan.contract import EngineSettings, Goal
from corral.plan.hardware.inventory import Gpu

MEASURED_BY_ITSELF = 512  # tokens of the largest graph that vLLM captures on an H200 where nothing is said
LARGER = 1024  # more were not measured
# vLLM refuses a size beside sizes of somebody's own, and fits its own to what speculation checks
_ELSEWHERE = {"--compilation-config", "-cc", "-O", "--optimization-level", "--cudagraph-capture-sizes",
              "--cuda-graph-sizes", "--speculative-config", "-sc", "--spec-method", "--spec-model",
              "--spec-tokens"}  # fmt: skip


def most_by_itself(gpu: Gpu | None) -> int:
    """Tokens that vLLM (0.32) captures at most on such a GPU where nothing is said."""
    return 1024 if gpu is not None and 10 <= gpu.capability < 11 else MEASURED_BY_ITSELF


def largest_graph(settings: EngineSettings, gpu: Gpu | None) -> int:
    """Tokens of the largest step that a CUDA graph covers; 0: of none."""
    if settings.eager:
        return 0
    return min(settings.max_graph_size or own_largest(settings, gpu), settings.max_num_batched_tokens)


def own_largest(settings: EngineSettings, gpu: Gpu | None) -> int:
    """The same where vLLM is told nothing."""
    return min(2 * settings.max_num_seqs, most_by_itself(gpu))


def covered(settings: EngineSettings, gpu: Gpu | None, running: float, drafted: int = 0) -> bool:
    """Whether a graph covers a step of so many sequences, with so many drafted tokens of each to check.

    Where vLLM (0.32) speculates, it captures as many sequences as tokens otherwise, each with its drafted tokens.
    """
    if drafted and not settings.eager and running <= min(settings.max_num_seqs, most_by_itself(gpu)):
        return True
    return running * (1 + drafted) <= largest_graph(settings, gpu)


def graph_sizes(settings: EngineSettings, gpu: Gpu | None) -> list[int]:
    """The batch size of every CUDA graph that vLLM captures.

    Sizes are 1, 2, 4, then by 8 to 256, then by 16, once in pieces (mixed batches) and once whole (decode only, no
    more than `max_num_seqs` requests).
    """
    largest = largest_graph(settings, gpu)
    every = [n for n in (1, 2, 4) if n <= largest]
    every += [*range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
    return [*every, *(n for n in every if n <= settings.max_num_seqs)]


def sized_elsewhere(arguments: Sequence[str]) -> bool:
    """Whether arguments of vLLM decide which graphs there are."""
    return any(flag_name(word) in _ELSEWHERE for word in arguments)


def running_at_once(settings: EngineSettings, goal: Goal, replicas: int = 1) -> int:
    """Requests of a full step of one replica."""
    return min(-(-(goal.concurrency or replicas * settings.max_num_seqs) // replicas), settings.max_num_seqs)


def size_for(settings: EngineSettings, gpu: Gpu | None, goal: Goal, replicas: int = 1) -> int:
    """The size that covers this load's steps beyond vLLM's own graphs; 0: there are none, or none that ends there.

    Such steps have many sequences, or a prompt beside what runs. Longer prompts take their time whatever is captured.
    """
    own = min(own_largest(settings, gpu), settings.max_num_batched_tokens)
    running = running_at_once(settings, goal, replicas)
    beside = min(running, own) - 1 + goal.prompt_tokens
    largest = max((tokens for tokens in (running, beside) if own < tokens <= LARGER), default=0)
    return min(1 << (largest - 1).bit_length(), settings.max_num_batched_tokens) if largest else 0

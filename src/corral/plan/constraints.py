"""What vLLM itself refuses, as data: a layout or setting that passes here starts, as far as its checks go.

Read in vLLM 0.32.0: heads % TP (`ModelConfig.verify_with_parallel_config`), KV heads (`QKVParallelLinear`),
widths (`ColumnParallelLinear`, `divide`), vocabulary (`VocabParallelEmbedding`, padded to 64), layers ≥ PP
(`get_pp_indices`), batch limits (`SchedulerConfig.verify_max_model_len`), quantised groups (AWQ/GPTQ linear
methods), types by compute capability (`check_if_supports_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from corral.base.errors import UsageError
from corral.plan.contract import EngineSettings, Parallel
from corral.plan.models.facts import ModelFacts

WHOLE_PROMPTS = "--no-enable-chunked-prefill"
_VOCAB_PADDING = 64
_GROUP = {"int4": 128}  # weights that share one scale must stay on one rank

_Rule = tuple[Callable[[ModelFacts, Parallel], bool], Callable[[ModelFacts, Parallel], str]]

_RULES: tuple[_Rule, ...] = (
    (
        lambda m, p: m.heads % p.tensor == 0,
        lambda m, p: f"TP{p.tensor} does not divide the {m.heads} attention heads",
    ),
    (
        lambda m, p: m.kv_heads % p.tensor == 0 if m.kv_heads >= p.tensor else p.tensor % m.kv_heads == 0,
        lambda m, p: f"TP{p.tensor} neither divides nor is a multiple of the {m.kv_heads} KV heads",
    ),
    (
        lambda m, p: m.intermediate % p.tensor == 0,
        lambda m, p: f"TP{p.tensor} does not divide the MLP width {m.intermediate}",
    ),
    (
        lambda m, p: -(-m.vocab // _VOCAB_PADDING) * _VOCAB_PADDING % p.tensor == 0,
        lambda m, p: f"TP{p.tensor} does not divide the padded vocabulary of {m.vocab}",
    ),
    (
        lambda m, p: p.pipeline <= m.layers,
        lambda m, p: f"PP{p.pipeline} has more stages than the model has layers ({m.layers})",
    ),
    (
        lambda m, p: m.intermediate // p.tensor % _GROUP.get(m.weights, 1) == 0,
        lambda m, p: f"TP{p.tensor} would cut a group of {_GROUP[m.weights]} {m.weights} weights in two",
    ),
)


def broken_layout(model: ModelFacts, parallel: Parallel) -> str | None:
    """Why vLLM would refuse this split of this model, or None."""
    return next((say(model, parallel) for holds, say in _RULES if not holds(model, parallel)), None)


def broken_settings(model: ModelFacts, settings: EngineSettings, max_model_len: int) -> str | None:
    """Why vLLM would refuse these settings, or None."""
    s = settings
    if s.max_num_batched_tokens < s.max_num_seqs:
        return f"max_num_batched_tokens {s.max_num_batched_tokens} is below max_num_seqs {s.max_num_seqs}"
    if max_model_len > model.max_context:
        return f"a context of {max_model_len:,} is beyond the model's {model.max_context:,}"
    if not 0 < s.gpu_memory_utilization <= 1:
        return f"gpu_memory_utilization {s.gpu_memory_utilization} is not above 0 and at most 1"
    return None


def refuse_flags(arguments: Sequence[str], settings: EngineSettings, max_model_len: int) -> None:
    """Refuse flags that vLLM would, given what else is decided, once it had been started."""
    budget = settings.max_num_batched_tokens
    if WHOLE_PROMPTS in arguments and budget < max_model_len:
        raise UsageError(
            f"with {WHOLE_PROMPTS} a step must hold the longest prompt, but max_num_batched_tokens {budget:,} is"
            f" below the context of {max_model_len:,}.",
            f"Leave {WHOLE_PROMPTS} out, or say --context {budget}.",
        )


def partition(layers: int, stages: int) -> list[int]:
    """Layers per pipeline stage, as vLLM's `get_pp_indices` spreads them."""
    sizes = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        sizes[-i] += 1
    return sizes

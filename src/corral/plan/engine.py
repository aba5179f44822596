"""A plan as vLLM's own flags. Model, served name, host and port are the launch's business, and nodes the link's."""

from __future__ import annotations

from corral.plan.contract import EngineSettings, Parallel, Precision
from corral.plan.hardware.inventory import GIB
from corral.plan.models.facts import ModelFacts

VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# vLLM refuses these unless told that the caller knows (`DEPRECATED_QUANTIZATION_METHODS`, 0.32).
_DEPRECATED = ("fbgemm_fp8", "fp_quant")


def engine_args(
    model: ModelFacts,
    parallel: Parallel,
    precision: Precision,
    settings: EngineSettings,
    max_model_len: int,
    cpu: bool,
) -> tuple[str, ...]:
    """Every decision of the plan, said aloud, so that no default of another vLLM version can change it."""
    args = ["--tensor-parallel-size", str(parallel.tensor)]
    if parallel.pipeline > 1:
        args += ["--pipeline-parallel-size", str(parallel.pipeline)]
    if parallel.data > 1:
        args += ["--data-parallel-size", str(parallel.data)]
    args += ["--max-model-len", str(max_model_len), "--dtype", _dtype(model, precision)]
    if precision.method:
        args += ["--quantization", precision.method]
    if precision.how != "online" and model.quantisation in _DEPRECATED:
        args += ["--allow-deprecated-quantization"]
    if precision.kv != "auto":
        args += ["--kv-cache-dtype", precision.kv]
    if not cpu:
        args += ["--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"]
    args += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    args += ["--max-num-seqs", str(settings.max_num_seqs)]
    if settings.api_servers != parallel.data:  # one for each replica is vLLM's own default
        args += ["--api-server-count", str(settings.api_servers)]
    if settings.stream_interval > 1:
        args += ["--stream-interval", str(settings.stream_interval)]
    if settings.max_graph_size and not settings.eager:
        args += ["--max-cudagraph-capture-size", str(settings.max_graph_size)]
    if not settings.async_scheduling:
        args += ["--no-async-scheduling"]
    return (*args, "--enforce-eager") if settings.eager else tuple(args)


def _dtype(model: ModelFacts, precision: Precision) -> str:
    wide = precision.compute or (precision.weights if precision.weights in VLLM_DTYPES else model.dtype)
    return VLLM_DTYPES[wide]


def cpu_environment(kv_bytes: int, eager: bool) -> dict[str, str]:
    """The CPU build sizes its KV cache by a variable, in whole GiB.

    Under `--enforce-eager` vLLM still compiles what asks for it by itself, counting ranks for log-probabilities and
    looking up a split vocabulary: half a minute of a core for two lines of arithmetic, in every process. It is told
    not to.
    """
    sized = {"VLLM_CPU_KVCACHE_SPACE": str(max(1, kv_bytes // GIB))}
    return {**sized, "TORCH_COMPILE_DISABLE": "1"} if eager else sized

"""Every row of the table against a log: recorded from the real engine where this machine can fail that way,
otherwise the lines that vLLM's users report."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.diagnosis import SIGNATURES, diagnose, last_lines
from corral.state import Reason

LOGS = Path(__file__).parent / "logs"

# file -> (reason, words of the cause, words of the remedy)
RECORDED = {
    "port_taken": (Reason.PORT_TAKEN, "taken by another process", "--port"),
    "context_beyond_model": (Reason.CONTEXT_TOO_LONG, "99999 tokens is longer than the 2048", "--context 2048"),
    "context_beyond_kv": (Reason.CONTEXT_TOO_LONG, "one request of 2048 tokens needs", "--context"),
    "no_kv_memory": (Reason.OUT_OF_MEMORY, "no memory for the KV cache", "more GPUs"),
    "heads_not_divisible": (Reason.BAD_PARALLELISM, "8 attention heads cannot be split over 3", "divides 8"),
    "damaged_shard": (Reason.MODEL_INCOMPLETE, "damaged or was not downloaded whole", "Download the model again"),
    "missing_weights": (Reason.MODEL_INCOMPLETE, "missing", "Download the model again"),
    "unknown_architecture": (Reason.MODEL_UNSUPPORTED, "['PonyForCausalLM']", "newer engine"),
    "unknown_model_type": (Reason.MODEL_UNSUPPORTED, "does not know this model's type", "newer engine"),
    "unknown_flag": (Reason.BAD_ARGUMENT, "--no-such-flag", "--dry-run"),
    "host_memory": (Reason.OUT_OF_HOST_MEMORY, "GiB of memory free", "shorter --context"),
}

TOLD = [
    ("ValueError: Free memory on device cuda:0 (3.21/79.11 GiB) on startup is less than desired GPU memory",
     Reason.OUT_OF_MEMORY, "cuda:0 has only 3.21 of 79.11 GiB free"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity",
     Reason.OUT_OF_MEMORY, "allocating 2.00 GiB"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried",
     Reason.OUT_OF_HOST_MEMORY, "ran out of memory"),
    ("ValueError: World size (8) is larger than the number of available GPUs (4) in this node.",
     Reason.BAD_PARALLELISM, "needs 8 GPUs on this node and there are 4"),
    ("huggingface_hub.errors.GatedRepoError: 403 Client Error.\nCannot access gated repo for url",
     Reason.GATED_MODEL, "gated"),
    ("OSError: [Errno 28] No space left on device", Reason.NO_SPACE, "disk became full"),
    ("FileNotFoundError: No such file or directory: '/models/m/model-00007-of-00030.safetensors'",
     Reason.MODEL_INCOMPLETE, "model-00007-of-00030.safetensors"),
    ("ValueError: Following weights were not initialized from checkpoint: {'model.layers.3.mlp.up_proj.weight'}",
     Reason.MODEL_INCOMPLETE, "do not hold all"),
    ("RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0",
     Reason.MODEL_UNSUPPORTED, "heads of size 16"),
    ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, ncclSystemError: System call failed",
     Reason.NETWORK, "could not talk to each other"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", Reason.NO_GPU, "too old"),
    ("RuntimeError: No CUDA GPUs are available", Reason.NO_GPU, "sees no GPU"),
    ("ImportError: /env/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDevice", Reason.ENGINE_BROKEN, "PyTorch"),
    ("ModuleNotFoundError: No module named 'uvloop'", Reason.ENGINE_BROKEN, "lacks the module uvloop"),
    ("ValueError: kv_cache_dtype fp7 is unknown", Reason.BAD_ARGUMENT, "refused its configuration"),
]  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_logs(name: str) -> None:
    reason, cause, remedy = RECORDED[name]
    found = diagnose(last_lines(LOGS / f"{name}.log", 200), exit_code=1)
    assert found.reason is reason
    assert cause in found.cause
    assert remedy in found.remedy
    assert found.evidence


@pytest.mark.parametrize(("text", "reason", "cause"), TOLD)
def test_reported_lines(text: str, reason: Reason, cause: str) -> None:
    found = diagnose(["INFO starting", *text.splitlines(), "INFO shutdown"], exit_code=1)
    assert found.reason is reason
    assert cause in found.cause
    assert found.remedy


def test_every_row_is_reached_by_some_log() -> None:
    import re

    texts = [text for text, _, _ in TOLD] + [(LOGS / f"{name}.log").read_text() for name in RECORDED]
    for row in SIGNATURES:
        assert any(re.search(row.pattern, text, re.DOTALL) for text in texts), row.pattern


def test_no_text_keeps_a_placeholder() -> None:
    for name in RECORDED:
        found = diagnose(last_lines(LOGS / f"{name}.log", 200))
        assert "{" not in found.cause + found.remedy


def test_ways_of_ending_without_a_word() -> None:
    assert "code 0" in diagnose(["INFO all well"], exit_code=0).cause
    assert diagnose([], signal=9).reason is Reason.ENGINE_EXITED
    assert "signal 9" in diagnose([], signal=9).cause
    assert diagnose([], signal=9, kernel_oom_kill=True).reason is Reason.OUT_OF_HOST_MEMORY
    assert "signal 11" in diagnose([], signal=11).cause


def test_the_root_cause_is_shown_not_its_echo() -> None:
    lines = [
        "(Worker) RuntimeError: the real reason.",
        "(EngineCore) RuntimeError: Worker failed with error 'x', please check the stack trace above",
        "(APIServer) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    assert "the real reason" in diagnose(lines, exit_code=0).cause


def test_the_end_of_a_huge_log_with_progress_bars(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x\n" * 500_000 + b"\rLoading 1%\rLoading 2%\nlast\n\xff\n")
    assert last_lines(log, 3) == ["Loading 2%", "last", "\ufffd"]
    assert last_lines(tmp_path / "none") == []

"""Every row of the table against a log: recorded from the real engine where this machine can fail that way,
otherwise the lines that vLLM's users report."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.deploy.deployment.diagnosis import diagnose, last_lines
from corral.deploy.deployment.signatures import SIGNATURES
from corral.deploy.deployment.state import Reason

LOGS = Path(__file__).parent / "logs"

# file -> (reason, words of the cause, words of the remedy)
RECORDED = {
    "port_taken": (Reason.PORT_TAKEN, "taken by another process", "--port"),
    "context_beyond_model": (Reason.CONTEXT_TOO_LONG, "99999 tokens is longer than the 2048", "--context 2048"),
    "context_beyond_kv": (Reason.CONTEXT_TOO_LONG, "one request of 2048 tokens needs", "--context"),
    "no_kv_memory": (Reason.OUT_OF_MEMORY, "no memory for the KV cache", "more GPUs"),
    "heads_not_divisible": (Reason.BAD_PARALLELISM, "8 attention heads cannot be split over 3", "divides 8"),
    "damaged_shard": (
        Reason.MODEL_INCOMPLETE,
        "damaged or was not downloaded completely",
        "Download the model again",
    ),
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
    ("OSError: [Errno 28] No space left on device", Reason.NO_SPACE, "disk is full"),
    ("FileNotFoundError: No such file or directory: '/models/m/model-00007-of-00030.safetensors'",
     Reason.MODEL_INCOMPLETE, "model-00007-of-00030.safetensors"),
    ("ValueError: Following weights were not initialized from checkpoint: {'model.layers.3.mlp.up_proj.weight'}",
     Reason.MODEL_INCOMPLETE, "do not hold all"),
    ("RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0",
     Reason.MODEL_UNSUPPORTED, "heads of size 16"),
    ("WARNING [utils.py:597] Failed to create oneDNN linear, fallback to torch linear. Exception: could not create a"
     " primitive descriptor for the matmul primitive. Run workload with environment variable ONEDNN_VERBOSE=all\n"
     "ERROR [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
     Reason.BAD_ARGUMENT, "this CPU has no arithmetic for it"),
    ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, ncclSystemError: System call failed",
     Reason.NETWORK, "could not talk to each other"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", Reason.NO_GPU, "too old"),
    ("RuntimeError: No CUDA GPUs are available", Reason.NO_GPU, "sees no GPU"),
    ("ImportError: /env/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDevice", Reason.ENGINE_BROKEN, "PyTorch"),
    ("ModuleNotFoundError: No module named 'uvloop'", Reason.ENGINE_BROKEN, "lacks the module uvloop"),
    ("corral: there is no command docker on this node", Reason.NO_RUNTIME, "command docker is not on the node"),
    ("EnvironmentNameNotFound: Could not find conda environment: vllm\n"
     "corral: the conda environment vllm could not be activated", Reason.NO_RUNTIME, "conda environment vllm"),
    ("Lmod has detected the following error: The following module(s) are unknown: \"cuda/99\"\n"
     "corral: the module cuda/99 could not be loaded", Reason.NO_RUNTIME, "module cuda/99 could not be loaded"),
    ("docker: permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock:"
     " Get \"http://%2Fvar%2Frun%2Fdocker.sock/_ping\": dial unix /var/run/docker.sock: connect: permission denied.",
     Reason.NO_RUNTIME, "may not use the Docker daemon"),
    ("docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
     Reason.NO_RUNTIME, "does not answer unix:///var/run/docker.sock"),
    ("docker: Error response from daemon: could not select device driver \"\" with capabilities: [[gpu]].",
     Reason.NO_GPU, "cannot use this node's GPUs"),
    ("Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all",
     Reason.NO_GPU, "nvidia.com/gpu=all"),
    ("docker: Error response from daemon: Conflict. The container name \"/corral-m-0-1a2b\" is already in use by"
     " container \"b4967544966242c68\". You have to remove (or rename) that container to be able to reuse that name.",
     Reason.NAME_TAKEN, "a container named corral-m-0-1a2b"),
    ("Error: creating container storage: the container name \"corral-m-0-1a2b\" is already in use by 3e7b",
     Reason.NAME_TAKEN, "a container named corral-m-0-1a2b"),
    ("Unable to find image 'me/private:1' locally\ndocker: Error response from daemon: pull access denied for"
     " me/private, repository does not exist or may require 'docker login'", Reason.NO_IMAGE, "no image me/private,"),
    ("docker: Error response from daemon: manifest for vllm/vllm-openai:v9.9.9 not found: manifest unknown",
     Reason.NO_IMAGE, "vllm/vllm-openai:v9.9.9"),
    ("Error: localhost/nosuch:1: image not known", Reason.NO_IMAGE, "no image localhost/nosuch:1"),
    ("Unable to find image 'nosuch:1' locally\ndocker: Error response from daemon: Get \"https://hub/v2/\": dial tcp:"
     " lookup hub: no such host", Reason.NO_IMAGE, "nosuch:1 is not on the node and could not be pulled"),
    ("FATAL:   could not open image /images/vllm.sif: failed to retrieve path", Reason.NO_IMAGE, "/images/vllm.sif"),
    ("docker: Error response from daemon: runc create failed: exec: \"vllm\": executable file not found in $PATH",
     Reason.ENGINE_BROKEN, "the image has no command vllm"),
    ("FATAL:   \"vllm\": executable file not found in $PATH", Reason.ENGINE_BROKEN, "the image has no command vllm"),
    ("ERROR (catatonit:2): failed to exec pid1: No such file or directory", Reason.ENGINE_BROKEN, "has no command"),
    ("[FATAL tini (7)] exec vllm failed: No such file or directory", Reason.ENGINE_BROKEN, "has no command vllm"),
    ("docker: Error response from daemon: invalid mount config: bind source path does not exist: /no",
     Reason.BAD_ARGUMENT, "not on the node: /no"),
    ("unknown flag: --gpu\nSee 'docker run --help'.", Reason.BAD_ARGUMENT, "--gpu"),
    ("ValueError: kv_cache_dtype fp7 is unknown", Reason.BAD_ARGUMENT, "kv_cache_dtype fp7 is unknown"),
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


def test_a_users_bad_request_is_not_why_a_server_died() -> None:
    lines = ["ValueError: please provide at least one prompt", "OSError: [Errno 98] Address already in use"]
    assert diagnose(lines, exit_code=0, was_ready=True).reason is Reason.ENGINE_EXITED
    assert "signal 9" in diagnose(lines, signal=9).cause


def test_an_earlier_attempts_words_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first attempt\nsecond attempt\n")
    assert last_lines(log, 10, begin=len("first attempt\n")) == ["second attempt"]
    assert last_lines(log, 10, begin=10**9) == ["first attempt", "second attempt"]


def test_the_end_of_a_huge_log_with_progress_bars(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x\n" * 500_000 + b"\rLoading 1%\rLoading 2%\nlast\n\xff\n")
    assert last_lines(log, 3) == ["Loading 2%", "last", "\ufffd"]
    assert last_lines(tmp_path / "none") == []


def test_what_a_log_says_is_never_a_template() -> None:
    found = diagnose(["corral: the module NAME{2}/1.0 could not be loaded"], exit_code=1, name="my-model")
    assert "NAME{2}/1.0" in found.cause
    assert "`module spider NAME{2}/1.0`" in found.remedy
    assert diagnose(["all well"], exit_code=0, name="'my model'").remedy.endswith("`corral logs 'my model'`.")

"""vLLM engines on an existing Ray cluster (`ray.data.llm`): a file of rows in, answers out.

Ray and vLLM must be importable here (Corral installed into the cluster's environment). No plan is made on a Ray
cluster, and vLLM's own choice of number format is the checkpoint's, which some CPUs cannot multiply in at all (bf16
on a Neoverse-N1 ends the engine): on CPUs the format is chosen here. Ray's error seldom says why an engine died; the
log of the engine's worker does, where it lies on this node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from corral.base.errors import UnreachableError, UsageError
from corral.deploy.deployment.diagnosis import Diagnosis, diagnose, last_lines
from corral.deploy.deployment.state import Reason
from corral.engines.settings import VLLM_DTYPES
from corral.plan.cpu import quick_format
from corral.plan.hardware.inventory import CpuFacts, common_cpu, parse_cpuinfo
from corral.plan.settings import parse_assignments, read_fixed
from corral.use.batch.input.rows import optional

_ANSWER_S = 60


def cluster_cpu(ray: Any) -> CpuFacts | None:
    """The features that the CPUs of all nodes have; None where a node does not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    def read() -> tuple[str, str]:  # a local function, because Ray sends it to its workers whole
        import pathlib
        import platform

        return pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"), platform.machine()

    task = ray.remote(num_cpus=0, max_retries=0)(read)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    pending = [task.options(scheduling_strategy=On(node, soft=False)).remote() for node in nodes]
    try:
        answers = ray.get(pending, timeout=_ANSWER_S)
    except Exception:  # Ray's errors have no common root; the engine's start will say what is wrong
        return None
    return common_cpu([parse_cpuinfo(*one) for one in answers])


def format_on(cpu: CpuFacts | None, chosen: str | None) -> tuple[dict[str, str], str]:
    """The engine's `dtype` where vLLM's own choice is bad, and a note about it; one that the user chose stays."""
    quick, fp32 = quick_format(cpu), VLLM_DTYPES["fp32"]
    if quick.format != "fp32" or chosen == fp32:
        return {}, ""
    if chosen is not None:
        return {}, f"{chosen} may be slow or fail here: {quick.because}"
    return {"dtype": fp32}, f"the engine computes in fp32: {quick.because}"


_LINES = 200


def logs_folder(ray: Any) -> Path | None:
    """The folder of the workers' logs on this node; None where Ray does not tell."""
    with contextlib.suppress(AttributeError, TypeError):
        return Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    return None


def why_died(logs: Path | None, since_s: float) -> Diagnosis | None:
    """The cause of death in the workers' logs written since then, the newest first; None where none names one."""
    if logs is None:
        return None
    recent = []
    for path in [*logs.glob("worker-*.err"), *logs.glob("worker-*.out")]:
        with contextlib.suppress(OSError):
            if (written_s := path.stat().st_mtime) >= since_s:
                recent.append((written_s, path))
    causes = [diagnose(last_lines(path, _LINES)) for _, path in sorted(recent, reverse=True)]
    causes = [why for why in causes if why.evidence]
    known = [why for why in causes if why.reason is not Reason.ENGINE_EXITED]
    return next(iter([*known, *causes]), None)


_ENGINE_NAMES = {
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "max_model_len": "max_model_len",
    "kv": "kv_cache_dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "eager": "enforce_eager",
}
_NOT_ENGINE = {
    "api_servers": "Ray Data has no API server; leave it out.",
    "data": "--concurrency N starts N engines.",
    "weights": "Name a checkpoint with those weights: --start PATH.",
}


class RayAnswer(NamedTuple):
    """The answer to one row."""

    number: int
    text: str
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


class EngineDiedError(Exception):
    """A pass of the engine ended early: Ray's message, and the cause where a log of the engine names it."""

    def __init__(self, message: str, why: Diagnosis | None) -> None:
        super().__init__(f"{why.cause} ({message})" if why else message)
        self.remedy = why.remedy if why else ""


class AnswerEngine(Protocol):
    """Answers a file of rows; tests put another one in its place."""

    def answers(self, rows: Path, chat: bool) -> Iterator[RayAnswer]:
        """The answers of a file of `{"corral_row", "prompt" | "messages", "sampling_params"}`, in any order."""


Note = Callable[[str, str], None]  # kind, text


class RayEngine:
    """`ray.data.llm` with `replicas` vLLM engines."""

    def __init__(self, model: str, replicas: int, engine_kwargs: dict[str, Any], note: Note) -> None:
        self._model, self._replicas, self._kwargs, self._note = model, replicas, dict(engine_kwargs), note
        self._on_cpus = False
        self._ray = optional("ray", "run on Ray Data (in the cluster's own environment)")
        _refuse_dead_address(os.environ.get("RAY_ADDRESS", ""))  # before the import below, which takes seconds
        optional("ray.data.llm", "run on Ray Data")

    def answers(self, rows: Path, chat: bool) -> Iterator[RayAnswer]:
        from ray.data.llm import build_processor, vLLMEngineProcessorConfig

        ray = self._ray
        self._connect()
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)  # a block of lines every ten seconds otherwise
        settings: dict[str, Any] = {}
        if not ray.cluster_resources().get("GPU"):  # otherwise it would wait for one for ever
            settings = {"placement_group_config": {"bundles": [{"CPU": 1}]}, "log_engine_metrics": False}
            self._choose_format()
        config = vLLMEngineProcessorConfig(
            model_source=self._model,
            engine_kwargs=self._kwargs,
            concurrency=self._replicas,
            batch_size=64,
            should_continue_on_error=True,
            chat_template_stage=chat,
            tokenize_stage=False,  # the engine does both itself; actors of their own only take CPUs from it
            detokenize_stage=False,
            **settings,
        )
        processor = build_processor(config, preprocess=_unpack)
        # Ray Data would restart an engine that dies without end, and tell nobody
        processor.get_stage_by_name("vLLMEngineStage").map_batches_kwargs["max_restarts"] = 0
        began_s = time.time()
        try:
            for row in processor(ray.data.read_text(str(rows))).iter_rows():
                yield read_answer(row)
        except Exception as error:
            raise EngineDiedError(_first_line(error), why_died(logs_folder(ray), began_s)) from error

    def _choose_format(self) -> None:
        """Choose the number format on CPUs; once, however often the engine is started."""
        if self._on_cpus:
            return
        self._on_cpus = True
        chosen, why = format_on(cluster_cpu(self._ray), self._kwargs.get("dtype"))
        self._kwargs |= chosen
        if why:
            self._note("note", why)

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        try:
            self._ray.init(address="auto", log_to_driver=False)  # RAY_ADDRESS, or a cluster on this node
        except ConnectionError as error:
            raise UnreachableError(
                f"there is no Ray cluster here: {str(error).splitlines()[0]}",
                "Start one (`ray start --head`), run this on one of its nodes, or set RAY_ADDRESS.",
            ) from error


def _refuse_dead_address(address: str) -> None:
    """Refuse an address where no one listens; Ray itself would try for ever."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UnreachableError(
            f"there is no Ray cluster at {address} (RAY_ADDRESS): {error.strerror or error}.",
            "Start one (`ray start --head`), or correct RAY_ADDRESS.",
        ) from None


def _first_line(error: Exception) -> str:
    """The first line of one of Ray's errors, which are pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def _unpack(row: dict[str, Any]) -> dict[str, Any]:
    """Decode a row; runs on Ray's workers, so it needs nothing of Corral."""
    import json

    unpacked: dict[str, Any] = json.loads(row["text"])
    return unpacked


def read_answer(row: dict[str, Any]) -> RayAnswer:
    """One row of Ray Data's output."""
    return RayAnswer(
        number=int(row["corral_row"]),
        text=str(row.get("generated_text") or ""),
        error=str(row.get("__inference_error__") or ""),
        prompt_tokens=int(row.get("num_input_tokens") or 0),
        output_tokens=int(row.get("num_generated_tokens") or 0),
    )


def engine_settings(context: int | None, assignments: tuple[str, ...]) -> dict[str, Any]:
    """The plan's fixed fields, under the names that vLLM's engine knows."""
    fixed = read_fixed({**({"max_model_len": context} if context else {}), **parse_assignments(assignments)})
    engine = {ours: getattr(fixed, name) for name, ours in _ENGINE_NAMES.items() if getattr(fixed, name) is not None}
    if fixed.weights in VLLM_DTYPES:
        engine["dtype"] = VLLM_DTYPES[fixed.weights]
        fixed = replace(fixed, weights=None)
    for name, remedy in _NOT_ENGINE.items():
        if getattr(fixed, name) is not None:
            raise UsageError(f"--set {name} does not go with --engine ray-data.", remedy)
    return engine

"""CPU worker for pipeline stages that run with ``--enforce-eager``.

In vLLM 0.32 the receive buffers of stages after the first are allocated by the
warm-up run only, and ``--enforce-eager`` skips that run: the server reports
healthy and the first request kills the engine.  This worker allocates them when
the model is loaded.  ``plugin`` selects it for that case alone.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker as _CPUWorker  # first: patches torch


class CPUWorker(_CPUWorker):
    """The stock worker, with receive buffers from the start."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_model(*args, **kwargs)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        return result

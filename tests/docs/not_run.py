"""The commands of the pages that no test types, each with its reason. They are still parsed: options must exist."""

from __future__ import annotations

__all__ = ["NOT_RUN", "why_not_run"]

# a part of the command -> why it is not run here
NOT_RUN = {
    "make test": "it is what runs this",
    "uv tool install": "tests/e2e/test_installed.py installs Corral; here there is no package index",
    "uv pip install .": "it would install into the environment of these tests",
    "bash_source": "tests/unit/test_completion.py speaks with it as a shell does",
    "pip install . vllm": "vLLM and Ray: half a gigabyte, tests/integration has them",
    "RAY_ADDRESS=": "a Ray cluster: tests/integration/test_batch_ray_data.py",
    "--through login.cluster": "a login node with a Corral of its own: tests/cluster/test_slurm_view.py",
    "corral gateway llama": "servers of two models: tests/unit/test_gateway_process.py",
    "corral scale llama": "a fleet that runs: tests/unit/test_fleet_gateway.py",
    "corral eval": "lm-eval's environment: tests/unit/test_eval.py",
    "--model poet": "a server with adapters: tests/integration/test_adapters.py",
    "adapter": "a server with adapters, and files of them: tests/integration/test_adapters.py",
    "corral renew": "a job of SLURM that runs: tests/cluster/test_slurm_handover.py",
    "#!/bin/bash\n#SBATCH": "a job of SLURM: its Python is run by test_python.py",
}


def why_not_run(text: str) -> str:
    """The reason, or an empty string for a command that runs."""
    return next((reason for part, reason in NOT_RUN.items() if part in text), "")

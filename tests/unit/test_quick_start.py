"""vLLM's server on GPUs with one import: when the stock command is left to run, and what is forked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from corral.engines.engine_side import quick_start

FILE = Path(quick_start.__file__)
# a vLLM of four modules: the server forks a process as vLLM's manager of API servers does, and says what it sees
STAND_IN = {
    "torch/__init__.py": "class cuda:\n    is_initialized = staticmethod(lambda: {cuda})\n"
    "class version:\n    hip = {hip}\n",
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/engine/__init__.py": "",
    "vllm/v1/engine/async_llm.py": "",
    "vllm/v1/engine/core.py": "",
    "vllm/v1/utils.py": "import multiprocessing\nclass APIServerProcessManager: pass\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/serve.py": "import os\n"
    "def setup_multiprocess_prometheus(): os.environ['PROMETHEUS_MULTIPROC_DIR'] = '/somewhere'\n",
    "prometheus_client/__init__.py": "",
    "prometheus_client/values.py": "import os\n"
    "def get_value_class(): return 'shared' if 'PROMETHEUS_MULTIPROC_DIR' in os.environ else 'alone'\n"
    "ValueClass = get_value_class()\n",
    "vllm/entrypoints/cli/main.py": """
import os, sys
import vllm.entrypoints.cli.serve as serve
import vllm.v1.utils as manager
from prometheus_client import values
LOADED_IN = os.getpid()
def child(): print("child imported in its parent:", LOADED_IN == os.getppid(), flush=True)
def main():
    print("method", os.environ.get("VLLM_WORKER_MULTIPROC_METHOD"), "argv", sys.argv[1:], flush=True)
    serve.setup_multiprocess_prometheus()
    print("metrics", values.ValueClass, flush=True)
    started = manager.multiprocessing.get_context("spawn").Process(target=child)
    started.start(); started.join()
    print("threads", os.environ.get("OPENBLAS_NUM_THREADS"), flush=True)
    sys.exit(7)
if __name__ == "__main__":
    print("stock", sys.argv[1:], flush=True)
    print("left:", [name for name in ("VLLM_WORKER_MULTIPROC_METHOD", "OPENBLAS_NUM_THREADS") if name in os.environ])
    sys.exit(8)
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/models/__init__.py": "",
    "vllm/model_executor/models/registry.py": "_VLLM_MODELS = {'ToyForCausalLM': ('toy', 'Toy')}\n"
    "def _run_in_subprocess(function): raise RuntimeError('a fresh interpreter')\n",
    "vllm/model_executor/models/toy.py": "print('the model was imported', flush=True)\n",
}


@pytest.fixture
def serve(tmp_path):
    def run(*arguments: str, env: dict[str, str] | None = None, **torch: str) -> tuple[int, str, str]:
        site = tmp_path / "site"
        for name, text in STAND_IN.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            filled = text.format(**{"cuda": "False", "hip": "None", **torch}) if name.startswith("torch") else text
            (site / name).write_text(filled)
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text('{"architectures": ["ToyForCausalLM", "Unknown"]}')
        (site / "corral_quick_start.py").write_bytes(FILE.read_bytes())
        stock = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments]
        around = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        done = subprocess.run(
            [sys.executable, "-m", "corral_quick_start", *stock],
            env={**around, "PYTHONPATH": str(site), **(env or {})},
            capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def test_everything_is_imported_once_and_forked(serve):
    code, out, err = serve("--port", "1")
    assert code == 7, err
    assert "the model was imported" in out
    assert "method fork argv ['serve'" in out
    assert "child imported in its parent: True" in out
    assert "threads None" in out  # the limit was for the imports only
    assert "metrics shared" in out
    assert "stock" not in out + err


@pytest.mark.parametrize(
    ("arguments", "env", "why"),
    [
        (("--nnodes", "2"), {}, "--nnodes"),
        (("--data_parallel_size=2",), {}, "--data-parallel-size"),
        (("--distributed-executor-backend", "ray"), {}, "--distributed-executor-backend"),
        ((), {"CORRAL_QUICK_START": "0"}, "CORRAL_QUICK_START=0"),
        ((), {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, "VLLM_WORKER_MULTIPROC_METHOD=spawn"),
    ],
)
def test_what_it_does_not_know_is_left_to_the_stock_command(serve, arguments, env, why):
    code, out, err = serve(*arguments, env=env)
    assert code == 8
    assert f"stock start ({why})" in err
    assert "the model was imported" not in out


@pytest.mark.parametrize(("torch", "why"), [({"cuda": "True"}, "CUDA was initialised"), ({"hip": "'6.4'"}, "ROCm")])
def test_no_fork_after_cuda_or_on_rocm(serve, torch, why):
    code, _, err = serve(**torch)
    assert code == 8
    assert why in err


def test_a_vllm_that_does_not_import_is_left_to_its_own_command(serve, monkeypatch):
    monkeypatch.setitem(STAND_IN, "vllm/v1/engine/core.py", "raise RuntimeError('no CUDA driver')\n")
    code, out, err = serve()
    assert code == 8
    assert "no CUDA driver" in err
    assert "left: []" in out


def test_a_vllm_without_what_is_replaced_starts_by_its_own_command(serve, monkeypatch):
    monkeypatch.setitem(STAND_IN, "vllm/entrypoints/cli/serve.py", "")
    monkeypatch.setitem(
        STAND_IN,
        "vllm/entrypoints/cli/main.py",
        STAND_IN["vllm/entrypoints/cli/main.py"].replace("import vllm.entry", "# "),
    )
    code, out, err = serve()
    assert code == 8
    assert "setup_multiprocess_prometheus" in err
    assert "left: []" in out

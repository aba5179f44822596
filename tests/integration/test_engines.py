"""The managed engine: whole or not at all, once even when asked for twice, and what it says it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from corral.engines.engine_side import quick_start
from tests.integration.conftest import Corral


def fresh(corral: Corral, home: Path) -> Corral:
    return Corral({**corral.env, "CORRAL_HOME": str(home)}, home)


def test_check_tells_what_it_is_made_of(corral: Corral) -> None:
    parts = corral.json("engine", "check", "cpu")
    assert parts["vllm"].startswith("0.32.0")
    assert parts["torch"] == "2.13.0+cpu"
    assert parts["platform"] == "CpuPlatform"
    assert {engine["flavour"] for engine in corral.json("engine", "list")} - {"lm-eval"} == {"cpu"}


def test_the_flags_shipped_with_corral_are_those_of_the_engine(corral: Corral) -> None:
    from importlib import resources

    script = resources.files("corral") / "engines" / "engine_side" / "list_flags.py"
    python = corral.engine / "bin" / "python"
    done = subprocess.run([str(python), str(script)], capture_output=True, text=True, env=corral.env, check=True)
    shipped = json.loads((resources.files("corral") / "data" / "engines" / "flags-0.32.0.json").read_text())
    listed = json.loads(done.stdout.splitlines()[-1])
    assert listed == {**shipped, "version": listed["version"]}


KNOWN_TO_QUICK_START = """
import sys
import corral_quick_start as quick
quick.import_all([sys.argv[1]])
why = quick.fork_everywhere()
import vllm.v1.utils as manager
from vllm.model_executor.models import registry
import vllm.entrypoints.cli.serve as serve
from prometheus_client import values
serve.setup_multiprocess_prometheus()
threads = open("/proc/self/status").read().partition("Threads:")[2].split()[0]
print(why or "forks", threads, manager.multiprocessing.get_context("spawn").get_start_method(),
      "vllm.model_executor.models." + sys.argv[2] in sys.modules, registry._run_in_subprocess(lambda: "here"),
      values.ValueClass.__name__)
"""


def test_the_quick_start_on_gpus_knows_this_vllm(corral: Corral, tiny_model: Path, tmp_path: Path) -> None:
    """The pinned vLLM has what the quick start replaces, and its imports leave one thread, which may be forked."""
    (tmp_path / "corral_quick_start.py").write_bytes(Path(quick_start.__file__).read_bytes())
    command = [str(corral.engine / "bin" / "python"), "-c", KNOWN_TO_QUICK_START, str(tiny_model), "llama"]
    env = {**corral.env, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["forks", "1", "fork", "True", "here", "MmapedValue"]


def test_an_interrupted_install_leaves_no_engine_and_two_at_once_make_one(corral: Corral, tmp_path: Path) -> None:
    here = fresh(corral, tmp_path / "home")
    first = subprocess.Popen(
        [sys.executable, "-m", "corral", "engine", "install", "cpu"],
        env=here.env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    building = here.home / "engines"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(
        building.glob(".cpu-*.building.*/lib/python3*/site-packages/torch")
    ):
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert here.json("engine", "list") == []

    both = [here.start("engine", "install", "cpu") for _ in range(2)]
    outputs = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("waiting for process" in err for _, err in outputs) == 1
    assert [path.name for path in building.iterdir() if "lock" not in path.name] == [corral.engine.name]
    assert here.run("engine", "remove", "cpu").returncode == 0
    assert here.json("engine", "list") == []

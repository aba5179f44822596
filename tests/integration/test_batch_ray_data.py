"""A batch on a real Ray cluster, by real `ray.data.llm` with real vLLM on the CPU.

Corral lies in the cluster's environment, as its documentation says: here the managed engine's packages, with what Ray
Data needs besides.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from corral.node.processes import descendants
from tests.conftest import ROOT
from tests.integration.conftest import KEPT, Corral, free_port

LETTERS = list(range(ord("a"), ord("z") + 1))  # the tiny model's tokens are bytes


@dataclass
class Cluster:
    """A Ray cluster of one node, and the environment that runs on it."""

    python: Path
    env: dict[str, str]

    def batch(self, *arguments: str) -> subprocess.Popen[str]:
        command = [str(self.python), "-m", "corral", "batch", *arguments]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def environment(engine: Path) -> Path:
    """The engine's packages, Ray Data's further needs, and Corral as it lies here."""
    place = KEPT / f"ray-data-{engine.name}"
    if (place / "made").is_file() and (place / "made").read_text() == str(ROOT):
        return place / "bin" / "python"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([engine / "bin" / "python", "-m", "venv", "--without-pip", place], check=True)
    packages = next((place / "lib").glob("python3*")) / "site-packages"
    (packages / "engine.pth").write_text(f"{next((engine / 'lib').glob('python3*')) / 'site-packages'}\n")
    further = ["pyarrow", "pandas", "python-dateutil", "six", "pytz", "tzdata"]  # numpy is the engine's
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(place / "bin" / "python")]
    subprocess.run([*install, "--no-deps", *further, "--editable", str(ROOT)], check=True)
    (place / "made").write_text(str(ROOT))  # a kept folder may outlive the checkout
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def cluster(corral: Corral, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    python = environment(corral.engine.resolve())
    scratch = tmp_path_factory.mktemp("r", numbered=True)
    env = {**os.environ, "CORRAL_HOME": str(scratch / "home"), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"PATH": f"{python.parent}:{env['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker in the engine's process, where Ray Data has it on a GPU
    env.pop("PYTHONPATH", None)
    port = free_port()
    start = [str(python), "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", port]
    short = tempfile.mkdtemp(prefix="ray-")  # Ray's socket paths must stay below 108 characters
    start += ["--num-cpus", "4", "--include-dashboard=false", "--temp-dir", short]
    with (scratch / "ray.log").open("w") as log:
        ray = subprocess.Popen(start, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        while "Ray runtime started" not in (scratch / "ray.log").read_text():
            assert ray.poll() is None, (scratch / "ray.log").read_text()
            time.sleep(0.2)
        yield Cluster(python, {**env, "RAY_ADDRESS": f"127.0.0.1:{port}"})
    finally:
        for pid in (ray.pid, *descendants(ray.pid)):  # asked politely, it takes half a minute
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ray.wait(60)
        shutil.rmtree(short, ignore_errors=True)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]  # text would also be split at U+2028


def whole_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def tokens(number: int) -> int:
    """How many a row asks for: the last batches of 64 take long, so that the first results are not the last."""
    return 4 + number % 3 + (200 if number >= 192 else 0)


def test_killed_in_the_middle_every_row_has_one_result(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    # the same parameters in all rows: others would be a pass, and a start of the engine, of their own
    rows: list[dict[str, object]] = [
        {"id": n, "prompt": f"Story {n} begins: once", "max_tokens": tokens(n), "ignore_eos": True,
         "allowed_token_ids": LETTERS}
        for n in range(320)
    ]  # fmt: skip
    rows[17] |= {"allowed_token_ids": [999_999_999]}  # beyond its vocabulary: vLLM refuses it, and this row alone
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.jsonl"
    command = [str(tmp_path / "in.jsonl"), "-o", str(output), "--engine", "ray-data", "--start"]
    command += [str(tiny_model), "--context", "512", "--set", "eager=true", "--temperature", "0"]
    first = cluster.batch(*command)
    until = time.monotonic() + 600
    while not whole_lines(output) and first.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    first.kill()
    said = first.communicate()[0]
    assert 0 < whole_lines(output) < 319, said
    again = cluster.batch(*command)
    said = again.communicate(timeout=800)[0]
    assert again.returncode == 1, said  # finished, one row in the error file
    found = lines(output)
    assert sorted(int(str(line["id"])) for line in found) == [n for n in range(320) if n != 17], said
    assert all(line["completion_tokens"] == tokens(int(str(line["id"]))) for line in found)
    assert all(str(line["response"]).isalpha() for line in found)
    errors = lines(tmp_path / "out.errors.jsonl")
    assert [error["custom_id"] for error in errors] == ["17"]
    assert "allowed_token_ids" in json.dumps(errors)
    resumed = subprocess.run(
        [cluster.python, "-m", "corral", "batch", "resume", output], env=cluster.env, capture_output=True, text=True
    )
    assert "320" in resumed.stdout + resumed.stderr, resumed.stderr  # nothing to do, and it knows where it ran


def test_without_a_cluster_it_says_so(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("Hello\n")
    nowhere = Cluster(cluster.python, {**cluster.env, "RAY_ADDRESS": f"127.0.0.1:{free_port()}"})
    run = nowhere.batch(
        str(tmp_path / "in.txt"), "-o", str(tmp_path / "o.jsonl"), "--engine", "ray-data", "--start", "m"
    )
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 9, said
    assert "Ray cluster" in said

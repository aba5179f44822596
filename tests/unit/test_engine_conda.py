"""`corral engine install --into conda:NAME`, and the question to a queue's cheapest place before a job waits.

No conda can be had from the package registries that tests may use, so it is a stand-in: `create` makes a real virtual
environment, `env list --json`, `shell.bash hook` and `activate` answer as conda does. What is installed is installed
for real, by uv, from a lock with hashes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.base.errors import AccessError, EngineError, NotFoundError, UsageError
from corral.deploy.slurm import preflight as early
from corral.deploy.slurm.commands import forget_answers
from corral.engines import conda
from corral.engines.runtimes.base import NodeCheck, NodeSide, make_runtime
from tests.fake_conda import make_conda


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_conda(tmp_path, monkeypatch)


def install(env: str) -> conda.CondaEngine:
    return conda.install_into_conda(env, "cuda", "0.32.0", lambda _: None)


def test_an_environment_is_made_filled_and_used(place: Path) -> None:
    done = install("vllm-inference")
    assert (done.version, done.made, done.prefix) == ("0.32.0", True, f"{place}/envs/vllm-inference")
    said = (place / "said").read_text()
    assert "create --yes --quiet --name vllm-inference --override-channels --channel conda-forge python=3.1" in said
    again = install("vllm-inference")
    assert (again.version, again.made) == ("0.32.0", False)
    runtime = make_runtime("conda", {"env": "vllm-inference"}, NodeSide("/h", "cuda", "0.32.0"))
    (check,) = runtime.check()
    for argv in (check.argv, check.light):  # the runtime finds what was installed
        asked = subprocess.run(argv, capture_output=True, text=True)
        assert (asked.returncode, asked.stdout.strip()) == (0, "0.32.0"), asked.stderr


def test_a_prefix_is_as_good_as_a_name(place: Path, tmp_path: Path) -> None:
    done = install(str(tmp_path / "shared" / "vllm"))
    assert done.prefix == str(tmp_path / "shared" / "vllm")
    assert "--prefix" in (place / "said").read_text()


def test_what_cannot_be_done_is_told(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "broken").touch()
    with pytest.raises(EngineError, match="could not make the environment new: CondaHTTPError: no channel"):
        install("new")
    (place / "broken").unlink()
    for wrong in ("", "-n", "a b", "a:b"):
        with pytest.raises(UsageError, match="is not the name of a conda environment"):
            install(wrong)
    install("mine")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(AccessError, match="belongs to another user"):
        install("mine")
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CONDA_EXE", raising=False)
    if not any(Path("/opt").glob("*/bin/conda")):
        with pytest.raises(NotFoundError, match="no conda, mamba or micromamba"):
            install("mine")


def test_an_old_python_is_refused_with_the_ones_that_do(place: Path) -> None:
    python = place / "envs" / "old" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.8\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=r"has Python 3\.8, and the cuda engine is locked for 3\.11"):
        install("old")


# ------------------------------------------------------------------------------------------ before a job waits
SRUN = """#!/bin/bash
echo "$*" >>"$SRUN_SAID"
[ "$SRUN_MODE" != busy ] || { echo "srun: error: Unable to allocate: Requested nodes are busy" >&2; exit 1; }
while [ "${1#--}" != "$1" ]; do shift; done
ON_NODE=1 exec "$@"
"""
Probe = Callable[[str, str], NodeCheck]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_answers()
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SRUN_SAID", str(tmp_path / "said"))
    monkeypatch.setenv("SRUN_MODE", "")
    return tmp_path / "said"


def check(here: str, node: str) -> NodeCheck:
    light = ("sh", "-c", f'if [ -n "$ON_NODE" ]; then {node}; else {here}; fi')
    return NodeCheck("vLLM in the conda environment x", ("true",), "make it", light=light)


GOOD, LACKS, NO_CONDA = "echo 0.32.0", "echo it is not there >&2; exit 1", "echo no conda here >&2; exit 127"


@pytest.mark.parametrize(
    ("here", "node", "mode", "refused"),
    [
        (GOOD, LACKS, "", ""),  # the login node's answer costs nothing, and the file system is shared
        (NO_CONDA, GOOD, "", ""),
        (LACKS, GOOD, "", ""),
        (NO_CONDA, LACKS, "", "asked on a node: it is not there"),
        (LACKS, LACKS, "", "asked on a node: it is not there"),
        (LACKS, GOOD, "busy", "vLLM in the conda environment x: it is not there"),
        (NO_CONDA, LACKS, "busy", ""),  # nobody could be asked: the job itself will say
    ],
)
def test_the_cheapest_place_that_answers(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, here: str, node: str, mode: str, refused: str
) -> None:
    monkeypatch.setenv("SRUN_MODE", mode)
    where = ["--partition=gpu", "--account=lab"]
    if refused:
        with pytest.raises(EngineError, match=refused):
            early.refuse_lacking([check(here, node)], where)
    else:
        early.refuse_lacking([check(here, node)], where)
    if here == GOOD:
        assert not cluster.exists()
    else:
        assert "--time=2 --immediate=60 --partition=gpu --account=lab" in cluster.read_text()
        assert "--gpus" not in cluster.read_text()


def test_a_module_around_it_is_asked_as_well() -> None:
    options = {"load": ["python"], "inside": "conda", "options": {"env": "x"}}
    runtime = make_runtime("module", options, NodeSide("/h", "cuda", "0.32.0"))
    loads, inside = runtime.check()
    assert loads.light[-1] == "true"
    assert "python" in inside.light
    assert inside.light[:3] == loads.light[:3]
    assert "corral engine install --into conda:x" in inside.remedy


def test_the_command_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from corral.cli.engine import command

    runner = CliRunner()
    done = runner.invoke(command, ["install", "--into", "conda:cli", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["flavour"] == "cuda"
    for words, told in ((["install", "--into", "venv:x"], "--into cannot be"), (["install"], "no engine was named")):
        refused = runner.invoke(command, words)
        assert told in str(refused.exception)

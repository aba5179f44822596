"""`corral up --dry-run --shell`: what it prints is pasted, as it is, into a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from corral.base.home import home_dir
from corral.cli import root
from corral.deploy.lifecycle import rendering
from corral.deploy.lifecycle.decision import DeployRequest
from tests.unit.conftest import Corral
from tests.until import free_port, until

NOBODY = "sh -c 'exit 255'"  # an ssh that reaches nobody


def code_of(port: int, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_on_this_machine_it_serves(corral: Corral, tmp_path: Path) -> None:
    port = free_port()
    printed = corral("up", str(corral.model), "--name", "it's", "--port", str(port), "--dry-run", "--shell")
    assert printed.code == 0, printed.err
    assert str(corral.model) in printed.out
    shell = subprocess.Popen(
        ["bash"], stdin=subprocess.PIPE, env=corral.env, cwd=tmp_path, start_new_session=True, text=True
    )
    assert shell.stdin
    shell.stdin.write(printed.out)
    shell.stdin.close()
    try:
        assert until(lambda: code_of(port), "an answer") == 401
        (key,) = (corral.home / "corral" / "pasted").glob("*/key")
        assert code_of(port, key.read_text().strip()) == 200
        assert key.stat().st_mode & 0o077 == 0
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    assert not (corral.home / "corral/deployments").exists()  # nobody takes it for a deployment


def test_a_model_of_the_hub_is_pulled_first_and_no_hub_is_asked(
    clean_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is started by hand has no token and no cache of the hub."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("corral.plan.models.hub.read_repository", lambda *_: pytest.fail("the hub was asked"))
    monkeypatch.setattr("huggingface_hub.HfApi.auth_check", lambda *_: pytest.fail("the hub was asked"))
    monkeypatch.chdir(clean_home)
    profile = clean_home / ".corral" / "profiles" / "box.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text('[hardware]\ngpus = "8xH100"\n[runtime]\nname = "docker"\n')
    words = ["up", "llama-3.1-70b-instruct", "--on", "box", "--dry-run", "--json"]  # 8 GPUs that are not here
    spec = json.loads(CliRunner().invoke(root, words).stdout)
    done = CliRunner().invoke(root, [*words, "--shell"])
    assert done.exit_code == 0, done.output
    assert "--gpus" in spec["ranks"][0]["argv"]
    assert spec["model_path"] == "meta-llama/Llama-3.1-70B-Instruct"
    folder = f"{home_dir()}/models/llama-3.1-70b-instruct"
    assert f"-m corral pull meta-llama/Llama-3.1-70B-Instruct --to {folder}\n" in done.stdout
    assert f"source={folder}," in done.stdout
    assert f" {folder} --served-model-name" in done.stdout


SSH = {"hosts": ["node00", "10.0.0.2"], "gpus": "8xH100", "home": "/shared/corral"}


def pasted(capture: list[str], **options: object) -> str:
    wish = DeployRequest(
        model="llama-3.1-70b", target="ssh", target_options={**SSH, **options}, runtime="docker", fixed={"data": 2}
    )
    return rendering.to_paste(wish, capture.append)


def test_over_ssh_what_cannot_be_asked_is_left_open_and_said_in_the_text(
    clean_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CORRAL_SSH", NOBODY)
    notes: list[str] = []
    text = pasted(notes)
    assert "VLLM_HOST_IP=@ADDRESS0@ " in text  # a name may lead to another network
    assert "VLLM_HOST_IP=10.0.0.2 " in text
    assert "NCCL_IB_HCA==@HCA0@ " in text
    assert "NCCL_SOCKET_IFNAME==@INTERFACE1@ " in text
    assert any("fill in the nodes' own values" in line for line in text.splitlines() if line.startswith("# "))
    assert text.index("# rank 1") < text.index("# rank 0")  # the head comes last, and keeps the terminal
    assert text.count("<<'CORRAL' &\n") == 1
    assert "pull meta-llama/Llama-3.1-70B --to /shared/corral/models/llama-3.1-70b --hosts node00,10.0.0.2\n" in text


def test_over_ssh_what_a_profile_names_is_written_as_a_start_writes_it(
    clean_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CORRAL_SSH", NOBODY)
    text = pasted([], hca="mlx5", interface="bond0")
    assert text.count("NCCL_IB_HCA=mlx5") == 2
    assert text.count("NCCL_SOCKET_IFNAME==bond0 ") == text.count("GLOO_SOCKET_IFNAME=bond0 ") == 2


def test_an_image_with_ray_is_built_on_each_node_before_it_is_run(
    clean_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CORRAL_SSH", NOBODY)
    wish = DeployRequest(
        model="llama-3.1-405b", target="ssh", target_options=SSH, runtime="docker", link="ray",
        runtime_options={"ray": "install"}, fixed={"pipeline": 2},
    )  # fmt: skip
    text = rendering.to_paste(wish, lambda _: None)
    image = next(word for word in text.split() if word.startswith("corral-with-ray:"))
    before, _, after = text.partition("# rank 1")
    assert before.count("--quiet --tag") == 2
    assert before.count(image) == 2
    assert image in after


def test_a_model_that_nodes_lack_is_brought_by_a_command_of_its_own(
    corral: Corral, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_SSH", NOBODY)
    options = {"hosts": ["10.0.0.1"], "gpus": "1xH100", "home": "/shared/corral", "models": str(corral.model.parent)}
    wish = DeployRequest(model=str(corral.model), target="ssh", target_options=options, runtime="docker")
    assert f" {corral.model} --served-model-name" in rendering.to_paste(wish, lambda _: None)  # the profile says so
    wish = DeployRequest(
        model=str(corral.model), target="ssh", target_options={**options, "models": None}, runtime="docker"
    )
    text = rendering.to_paste(wish, lambda _: None)
    assert f"pull {corral.model} --to /shared/corral/models/{corral.model.name} --hosts 10.0.0.1\n" in text
    assert f" /shared/corral/models/{corral.model.name} --served-model-name" in text
    assert f"source=/shared/corral/models/{corral.model.name}," in text


def test_scripts_around_an_engine_are_not_shown_with_it(clean_home: Path) -> None:
    options = {"gpu": "h100", "gpus_per_node": 4, "nodes": 2, "partition": "gpu", "time": "4:00:00"}
    wish = DeployRequest(
        model="llama-3.1-70b", target="slurm", target_options=options, runtime="conda",
        runtime_options={"env": "vllm"}, fixed={"tensor": 4},
    )  # fmt: skip
    lines = rendering.to_paste(wish, lambda _: None).splitlines()
    shown = [line for line in lines if line.startswith("#   ")]
    assert len(shown) == 2
    assert all("/models/llama-3.1-70b --served-model-name" in line for line in shown)
    assert lines[-2].startswith("sbatch ")

"""Paths after `--`: found on the nodes and mounted into containers, or refused by their names before a start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import NotFoundError, UsageError
from corral.base.shell import Completed
from corral.deploy.targets import slurm
from corral.deploy.targets.base import load_target
from corral.engines.paths import named_paths
from corral.engines.runtimes.base import make_runtime
from tests.fake_ssh import make_fake_ssh
from tests.unit.conftest import Corral
from tests.unit.test_runtimes import made, words_after


def named(*arguments: str) -> dict[str, str]:
    return {one.path: one.flag for one in named_paths(arguments)}


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        (["--chat-template", "/t/a.jinja"], {"/t/a.jinja": "--chat-template"}),
        (["--chat-template=/t/a.jinja"], {"/t/a.jinja": "--chat-template"}),
        (["--lora-modules", "a=/l/a", "b=/l/b", "c=org/c"], {"/l/a": "--lora-modules", "/l/b": "--lora-modules"}),
        (["--lora-modules", '{"name": "a", "path": "/l/a"}', "--enable-lora"], {"/l/a": "--lora-modules"}),
        (["--lora-modules", '[{"name": "a", "path": "/l/a"}]'], {"/l/a": "--lora-modules"}),
        (["--speculative-config", '{"model": "/d/e", "method": "eagle3"}'], {"/d/e": "--speculative-config"}),
        (["--speculative-config.model", "/d/e"], {"/d/e": "--speculative-config.model"}),
        (["--kv-transfer-config", '{"kv_connector_extra_config": {"shared_storage_path": "/kv"}}'],
         {"/kv": "--kv-transfer-config"}),
        (["--tokenizer", "/tok", "--tokenizer", "org/tok"], {"/tok": "--tokenizer"}),
        (["--allowed-local-media-path", "/"], {}),  # every machine and image has its own
        (["--allowed-local-media-path", "/dev/shm"], {}),
        (["--override-generation-config", '{"stop": ["/s"]}', "--seed", "-1"], {}),  # no path, by its key
        (["--chat-template", "{% for m in messages %}/x{% endfor %}"], {}),
        (["--chat-template", "{{ broken json"], {}),
        (["--hf-overrides", "[" * 3000], {}),
        (["--generation-config", "vllm"], {}),
    ],
)  # fmt: skip
def test_paths_are_found_in_arguments(arguments: list[str], paths: dict[str, str]) -> None:
    assert named(*arguments) == paths


@pytest.mark.parametrize(
    "arguments",
    [
        ["--chat-template", "./a.jinja"],
        ["--chat-template", "a.jinja"],
        ["--lora-modules", "x=~/a"],
        ["--tokenizer", ".."],
        ["--speculative-config", '{"model": "../draft"}'],
    ],
)
def test_a_path_that_depends_on_the_folder_is_refused_with_the_whole_one(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="the engine runs in another folder") as error:
        named(*arguments)
    assert "Write the whole path: /" in error.value.remedy


def test_what_is_written_to_is_told_apart() -> None:
    config = '{"torch_profiler_dir": "/p", "config_path": "/c"}'
    found = {one.path: one.written for one in named_paths(["--profiler-config", config, "--download-dir", "/d"])}
    assert found == {"/p": True, "/c": False, "/d": True}


IMAGES = {
    "docker": ("--runtime", "docker", "--runtime-option", "image=me/vllm:1"),
    "podman": ("--runtime", "podman", "--runtime-option", "image=me/vllm:1"),
    "apptainer": ("--runtime", "apptainer", "--runtime-option", "image=/i/vllm.sif"),
}


@pytest.mark.parametrize("runtime", IMAGES)
def test_paths_are_mounted_into_containers(corral: Corral, tmp_path: Path, runtime: str) -> None:
    for name in ("t.jinja", "adapter", "draft", "profiles", "mine/x"):
        (tmp_path / name).mkdir(parents=True)
    config = json.dumps({"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2})
    arguments = (
        "--chat-template", str(tmp_path / "t.jinja"),
        "--lora-modules", f"x={tmp_path}/adapter", "y=/inside/x",
        "--speculative-config", config,
        "--profiler-config", json.dumps({"torch_profiler_dir": str(tmp_path / "profiles")}),
        "--tokenizer", "/vllm-workspace/tokenizer",
    )  # fmt: skip
    mount = ("--runtime-option", f"mounts={tmp_path}/mine:/inside")
    done = corral("up", str(corral.model), "--dry-run", "--json", *IMAGES[runtime], *mount, "--", *arguments)
    assert done.code == 0, done.err
    mounts = words_after(tuple(json.loads(done.out)["ranks"][0]["argv"]), "--mount")
    for name in ("t.jinja", "adapter", "draft"):
        assert f"type=bind,source={tmp_path}/{name},target={tmp_path}/{name},ro" in mounts
    assert f"type=bind,source={tmp_path}/profiles,target={tmp_path}/profiles" in mounts
    assert f"type=bind,source={tmp_path}/mine,target=/inside,ro" in mounts
    assert not [mount for mount in mounts if "vllm-workspace" in mount or "/inside/x" in mount]


def test_what_is_not_there_is_refused_before_anything_starts(corral: Corral, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        done = corral("up", str(corral.model), *words)
        assert done.code == NotFoundError.exit_code, done
        return " ".join(done.err.split())

    gone = f"{tmp_path}/gone"
    for words in ((), ("--dry-run",), IMAGES["docker"]):
        text = refused(*words, "--", "--lora-modules", f"x={gone}")
        assert f"--lora-modules names {gone}, which this machine does not have, or may not read." in text
    profiles = json.dumps({"torch_profiler_dir": gone})
    assert gone in refused(*IMAGES["docker"], "--", "--profiler-config", profiles)
    assert corral("up", str(corral.model), "--dry-run", "--", "--profiler-config", profiles).code == 0
    mounted = ("--runtime-option", f"mounts={tmp_path}:/inside")
    assert f"names {gone}, which" in refused(*IMAGES["docker"], *mounted, "--", "--tokenizer", "/inside/gone")
    assert not list((corral.home / "corral" / "deployments").glob("*"))


def test_the_image_of_a_module_has_its_own_too() -> None:
    inside = {"inside": "docker", "options": {"image": "me/vllm:1", "mounts": ["/a:/in", "/b:/in/b"]}}
    runtime = make_runtime("module", {"load": ["x"], **inside}, made("docker").node)  # type: ignore[attr-defined]
    assert [runtime.outside(path) for path in ("/in/x", "/in/b/y", "/t", "/vllm-workspace/t", "/into")] == [
        "/a/x", "/b/y", "/t", "", "/into",
    ]  # fmt: skip
    assert made("managed").outside("/vllm-workspace/t") == "/vllm-workspace/t"


def test_hosts_are_asked(clean_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_SSH", make_fake_ssh(tmp_path / "hosts", ["a", "b"]))
    there, odd = tmp_path / "it's there", str(tmp_path / "$HOME `x`")
    there.touch()
    target = load_target("ssh", {"hosts": ["a", "b"]})
    assert target.missing([str(there), odd]) == {odd: "a"}
    assert target.missing([]) == {}
    assert load_target("ssh", {"hosts": ["a"], "gpus": "1xH100"}).missing([odd]) == {}  # a dry run asks none


def test_what_a_login_node_lacks_is_asked_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [None, Completed((), 0, "reached\n/gone\n/other\n", "")]
    monkeypatch.setattr(slurm, "on_a_node", lambda *_: answers.pop(0))
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/srun")
    target = load_target("slurm", {"partition": "gpu"})
    assert target.missing([str(tmp_path)]) == {}  # it is here; nobody is asked
    assert target.missing(["/gone"]) == {}  # no node is free
    assert target.missing([str(tmp_path), "/gone"]) == {"/gone": "a node"}
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert target.missing(["/gone"]) == {}

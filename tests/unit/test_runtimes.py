"""One contract for every runtime, and each with a stand-in of its tool, the real agent and a stand-in engine."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import EngineError, UsageError
from corral.deploy.deployment.diagnosis import diagnose, last_lines
from corral.deploy.deployment.state import Reason
from corral.deploy.launch.render import UNSET
from corral.engines import PINNED_VERSION
from corral.engines.flags import FlagList, check_arguments
from corral.engines.runtimes.base import RUNTIMES, EngineCommand, NodeSide, Runtime, make_runtime, parse_options
from corral.engines.runtimes.container import Mount, container_name
from tests.unit.conftest import Shellcheck
from tests.unit.test_agent import Run
from tests.until import free_port

HERE = Path(__file__).parent.parent
STUB = HERE / "stub_engine.py"
CLIENT = HERE / "fake_container_client.py"
SECRET = "hf_" + "s3cret" * 5
HOSTILE = """it's a "home", $HOME `x`"""  # a folder's name

# the least that each runtime must be told; {place} is the folder of the `tools` fixture
LEAST: dict[str, dict[str, Any]] = {
    "managed": {},
    "venv": {"path": "{place}/venv"},
    "conda": {"env": "vllm-inference"},
    "module": {"load": ["python/3.12"], "inside": "venv", "options": {"path": "{place}/venv"}},
    "docker": {"image": "me/vllm:1"},
    "podman": {"image": "me/vllm:1"},
    "apptainer": {"image": "/images/vllm.sif"},
}
CONTAINERS = ("docker", "podman")
ALL = list(RUNTIMES)


def options_of(name: str, place: Path | str = "/place") -> dict[str, Any]:
    filled: dict[str, Any] = json.loads(json.dumps(LEAST[name]).replace("{place}", json.dumps(str(place))[1:-1]))
    return filled


def made(name: str, place: Path | str = "/place", flavour: str = "cpu", **more: Any) -> Runtime:
    home = str(Path(place) / "corral")
    return make_runtime(name, {**options_of(name, place), **more}, NodeSide(home, flavour, PINNED_VERSION))


def job(runtime: Runtime, place: Path | str = "/place", **changes: Any) -> EngineCommand:
    cwd = str(Path(place) / "rank0")
    fields: dict[str, Any] = {
        "deployment": "my model",
        "launch_id": "abc123",
        "rank": 0,
        "argv": (*runtime.serve, "/models/m", "--port", "1234"),
        "env": {"CORRAL_KEY_FILE": "/d/key", "PYTHONPATH": "/d/node", "SOME_SETTING": SECRET},
        "cwd": cwd,
        "visible": ("/models/m", "/d/node", "/d/key"),
        "writable": (cwd,),
        **changes,
    }
    return EngineCommand(**fields)


def rocm(name: str, **options: object) -> tuple[str, list[str], str]:
    """The image, the words and the script of a rank with AMD GPUs."""
    runtime = make_runtime(name, options, NodeSide("/place/corral", "rocm", PINNED_VERSION))
    argv = runtime.wrap(job(runtime, gpus=8)).argv
    return runtime.image, list(argv), argv[2]


def test_amd_gpus_in_containers() -> None:
    image, words, script = rocm("docker")
    assert image == f"vllm/vllm-openai-rocm:v{PINNED_VERSION}"
    assert {"--device=/dev/kfd", "--device=/dev/dri", "--ipc=host"} <= set(words)
    assert "--gpus" not in words
    assert "--group-add" in script
    _, words, _ = rocm("docker", gpus="2,3")
    assert "--env=HIP_VISIBLE_DEVICES=2,3" in words
    image, words, script = rocm("podman")
    assert image.startswith("docker.io/vllm/vllm-openai-rocm:")
    assert "keep-groups" in script
    assert not any("nvidia" in word for word in words)
    assert "--rocm" in rocm("apptainer")[1]
    assert "--nv" not in rocm("apptainer")[1]


def test_nothing_corral_installs_runs_on_amd_gpus() -> None:
    with pytest.raises(UsageError, match="not for rocm") as refused:
        make_runtime("managed", {}, NodeSide("/place/corral", "rocm", PINNED_VERSION))
    assert "--runtime docker" in (refused.value.remedy or "")


# ----------------------------------------------------------------------------------------------------- the contract
def test_every_row_is_tested() -> None:
    assert set(LEAST) == set(RUNTIMES)


@pytest.mark.parametrize("name", ALL)
class TestContract:
    def test_it_says_what_it_is(self, name: str) -> None:
        runtime = made(name)
        assert runtime.name == name
        assert runtime.engine
        assert runtime.serve
        assert runtime.python
        assert isinstance(runtime.flags(), FlagList)
        assert isinstance(runtime.carried, tuple)

    def test_wrapping_is_pure(self, name: str, clean_home: Path) -> None:
        runtime = made(name)
        before = sorted(clean_home.rglob("*"))
        assert runtime.wrap(job(runtime)) == runtime.wrap(job(runtime))
        assert sorted(clean_home.rglob("*")) == before

    def test_the_jobs_words_come_last_and_whole(self, name: str) -> None:
        runtime = made(name)
        one = job(runtime)
        wrapped = runtime.wrap(one)
        assert wrapped.argv[-len(one.argv) + 1 :] == one.argv[1:]
        assert one.argv[0] in wrapped.argv
        assert all(isinstance(word, str) for word in wrapped.argv)

    def test_no_value_of_the_environment_is_on_a_command_line(self, name: str) -> None:
        runtime = made(name)
        wrapped = runtime.wrap(job(runtime))
        for argv in (wrapped.argv, *wrapped.cleanup, wrapped.pid_query):
            assert not any(SECRET in word for word in argv)
        assert wrapped.env["SOME_SETTING"] == SECRET
        assert wrapped.env["PYTHONPATH"] == "/d/node"

    def test_secret_variables_are_never_named_to_a_container(self, name: str) -> None:
        wrapped = made(name).wrap(job(made(name)))
        named = {word.partition("=")[0] for word in words_after(wrapped.argv, "--env")}
        assert not named & (set(UNSET) - {"PYTHONPATH"})

    def test_an_unknown_option_is_refused_with_the_nearest(self, name: str) -> None:
        with pytest.raises(UsageError) as caught:
            made(name, imagge="x", pathh="y", enw="z", lode="w")
        assert caught.value.exit_code == 2
        assert caught.value.remedy

    def test_checks_are_commands_with_remedies(self, name: str) -> None:
        for check in made(name).check():
            assert check.argv
            assert all(isinstance(word, str) for word in check.argv)
            assert check.what
            assert check.remedy.endswith(".")

    def test_generated_shell_is_clean(self, name: str, shellcheck: Shellcheck) -> None:
        runtime = made(name)
        wrapped = runtime.wrap(job(runtime, fabric=True))
        commands = [wrapped.argv, *wrapped.cleanup, wrapped.pid_query]
        scripts = {(argv[0], argv[2]) for argv in commands if argv and argv[1:2] == ("-c",)}
        assert scripts or name in ("managed", "venv")  # these start the engine's Python itself
        for shell, script in scripts:
            # what is not known here: files sourced on a node; lists of ids that are meant to be split
            shellcheck(script, "-s", shell, "-e", "SC1090,SC1091,SC2086")


def test_options_from_the_command_line() -> None:
    found = parse_options(
        ["load=['python/3.12', \"cuda\"]", "inside=conda", "options.env=/a b", "options.version=0.32.0", "purge=true"]
    )
    inner = {"env": "/a b", "version": "0.32.0"}
    assert found == {"load": ["python/3.12", "cuda"], "inside": "conda", "options": inner, "purge": True}
    for wrong in ("image", "=x", "a b=c", ".x=1"):
        with pytest.raises(UsageError, match="KEY=VALUE"):
            parse_options([wrong])
    with pytest.raises(UsageError, match="twice"):
        parse_options(["image=a", "image=b"])
    with pytest.raises(UsageError, match="value and as a table"):
        parse_options(["options=a", "options.env=b"])


def test_an_unknown_runtime_is_answered_with_the_known() -> None:
    with pytest.raises(UsageError) as caught:
        make_runtime("doker", {}, NodeSide("/h", "cpu", "0.32.0"))
    assert "Did you mean 'docker'?" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("venv", {"path": "relative"}, "must begin with /"),
        ("venv", {}, "lacks 'path'"),
        ("conda", {"env": "-n"}, "is not the name of a conda environment"),
        ("conda", {"envv": "x"}, "unknown key 'envv'"),
        ("module", {"load": ["--force"]}, "is not the name of a module"),
        ("module", {"load": [], "inside": "module"}, "cannot be 'module'"),
        ("module", {"load": [], "inside": "venv", "options": {"paht": "/x"}}, "unknown key 'paht'"),
        ("docker", {}, "images are for NVIDIA and AMD GPUs"),
        ("docker", {"image": "i", "ipc": "hots"}, "ipc cannot be"),
        ("docker", {"image": "i", "gpus": "two"}, "gpus cannot be"),
        ("docker", {"image": "i", "mounts": ["data"]}, "is not a mount"),
        ("docker", {"image": "--privileged"}, "is not the name of an image"),
        ("podman", {"image": "i", "privileged": "yes"}, "must be true or false"),
        ("apptainer", {"image": "vllm"}, "is not an Apptainer image"),
    ],
)
def test_wrong_options_are_refused(name: str, options: Mapping[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_runtime(name, options, NodeSide("/h", "cpu", "0.32.0"))


def test_flags_of_an_unknown_vllm_are_left_to_it() -> None:
    unknown = made("venv").flags()
    assert not unknown.complete
    check_arguments(["--swap-space", "16", "--brand-new=1", "--list", "a", "b"], unknown)
    with pytest.raises(UsageError, match="set by Corral"):
        check_arguments(["--port", "1"], unknown)
    known = made("docker", image="vllm/vllm-openai:v0.32.0").flags()
    with pytest.raises(EngineError, match="--swap-space"):
        check_arguments(["--swap-space", "16"], known)
    assert made("conda", version="0.32.0").flags().complete
    assert not made("docker", image="me/vllm-openai:v0.32.0").flags().complete  # somebody else's build


# ------------------------------------------------------------------------------------------------------- containers
def words_after(argv: tuple[str, ...], flag: str) -> list[str]:
    return [word for before, word in itertools.pairwise(argv) if before == flag]


def wrapped(name: str, flavour: str = "cpu", changes: Mapping[str, Any] | None = None, **options: Any):
    runtime = made(name, flavour=flavour, **options)
    return runtime.wrap(job(runtime, **(changes or {})))


def test_default_images_are_pinned_to_the_engine() -> None:
    version = PINNED_VERSION
    assert wrapped("docker", "cuda", image="").argv.count(f"vllm/vllm-openai:v{version}") == 1
    assert f"docker.io/vllm/vllm-openai:v{version}" in wrapped("podman", "cuda", image="").argv
    assert f"docker://vllm/vllm-openai:v{version}" in wrapped("apptainer", "cuda", image="").argv


def test_gpus_and_shared_memory() -> None:
    gpu = {"gpus": True}
    assert words_after(wrapped("docker", changes=gpu).argv, "--gpus") == ["all"]
    assert words_after(wrapped("docker", gpus="0,2").argv, "--gpus") == ['"device=0,2"']
    assert words_after(wrapped("podman", changes=gpu, gpus="0,2").argv, "--device") == [
        "nvidia.com/gpu=0",
        "nvidia.com/gpu=2",
    ]
    assert "--nv" in wrapped("apptainer", changes=gpu).argv
    plain = wrapped("docker").argv
    assert "--gpus" not in plain
    assert "--ipc=host" in plain
    assert "--network=host" in plain
    own = wrapped("docker", shm_size="16g").argv
    assert "--shm-size=16g" in own
    assert "--ipc=host" not in own


def test_rdma_for_several_nodes() -> None:
    several = {"fabric": True}
    argv = wrapped("docker", changes=several).argv
    assert "/dev/infiniband" in argv[2]  # looked for on the node: a missing device would be an error
    assert "memlock=-1" in argv
    assert "--ulimit=host" in wrapped("podman", changes=several).argv
    assert "/dev/infiniband" not in wrapped("docker").argv[2]
    assert "/dev/infiniband" not in wrapped("docker", changes=several, rdma=False).argv[2]
    privileged = wrapped("docker", changes=several, privileged=True).argv
    assert "--privileged" in privileged
    assert "/dev/infiniband" not in privileged[2]


def test_folders_are_mounted_where_they_are() -> None:
    snapshot = "/h/hub/models--a--b/snapshots/0123"
    changes = {"visible": (snapshot, "/d/key", "org/model")}
    for name in (*CONTAINERS, "apptainer"):
        mounts = words_after(wrapped(name, changes=changes, mounts=["/data:/in:rw"]).argv, "--mount")
        assert "type=bind,source=/h/hub/models--a--b,target=/h/hub/models--a--b,ro" in mounts  # its links lead there
        assert "type=bind,source=/d/key,target=/d/key,ro" in mounts
        assert "type=bind,source=/place/rank0,target=/place/rank0" in mounts
        assert "type=bind,source=/data,target=/in" in mounts
        assert not any("org/model" in mount for mount in mounts)
    assert Mount('/a,"b', "/c").as_argument() == 'type=bind,"source=/a,""b",target=/c,ro'


def test_names_of_containers() -> None:
    runtime = made("docker")
    names = [
        container_name(job(runtime, deployment=deployment, rank=rank), home)
        for deployment in ("a/b", "a b", "x" * 80, "…")
        for rank in (0, 1)
        for home in ("/home/a", "/home/b")
    ]
    assert len(set(names)) == len(names)
    for name in names:
        assert len(name) <= 63
        assert name.replace("-", "").replace(".", "").isalnum()


def test_what_the_client_would_take_for_its_own_is_given_by_value() -> None:
    found = wrapped("docker", changes={"env": {"PATH": "/engine/bin", "X": "1"}})
    assert "PATH=/engine/bin" in found.argv
    assert "PATH" not in found.env
    assert "HOME=/place/corral/cache/docker-me-vllm-1/home" in found.argv
    assert found.env["VLLM_CACHE_ROOT"].startswith("/place/corral/cache/docker-me-vllm-1/")


# -------------------------------------------------------------------------------- with stand-ins for the tools
@dataclass
class Tools:
    """A machine with a venv, conda, modules and container clients, all of them stand-ins."""

    place: Path
    state: Path

    def calls(self) -> list[list[str]]:
        file = self.state / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    place, state, commands = tmp_path / HOSTILE, tmp_path / "state", tmp_path / "commands"
    for folder in (place / "rank0", state):
        folder.mkdir(parents=True)
    # python -m MODULE … is the stand-in engine, any other Python is a real one
    real, stub = shlex.quote(sys.executable), shlex.quote(str(STUB))
    python = f'#!/bin/sh\n[ "$1" != -m ] || exec {real} {stub} "$@"\nexec {real} "$@"\n'
    installed = Path(made("managed", place).python[0]).parent
    for at in (
        place / "venv/bin",
        tmp_path / "conda/envs/vllm-inference/bin",
        installed,
        tmp_path / "module",
    ):
        script(at / "python", python)
    script(tmp_path / "image/python3", python)
    script(tmp_path / "image/vllm", f'#!/bin/sh\nexec {real} {stub} -m "$@"\n')
    for client in ("docker", "podman", "apptainer"):
        script(commands / client, f'#!/bin/sh\nexec {real} {shlex.quote(str(CLIENT))} {client} "$@"\n')
    hook = f"""conda() {{
        [ -d "{tmp_path}/conda/envs/$2" ] || {{ echo "EnvironmentNameNotFound: no $2" >&2; return 1; }}
        export PATH="{tmp_path}/conda/envs/$2/bin:$PATH" CONDA_PREFIX="{tmp_path}/conda/envs/$2" HOOKED=yes
    }}"""
    script(commands / "conda", f"#!/bin/sh\ncat <<'END'\n{hook}\nEND\n")
    # an old Environment Modules, which answers 0 whatever happened
    modules = """module() {
        [ "$1" = load ] || return 0
        [ "$2" = python/3.12 ] || { echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate '$2'" >&2; return 0; }
        export LOADEDMODULES="${LOADEDMODULES:+$LOADEDMODULES:}$2" MODULE_SET=yes PYTHONPATH=/apps/python
    }"""
    script(tmp_path / "modules/init/bash", modules)
    monkeypatch.setenv("MODULESHOME", str(tmp_path / "modules"))
    monkeypatch.setenv("FAKE_CONTAINERS", str(state))
    monkeypatch.setenv("PATH", f"{commands}:{tmp_path / 'image'}:{os.environ['PATH']}")
    for name in ("LOADEDMODULES", "CONDA_EXE", "BASH_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("APPTAINERENV_HF_TOKEN", SECRET)
    return Tools(place, state)


TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"


@pytest.mark.parametrize("name", ALL)
def test_words_folders_and_variables_arrive_unchanged(name: str, tools: Tools) -> None:
    runtime = made(name, tools.place)
    words = ("plain", "two words", """q'"`$(id)`\\""", "*", "", "--flag=ä")
    one = job(runtime, tools.place, argv=(*runtime.python, "-c", TELL, *words))
    wrapped = runtime.wrap(one)
    env = {key: value for key, value in os.environ.items() if key not in UNSET} | wrapped.env
    done = subprocess.run(wrapped.argv, env=env, cwd=one.cwd, capture_output=True, text=True, check=True)
    argv, cwd, seen = json.loads(done.stdout)
    assert tuple(argv) == words
    assert cwd == one.cwd
    assert {key: seen[key] for key in one.env} == one.env
    assert "HF_TOKEN" not in seen
    for cache in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert seen[cache].startswith(str(tools.place / "corral" / "cache"))


@pytest.mark.parametrize("name", ALL)
def test_checks_succeed_where_all_is_well(name: str, tools: Tools, tmp_path: Path) -> None:
    library = tmp_path / "library"
    (library / "vllm").mkdir(parents=True)
    (library / "vllm/__init__.py").write_text("__version__ = '0.32.0'\n")
    (library / "vllm-0.32.0.dist-info").mkdir()
    (library / "vllm-0.32.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    image = tmp_path / "vllm.sif"
    image.touch()
    more = {"image": str(image)} if name == "apptainer" else {}
    for check in made(name, tools.place, **more).check():
        env = {**os.environ, "PYTHONPATH": str(library)}
        done = subprocess.run(check.argv, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (check, done)
        if check.reports == "vllm":
            assert done.stdout.strip().splitlines()[-1] == "0.32.0"


@pytest.mark.parametrize("name", CONTAINERS)
def test_cleanup_can_be_repeated_and_finds_only_its_own(name: str, tools: Tools) -> None:
    runtime = made(name, tools.place)
    wrapped = runtime.wrap(job(runtime, tools.place))
    other = {"pid": 1, "id": "0" * 64, "labels": {"corral.run": "another.0"}}
    (tools.state / "other.container").write_text(json.dumps(other))
    for _ in range(2):
        for argv in wrapped.cleanup:
            assert subprocess.run(argv, capture_output=True).returncode == 0
    assert subprocess.run(wrapped.pid_query, capture_output=True, text=True).stdout == ""
    assert not [call for call in tools.calls() if call[1] == "rm"]


def started(runtime: Runtime, tools: Tools, **changes: Any) -> Run:
    port = free_port()
    folder = tools.place / "rank0"
    one = job(
        runtime,
        tools.place,
        argv=(*runtime.serve, "m", "--port", str(port)),
        env={"CORRAL_KEY_FILE": str(folder / "key"), "PYTHONPATH": str(folder), **changes.pop("env", {})},
    )
    wrapped = runtime.wrap(one)
    serve = {"host": "127.0.0.1", "port": port, "model": "m", "key_file": str(folder / "key")}
    return Run(
        folder,
        [],
        argv=list(wrapped.argv),
        env=wrapped.env,
        unset_env=list(UNSET),
        serve=serve,
        cleanup=[list(argv) for argv in wrapped.cleanup],
        pid_query=list(wrapped.pid_query),
        **changes,
    )


@pytest.mark.parametrize("name", ALL)
def test_the_agent_runs_it_and_takes_it_down(name: str, tools: Tools) -> None:
    one = started(made(name, tools.place), tools)
    one.wait_state("ready")
    one.process.terminate()
    assert one.wait_state("stopped").get("reason") == "requested"
    one.wait_gone()
    assert not list(tools.state.glob("*.container"))
    assert SECRET not in json.dumps(tools.calls())
    log = (one.folder / "engine.log").read_text() + one.events_file.read_text()
    assert SECRET not in log
    if (tools.state / "env.json").exists():
        inside = json.loads((tools.state / "env.json").read_text())
        assert "HF_TOKEN" not in inside
        assert inside["CORRAL_LAUNCH"] == one.launch_id
        assert inside["TMPDIR"] == "/tmp"
        assert inside["HOME"].endswith("/home")
        assert Path(inside["HOME"]).is_dir()


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize(("code", "how"), [(137, "by signal 9 (SIGKILL)"), (1, "with code 1")])
def test_a_container_that_ends_is_told_as_such(name: str, code: int, how: str, tools: Tools, monkeypatch) -> None:
    monkeypatch.setenv("STUB_OPTIONS", f"die-after-ready={code}")
    one = started(made(name, tools.place), tools)
    failed = one.wait_state("failed")
    assert failed.get("reason") == "engine_exited"
    assert failed.get("text").startswith(f"the engine's container ended {how} while ")
    one.wait_gone()
    found = diagnose([], failed.get("exit_code"), failed.get("signal"), was_ready=True, container=True)
    assert ("engine's container was killed" in found.cause) == (code == 137)


@pytest.mark.parametrize(
    ("name", "more", "reason", "said"),
    [
        ("docker", {"image": "missing/image:1"}, Reason.NO_IMAGE, "there is no image missing/image:1"),
        ("docker", {"program": "no-docker"}, Reason.NO_RUNTIME, "the command no-docker is not on the node"),
        ("apptainer", {"program": "singularity"}, Reason.NO_RUNTIME, "the command singularity is not on the node"),
        ("conda", {"env": "no-such"}, Reason.NO_RUNTIME, "conda environment no-such could not be activated"),
        ("conda", {"conda": "/no/conda"}, Reason.NO_RUNTIME, "/no/conda"),
        ("module", {"load": ["python/3.12", "cuda/99"]}, Reason.NO_RUNTIME, "module cuda/99 could not be loaded"),
    ],
)
def test_what_is_missing_is_said(
    name: str, more: dict[str, Any], reason: Reason, said: str, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = started(made(name, tools.place, **more), tools)
    failed = one.wait_state("failed")
    found = diagnose(last_lines(one.folder / "engine.log", 200), failed.get("exit_code"), failed.get("signal"))
    assert found.reason is reason
    assert said in found.cause
    assert found.remedy
    one.wait_gone()


def test_modules_are_seen_inside_and_python_is_not_disturbed(tools: Tools) -> None:
    for inside in ("conda", "managed", "docker", "apptainer"):
        options = {"load": ["python/3.12"], "inside": inside, "options": options_of(inside, tools.place)}
        node = NodeSide(str(tools.place / "corral"), "cpu", PINNED_VERSION)
        runtime = make_runtime("module", options, node)
        one = job(runtime, tools.place, argv=(*runtime.python, "-c", TELL))
        wrapped = runtime.wrap(one)
        env = {**os.environ, **wrapped.env}
        done = subprocess.run(wrapped.argv, env=env, capture_output=True, text=True, check=True)
        seen = json.loads(done.stdout)[2]
        assert seen["PYTHONPATH"] == "/d/node"
        if inside not in ("docker", "apptainer"):  # their environment is their own
            assert seen["MODULE_SET"] == "yes"
        for argv in wrapped.cleanup:
            assert subprocess.run(argv, capture_output=True, env=env).returncode == 0


def test_a_conda_prefix_needs_no_conda(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "commands/conda").unlink()
    runtime = made("conda", tools.place, env=str(tools.place / "venv"))
    wrapped = runtime.wrap(job(runtime, tools.place, argv=(*runtime.python, "-c", TELL)))
    env = {**os.environ, **wrapped.env}
    done = subprocess.run(wrapped.argv, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[2]["CONDA_PREFIX"] == str(tools.place / "venv")


# -------------------------------------------------------------------------------------------------- the command line
def test_a_dry_run_shows_the_containers_command(corral) -> None:
    words = (
        "up",
        str(corral.model),
        "--dry-run",
        "--json",
        "--runtime",
        "docker",
        "--runtime-option",
        "image=me/vllm:1",
    )
    spec = corral(*words, HF_TOKEN=SECRET).json()
    (rank,) = spec["ranks"]
    assert spec["runtime"] == "docker"
    assert spec["engine"] == "docker me/vllm:1"
    assert {"vllm", "me/vllm:1"} < set(rank["argv"])
    assert rank["cleanup"]
    assert rank["pid_query"]
    assert str(corral.model) in " ".join(words_after(tuple(rank["argv"]), "--mount"))
    assert "docker" in corral(*words, "--shell").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--runtime", "doker"), "doker"),
        (("--runtime", "docker"), "Name an image with vLLM for CPUs"),
        (("--runtime", "venv", "--runtime-option", "pth=/x"), "Did you mean 'path'?"),
        (("--runtime-option", "image=x"), "managed runtime takes no options, and was given 'image'"),
    ],
)
def test_what_the_command_line_refuses(corral, words: tuple[str, ...], said: str) -> None:
    done = corral("up", str(corral.model), "--dry-run", "--json", *words)
    assert done.code == 2
    assert said in done.err


def test_a_venv_is_served_from_the_command_line(corral, tools: Tools) -> None:
    """A stand-in environment, from `up` to `down`; flags of a vLLM that nobody knows are let through."""
    path = f"path={tools.place / 'venv'}"
    env = {key: os.environ[key] for key in ("PATH", "FAKE_CONTAINERS")}
    words = ("--runtime", "venv", "--runtime-option", path, "--port", str(free_port()))
    told = corral("up", str(corral.model), "--name", "v", *words, "--json", "--", "--swap-space", "16", **env)
    assert told.code == 0, told.err
    assert told.json()["engine"] == f"venv {tools.place / 'venv'}"
    assert corral("down", "v").code == 0


@pytest.mark.parametrize(("name", "more", "version"), [
    ("managed", {}, PINNED_VERSION),
    ("venv", {}, "0.26.0"),
    ("venv", {"version": "0.31.1"}, "0.31.1"),
    ("module", {}, "0.26.0"),
    ("conda", {}, ""),
    ("conda", {"env": "{place}/venv"}, "0.26.0"),
    ("docker", {"image": "registry.example/vllm/vllm-openai:v0.28.0"}, "0.28.0"),
    ("docker", {"image": "me/vllm:1"}, ""),
    ("apptainer", {"version": "0.26.0"}, "0.26.0"),
])  # fmt: skip
def test_the_version_is_told_without_asking_a_node(name: str, more: dict[str, str], version: str, tmp_path: Path):
    site = tmp_path / "venv/lib/python3.12/site-packages"
    (site / "vllm-0.26.0+cu130.dist-info").mkdir(parents=True)
    (site / "vllm_router-0.1.16.dist-info").mkdir()
    filled = {key: value.replace("{place}", str(tmp_path)) for key, value in more.items()}
    assert made(name, tmp_path, "cuda", **filled).version == version

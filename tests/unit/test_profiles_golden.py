"""The documented deployments, as the shipped examples lead to them: option by option, and word by word.

Every option that a document shows is either in the commands of today, or in the table with why it is gone. The whole
text is kept in tests/unit/golden/profiles; `CORRAL_GOLDEN=write` writes it anew, to be read before it is committed.
An example whose target or runtime is not there is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import UnreachableError
from corral.base.processes import OWN_COMMAND
from corral.cli import main
from corral.deploy.launch.links import Ports
from corral.deploy.profile import folders
from corral.deploy.profile.profile import environment, load_profile
from corral.deploy.targets import base, local, ssh
from corral.deploy.targets.base import ChosenPorts
from corral.engines.flags import REMOVED, shipped_flags
from corral.plan.hardware import inventory as hardware

GOLDEN = Path(__file__).parent / "golden" / "profiles"
HOME = "/srv/corral-home"


@dataclass(frozen=True)
class Option:
    """What a document shows, and what became of it: the words of today, or why there are none."""

    documented: str
    today: str = ""  # words of the command, or NAME=VALUE of the environment of every rank
    gone: str = ""


@dataclass(frozen=True)
class Case:
    example: str
    init: tuple[str, ...] = ()  # how a user makes it their own; nothing: used as it is shipped
    up: tuple[str, ...] = ()
    ranks: int = 1
    link: str = "single"
    hardware: str = ""  # of this machine, for the local target
    script: tuple[str, ...] = ()  # documented lines of a batch script, all of them still there
    options: tuple[Option, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.example


IMAGE = "vllm/vllm-openai:v0.32.0"
TERMINAL = Option("run_cluster.sh in an open terminal", gone="an agent on every node starts its container")
RAY = Option("ray start / ray status by hand", gone="not in vLLM's image any more: vLLM joins the nodes itself")
LOGIN = Option("huggingface-cli login", gone="`corral pull` asks for a token, and no engine is given one")
CLUSTER_SCRIPT = (  # what run_cluster.sh gives to `docker run` by itself
    Option("--network host", "--network=host"),
    Option("--shm-size 10.24g", gone="--ipc=host gives the host's own"),
    Option("--entrypoint /bin/bash", "--entrypoint vllm"),
    Option("--gpus all", "--gpus all"),
    Option("-v HF_HOME:/root/.cache/huggingface", gone="only the model's own folder is mounted"),
)
SINGLE_NODE = (  # Lambda's `docker run`, the same for every model
    Option("vllm/vllm-openai:latest", IMAGE),
    Option("--runtime nvidia", gone="--gpus all alone does it"),
    Option("--gpus all", "--gpus all"),
    Option("--ipc=host", "--ipc=host"),
    Option("-v ~/.cache/huggingface:/root/.cache/huggingface", gone="only the model's own folder is mounted"),
    Option("-p 8000:8000", "--port 8000"),
    Option("--model", "serve meta-llama/"),
    Option("--swap-space 16", gone="vLLM no longer swaps KV blocks"),
    Option("--disable-log-requests", gone="requests are not logged unless asked for"),
    LOGIN,
)
# Every option of every document, as it is written there; each must be a row of one of the document's cases.
DOCUMENTED = {
    "kempner": (
        "--account --output --error --partition --job-name --time --nodes --gpus-per-node --cpus-per-task --mem "
        "--exclusive --tensor-parallel-size --enforce-eager --head --temp-dir --block"
    ),
    "single-node-docker": (
        "--runtime --gpus -v -p --ipc --model --swap-space --disable-log-requests --tensor-parallel-size"
    ),
    "lambda-1cc": (
        "-i -F HEAD_IP SHARED_DIR HF_HOME MODEL_REPO HF_TOKEN --head --worker --privileged NCCL_IB_HCA "
        "--tensor-parallel-size --pipeline-parallel-size"
    ),
    "digitalocean-baremetal": (
        "HEAD_IP --head --worker NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME --privileged NCCL_IB_HCA /root/meta-llama "
        "--enforce-eager --tensor-parallel-size --pipeline-parallel-size --distributed-executor-backend --dtype "
        "--gpu-memory-utilization --max-model-len --max-num-batched-tokens --enable-chunked-prefill"
    ),
}
DOCUMENTED["digitalocean-droplet"] = DOCUMENTED["digitalocean-baremetal"]


def digitalocean(example: str, interface: str) -> Case:
    return Case(
        example,
        up=("--hosts", "10.0.0.1,10.0.0.2"),
        ranks=2,
        link="native",
        options=(
            TERMINAL,
            LOGIN,
            *CLUSTER_SCRIPT,
            Option("Ray", gone="not in vLLM's image any more"),
            Option("--head / --worker", "--nnodes 2 --node-rank 0"),
            Option("HEAD_IP", "--master-addr 10.0.0.1"),
            Option("vllm/vllm-openai", IMAGE),
            Option(
                f"-e NCCL_SOCKET_IFNAME={interface}", f"NCCL_SOCKET_IFNAME=={interface}"
            ),  # exactly that one, as in a start
            Option(f"-e GLOO_SOCKET_IFNAME={interface}", f"GLOO_SOCKET_IFNAME={interface}"),
            Option("--enforce-eager", "--enforce-eager"),
            Option("--tensor-parallel-size 8", "--tensor-parallel-size 8"),
            Option("--pipeline-parallel-size 2", "--pipeline-parallel-size 2"),
            Option("--distributed-executor-backend ray", gone="not in vLLM's image any more"),
            Option("--privileged", gone="only InfiniBand devices and locked memory are given"),
            Option("NCCL_IB_HCA=mlx5", gone="found on the nodes; it matched by prefix"),
            Option("/root/meta-llama", gone="only the model's own folder is mounted"),
            Option("--dtype float16", "--dtype float16"),
            Option("--gpu-memory-utilization 0.99", "--gpu-memory-utilization 0.99"),
            Option("--max-model-len 8192", "--max-model-len 8192"),
            Option("--max-num-batched-tokens 65536", "--max-num-batched-tokens 65536"),
            Option("--enable-chunked-prefill=False", "--no-enable-chunked-prefill"),
        ),
    )


def kempner(label: str, model: str, nodes: int, tensor: int, settings: tuple[str, ...], *options: Option) -> Case:
    return Case(
        "kempner",
        init=("--set", "slurm.partition=gpu_h100", "--set", "slurm.account=my_lab", *settings),
        ranks=nodes,
        link="native" if nodes > 1 else "single",
        label=label,
        script=tuple(
            f"#SBATCH --{word}"
            for word in (
                f"nodes={nodes}",
                "gpus-per-node=4",
                "cpus-per-task=96",
                "mem=0",
                "exclusive",
                "time=4:00:00",
                "partition=gpu_h100",
                "account=my_lab",
                f"job-name=corral-{model}",
                f"output={HOME}/pasted/{model}/job.log",
            )
        ),
        options=(
            Option("module load python/…", "python --"),
            Option("conda activate vllm-inference", "vllm-inference"),
            Option(f"--tensor-parallel-size {tensor}", f"--tensor-parallel-size {tensor}"),
            Option("sleep 5", gone="the head waits until every node has joined"),
            Option("--error", gone="what the job says goes into one log"),
            Option("ray start --head --temp-dir --block", gone="Ray is not in vLLM's wheel any more"),
            Option("pip install -r requirements.txt", gone="`corral engine install --into conda:NAME`"),
            Option("the model field is a path", "--served-model-name="),
            *options,
        ),
    )


CASES = (
    Case(
        "single-node-docker",
        up=("llama-3.1-70b-instruct", "--set", "tensor=8", "--set", "data=1"),
        hardware="8xH100",
        label="single-node-docker-70b",
        options=(*SINGLE_NODE, Option("--tensor-parallel-size 8", "--tensor-parallel-size 8")),
    ),
    Case(
        "single-node-docker",
        up=("llama-3.1-8b-instruct",),
        hardware="1xH100",
        label="single-node-docker-8b",
        options=SINGLE_NODE,
    ),
    Case(
        "single-node-docker",
        up=("llama-3.1-405b-instruct-fp8", "--set", "tensor=8"),
        hardware="8xH100",
        label="single-node-docker-405b-fp8",
        options=(*SINGLE_NODE, Option("--tensor-parallel-size 8", "--tensor-parallel-size 8")),
    ),
    Case(
        "lambda-1cc",
        init=("--hosts", "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4", "--set", "storage.home=/home/ubuntu/fs/corral"),
        ranks=4,
        link="native",
        options=(
            TERMINAL,
            RAY,
            Option("vllm/vllm-openai", IMAGE),
            Option("--tensor-parallel-size 8", "--tensor-parallel-size 8"),
            Option("--pipeline-parallel-size 4", "--pipeline-parallel-size 4"),
            Option("--privileged", gone="only InfiniBand devices and locked memory are given"),
            Option("NCCL_IB_HCA=mlx5", gone="found on the nodes"),
            LOGIN,
            *CLUSTER_SCRIPT,
            Option("HEAD_IP", "--master-addr 10.0.0.1"),
            Option("--head / --worker", "--nnodes 4 --node-rank 0"),
            Option("SHARED_DIR", "/home/ubuntu/fs/corral/"),
            Option("HF_HOME on the shared file system", "/home/ubuntu/fs/corral/cache"),
            Option("MODEL_REPO", "meta-llama/Llama-3.1-405B-Instruct"),
            Option("HF_TOKEN", gone="only `corral pull` needs it, and no engine is given one"),
            Option("ssh -i KEY -F CONFIG", gone="keys of the profile, no option of the engine"),
        ),
    ),
    digitalocean("digitalocean-baremetal", "bond0"),
    digitalocean("digitalocean-droplet", "eth2"),
    kempner("kempner-405b", "llama-3.1-405b-instruct", 4, 16, (), RAY, Option("--enforce-eager", "--enforce-eager")),
    kempner(
        "kempner-70b",
        "llama-3.1-70b-instruct",
        1,
        4,
        (
            "--set",
            "slurm.nodes=1",
            "--set",
            "defaults.set={tensor = 4}",
            "--set",
            "defaults.model=llama-3.1-70b-instruct",
        ),
    ),
)
BY_NAME = [pytest.param(case, id=case.name) for case in CASES]


Command = Callable[..., str]


def nobody_answers(_: object) -> list[str]:
    raise UnreachableError("node00 cannot be reached.")


@pytest.fixture
def corral(clean_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`corral` in this process, on a machine whose name, home and free ports are always the same."""
    for name in [*environment(), "CORRAL_PROFILE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CORRAL_HOME", HOME)  # paths are part of the text; nothing is written there
    monkeypatch.chdir(clean_home)
    monkeypatch.setattr("socket.gethostname", lambda: "this-machine")
    monkeypatch.setattr(local.LocalTarget, "choose_ports", lambda *_: ChosenPorts(Ports(8000)))
    monkeypatch.setattr("sys.executable", "python3")
    monkeypatch.setattr(base, "OWN_COMMAND", ("python3", *OWN_COMMAND[1:]))
    monkeypatch.setattr(ssh.SshTarget, "prepare", nobody_answers)

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        said = capsys.readouterr()
        assert caught.value.code in (0, None), said.err
        return said.out

    return run


@pytest.fixture
def led(corral: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case, bool], str]:
    """What an example leads to: the text to paste, or the LaunchSpec."""

    def run(case: Case, shell: bool) -> str:
        if case.hardware:
            monkeypatch.setattr(hardware, "probe", lambda: hardware.parse_gpus(case.hardware))
        name = case.example
        if case.init:
            name = "mine"
            corral("profile", "init", name, "--from", case.example, "--force", *case.init)
        return corral("up", *case.up, "--on", name, "--dry-run", "--shell" if shell else "--json")

    return run


Led = Callable[[Case, bool], str]


@pytest.mark.parametrize("case", BY_NAME)
def test_every_documented_option_is_there_or_gone_for_a_reason(case: Case, led: Led) -> None:
    spec: dict[str, Any] = json.loads(led(case, False))
    assert len(spec["ranks"]) == case.ranks
    assert spec["link"] == case.link
    head = f" {shlex.join(spec['ranks'][0]['argv'])} "
    for option in case.options:
        assert bool(option.today) != bool(option.gone), option
        if re.fullmatch(r"[A-Z_]+=.*", option.today):
            name, _, value = option.today.partition("=")
            assert all(rank["env"][name] == value for rank in spec["ranks"]), option
        elif option.today:
            assert option.today in head, option
        else:
            assert f" {option.documented} " not in head, option
            name, _, value = option.documented.partition("=")
            assert not any(rank["env"].get(name, "@") == value for rank in spec["ranks"])


@pytest.mark.parametrize("case", BY_NAME)
def test_todays_vllm_has_every_flag(case: Case, led: Led) -> None:
    flags = shipped_flags()
    assert flags is not None
    for rank in json.loads(led(case, False))["ranks"]:
        words = rank["argv"]
        assert not set(words) & set(REMOVED)
        if "serve" in words:
            after = words[words.index("serve") + 1 :]
            used = {word.partition("=")[0] for word in after if word.startswith("--")}
            assert used <= set(flags.takes_value)


OVER_SSH = [case for case in CASES if case.ranks > 1 and load_profile(case.example, {}).target == "ssh"]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OVER_SSH])
def test_every_rank_of_several_says_its_own_address(case: Case, led: Led) -> None:
    spec = json.loads(led(case, False))
    addresses = [rank["env"]["VLLM_HOST_IP"] for rank in spec["ranks"]]
    assert addresses == [f"10.0.0.{number + 1}" for number in range(case.ranks)]


@pytest.mark.parametrize("case", BY_NAME)
def test_the_whole_text(case: Case, led: Led) -> None:
    text = led(case, True)
    file = GOLDEN / f"{case.name}.sh"
    if os.environ.get("CORRAL_GOLDEN") == "write":
        GOLDEN.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert set(case.script) <= set(text.splitlines())
    assert file.is_file(), f"read and keep it: CORRAL_GOLDEN=write pytest {__file__}"
    assert text == file.read_text()


@pytest.mark.parametrize("case", BY_NAME)
def test_every_module_that_a_launch_runs_is_placed_by_what_is_pasted(case: Case, led: Led) -> None:
    text = led(case, True)
    for module in set(re.findall(r" -m (corral_\w+)", text)):
        assert f"/{module}.py" in text


GONE = [(case.example, option.documented) for case in CASES for option in case.options if option.gone]


@pytest.mark.parametrize(("example", "documented"), GONE)
def test_what_is_gone_is_explained_in_the_example_itself(example: str, documented: str) -> None:
    comment = "".join(line for line in folders.example(example).read_text().splitlines() if line.startswith("#"))
    assert documented.split()[0] in comment


@pytest.mark.parametrize("example", DOCUMENTED)
def test_no_option_of_a_document_is_forgotten(example: str) -> None:
    rows = [word for case in CASES if case.example == example for word in case.script]
    rows += [option.documented for case in CASES if case.example == example for option in case.options]
    assert [word for word in DOCUMENTED[example].split() if not any(word in row for row in rows)] == []


@pytest.mark.parametrize("example", ["digitalocean-baremetal", "digitalocean-droplet", "lambda-1cc"])
def test_what_is_left_out_of_a_container_can_be_brought_back(example: str, corral: Command) -> None:
    """`privileged` and `hca`, as the comments of the examples say, on every node."""
    count = load_profile(example, {}).settings.hardware.nodes or 0
    hosts = [f"10.0.0.{number + 1}" for number in range(count)]
    back = ("--set", "runtime.privileged=true", "--set", "network.hca=mlx5", "--set", "storage.home=/srv/corral")
    corral("profile", "init", "mine", "--from", example, "--hosts", ",".join(hosts), *back)
    for rank in json.loads(corral("up", "--on", "mine", "--dry-run", "--json"))["ranks"]:
        assert "--privileged" in rank["argv"]
        assert rank["env"]["NCCL_IB_HCA"] == "mlx5"
        assert "NCCL_IB_HCA" in rank["argv"]


def test_every_example_has_a_case() -> None:
    shipped = {path.stem for path in folders.example("kempner").parent.glob("*.toml")}
    assert {case.example for case in CASES} == shipped


def test_no_golden_text_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.sh")} <= {case.name for case in CASES}


# the others plan on the machine they run on
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if not case.hardware])
def test_plan_on_an_example(case: Case, corral: Command) -> None:
    """The named hardware of an example is enough to plan on; this needs neither its target nor its runtime."""
    plan = json.loads(corral("plan", "--on", case.example, "--offline", "--json"))
    assert plan["fits"]
    sizes = load_profile(case.example, {}).settings.defaults.set
    assert plan["parallel"]["tensor"] == sizes["tensor"]
    assert plan["parallel"]["pipeline"] == sizes.get("pipeline", 1)
    assert plan["inventory"]["source"] == "named"

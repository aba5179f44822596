"""A machine on which every command of the pages can be typed within seconds, and the reader who types them.

The engine is the fake server, in the place of vLLM; hosts are folders, reached by a stand-in for ssh, and every
machine has a stand-in for `nvidia-smi` that tells of eight H100; the hub is on loopback and has a tiny model under
the real names; SLURM's and conda's commands are stand-ins. Starts are dry; deployments that a page takes for granted
run for real, on the CPU. What serves until it is stopped runs until the end of the page, and must then stop in order.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corral.base.files import write_atomic
from corral.base.record import dump_json
from corral.cli import main
from corral.deploy.profile.folders import user_folder
from corral.deploy.targets import ssh, ssh_nodes
from corral.engines import environments as engines
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.plan.hardware.survey import NodeFacts, survey
from tests.conftest import ROOT
from tests.docs.pages import Command
from tests.docs.shape import difference
from tests.fake_conda import make_conda
from tests.fake_hub import FakeHub
from tests.fake_slurm import NODES, PARTITIONS, print_text
from tests.fake_ssh import make_fake_ssh
from tests.until import free_port

__all__ = ["Done", "Reader", "make_stage"]

ENGINE = ROOT / "tests" / "fake_engine.py"
HOSTS = [*(f"node0{n}" for n in range(4)), *(f"node{n}" for n in range(1, 5)), *(f"n{n}" for n in range(1, 5))]
REPOSITORIES = [f"meta-llama/Llama-3.1-{size}{kind}" for size in ("8B", "70B", "405B") for kind in ("", "-Instruct")]
TOKEN = "tok-en-that-is-good"
ROOTS = re.compile(r"(?<![\w.~/])/(models|shared|data|scratch|lustre|raid|opt)(?=/)")
PORTS = re.compile(r"\b(?:8000|18123)\b")
# verbs about a deployment, which is there when they are typed
ABOUT_ONE = ("status", "wait", "logs", "events", "env", "down", "chat", "top", "tunnel", "proxy")
# what serves, or shows, until it is stopped
LASTING = re.compile(r"corral (fake-server|proxy|tunnel|console|batch serve|logs \S+ -f|top$)")
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
SMI = """case "$*" in
    *query-gpu=name*) for n in 0 1 2 3 4 5 6 7; do echo 'NVIDIA H100 80GB HBM3, 81559, 580.1'; done ;;
    *query-gpu*) for n in 0 1 2 3 4 5 6 7; do echo "$n, NVIDIA H100 80GB HBM3, GPU-$n, 81559, 4, 580.1"; done ;;
    *query-compute*) ;;
    *) echo '| NVIDIA-SMI 580.1   Driver Version: 580.1   CUDA Version: 13.0 |' ;;
esac"""
PROFILES = {
    "my-cluster": "--from lambda-1cc --hosts node00,node01,node02,node03 --set storage.home=/home/ubuntu/corral",
    "my-kempner": "--from kempner --set slurm.partition=gpu_h100 --set slurm.account=my_lab --set slurm.nodes=1"
    " --set 'defaults.set={tensor = 4}'",
}
# a machine without a Docker that answers, and one too busy for a measurement: told by codes of their own
# (and a tuning run of one trial, which decides nothing)
TOLERATED = {"doctor": (0, 8), "bench": (0, 1), "tune": (0, 1)}
# the same in less time: a later option wins
QUICK = {
    "bench": ["--output-len", "8", "--warmup", "0"],
    "bench run": ["--num-prompts", "16", "--warmup", "0"],
    "bench sweep": ["--num-prompts", "8", "--warmup", "0"],
    "bench search": ["--probe-seconds", "1", "--max-probes", "2", "--saturate", "8", "--output-len", "8"],
    "bench compare": [],
    "bench report": [],
    "bench list": [],
    "doctor": ["--quick"],
    "simulate": ["--num-prompts", "60"],
    "simulate validate": [],
    "tune": ["--budget", "1s", "--measure", "1"],
    "tune report": [],
    "tune last": [],
}


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass
class Reader:
    """Somebody who types a page from top to bottom."""

    folder: Path
    server: FakeServer
    hub: FakeHub
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    running: set[str] = field(default_factory=set)
    ports: dict[str, int] = field(default_factory=dict)
    serving: list[subprocess.Popen[str]] = field(default_factory=list)

    def types(self, command: Command) -> None:
        """Type it; it succeeds, says something, and prints what the page shows."""
        done = self._carried_out(self._moved(command.text), len(command.shown))
        said = f"{done.out[-2000:]}{done.err[-2000:]}"
        verb = command.text.split()[1] if command.text.startswith("corral ") else ""
        assert done.code in TOLERATED.get(verb, (0,)), f"{command}\nended with {done.code}:\n{said}"
        assert said or not verb, f"{command}\nsays nothing"
        assert not (wrong := difference(command.shown, done.out + done.err)), f"{command}\n{wrong}"

    def _moved(self, text: str) -> str:
        """With paths below this folder, and with ports that are free on this machine."""
        for port in PORTS.findall(text):
            text = text.replace(port, str(self.ports.setdefault(port, free_port())))
        return ROOTS.sub(rf"{self.folder}/\1", text)

    def leaves(self) -> None:
        """Stop what serves; it stops in order."""
        for process in self.serving:
            process.terminate()
        for process in self.serving:
            process.communicate(timeout=120)
            assert process.returncode in (0, 130), f"{process.args!r} ended with {process.returncode}"

    def _carried_out(self, text: str, lines: int) -> Done:
        words = shlex.split(text)
        if words[0] not in ("corral", "./corral") or re.search(r" [|;] |&&|\$\(", text):
            return self._in_a_shell(text)
        self._have_profiles(words)
        self._have_deployments(words[1:])
        if LASTING.match(text):
            return self._begun(words[1:], lines or 1)
        kind = " ".join(words[1:3])
        return self._done(_with_options(words[1:], QUICK.get(kind, QUICK.get(kind.partition(" ")[0], []))))

    def _have_profiles(self, words: list[str]) -> None:
        for name in (words[at + 1] for at, word in enumerate(words[:-1]) if word == "--on"):
            if name in PROFILES and not (user_folder() / f"{name}.toml").exists():
                done = self._here(["profile", "init", name, *shlex.split(PROFILES[name])])
                assert done.code == 0, done.err

    def _have_deployments(self, words: list[str]) -> None:
        """Those that the command is about: started now unless they run."""
        named = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("--deployment", "-d", "--attach")]
        if words[0] in ABOUT_ONE and len(words) > 1 and not words[1].startswith("-"):
            named.append(words[1])
        model = str(self.folder / "my-model")
        for name in set(named) - self.running:
            done = self._here(["up", model, "--name", name], ON_CPU)
            assert done.code == 0, done.err
        if words[:2] == ["slurm", "script"]:
            done = self._here(["up", model, "--name", words[2], "--partition", "gpu", "--no-wait"])
            assert done.code == 0, done.err
        self.running |= set(named)
        if words[0] == "down":
            self.running -= set(named)

    def _done(self, words: list[str]) -> Done:
        if words == ["up"]:
            self._here(["down", "--all"])  # a page may begin twice
            return self._here(words, ON_CPU)
        if words[0] == "up" and not {"--dry-run", "--attach"} & set(words):
            words = _with_options(words, ["--dry-run"])
        if words[0] == "tune":
            return self._apart(words, ON_CPU)
        if words[0] == "pull" or (words[0] == "batch" and "--start" in words):
            return self._apart(words)  # the hub's library reads its environment once
        return self._here(words)

    def _here(self, words: list[str], env: Mapping[str, str] = MappingProxyType({})) -> Done:
        self.capsys.readouterr()
        with self.patch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is the capital of France?\n")))
            for module in (ssh, ssh_nodes):
                patch.setattr(module, "survey", _own_addresses)
            for name, value in env.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main(words)
        said = self.capsys.readouterr()
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, said.out, said.err)

    def _apart(self, words: list[str], env: Mapping[str, str] = MappingProxyType({})) -> Done:
        online = {**env, "HF_ENDPOINT": self.hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
        return self._run([sys.executable, "-m", "corral", *words], {**os.environ, **online})

    def _in_a_shell(self, text: str) -> Done:
        return self._run(["bash", "-c", text], dict(os.environ))

    def _run(self, argv: list[str], env: dict[str, str]) -> Done:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL, cwd=self.folder, env=env
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def _begun(self, words: list[str], lines: int) -> Done:
        """In a terminal of its own, until the page ends; what it says at first."""
        process = subprocess.Popen(
            [sys.executable, "-m", "corral", *words], text=True, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.serving.append(process)
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(lines))
        return Done(process.poll() or 0, said, "")


def _with_options(words: list[str], options: list[str]) -> list[str]:
    """With further options, before what goes to vLLM."""
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], *options, *words[at:]]


def make_stage(
    folder: Path, home: Path, model: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Reader]:
    """The machine, for one page."""
    for flavour in ("cpu", "cuda"):
        _engine(flavour)
    make_conda(folder, patch)
    make_fake_ssh(folder / "hosts", HOSTS)
    _commands(folder / "bin", patch)
    _files(folder, model)
    shutil.copytree(model, home / "corral" / "models" / "smollm2")
    patch.chdir(folder)
    patch.setenv("CORRAL_SSH", str(folder / "hosts" / "ssh"))
    controlled = FakeServer(FakeOptions(control=True))
    with FakeServer(FakeOptions()) as server, controlled, FakeHub(dict.fromkeys(REPOSITORIES, model)) as hub:
        patch.setenv("OPENAI_BASE_URL", server.url)
        patch.setenv("URL", controlled.url)
        patch.setenv("USER", "reader")
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        reader = Reader(folder, server, hub, patch, capsys)
        yield reader
        reader.leaves()
    subprocess.run([sys.executable, "-m", "corral", "down", "--all"], capture_output=True, timeout=60)


def _own_addresses(*asked: Any, **more: Any) -> dict[str, Any]:
    """The nodes' facts; each has addresses of its own, which the folders that stand for them have not."""
    found = survey(*asked, **more)
    for number, (host, facts) in enumerate(found.items(), 1):
        if isinstance(facts, NodeFacts):
            names = enumerate(("bond0", "eth2"))
            own = tuple(
                replace(facts.interfaces[0], name=name, ipv4=(f"10.0.{net}.{number}/24",)) for net, name in names
            )
            found[host] = replace(facts, boot_id=host, hostname=host, interfaces=own, rdma=())
    return found


def _engine(flavour: str) -> None:
    engine = engines.expected(flavour)
    program = Path(engine.path) / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ENGINE}" "$@"\n')
    program.chmod(0o755)
    write_atomic(Path(engine.path) / "engine.json", dump_json(engine))


def _commands(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """`corral`, and SLURM's commands, on PATH."""
    folder.mkdir()
    partitions = PARTITIONS + "".join(
        PARTITIONS.splitlines()[0].replace("gpu_h100", name) + "\n" for name in ("gpu", "h100")
    )
    nodes = NODES + NODES.splitlines()[0].replace("h1 ", "h4 ")
    nodes = nodes.replace("Partitions=gpu_h100", "Partitions=gpu_h100,gpu,h100")
    answers = {
        "corral": f'exec {shlex.quote(sys.executable)} -m corral "$@"',
        "scontrol": f'case "$*" in *partition*) {print_text(partitions)}\n;; *) {print_text(nodes)}\n;; esac',
        "sbatch": 'case "$*" in *--test-only*) ;; *) echo 4711 ;; esac',
        "nvidia-smi": SMI,
        "curl": f'exec {shutil.which("curl")} --fail --silent --show-error "$@"',
        "squeue": "exit 0",
        "sinfo": "exit 0",
    }
    for name, body in answers.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def _files(folder: Path, model: Path) -> None:
    """What the pages take for granted: inputs, and models in folders."""
    rows = [{"id": n, "prompt": f"San Francisco is a {n}"} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trace.jsonl").write_text("".join(f'{{"time_s": {n}, "tokens": 900}}\n' for n in range(60)))
    (folder / "items.jsonl").write_text('{"id": "1", "text": "some words to score"}\n')
    (folder / "prompts.txt").write_text("one\ntwo\n")
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    for place in ("my-model", "models/llama-3.1-8b", "data/my-model", "shared/models/Llama-3.1-405B", "raid/405b"):
        shutil.copytree(model, folder / place)
    (folder / "opt" / "vllm" / "bin").mkdir(parents=True)

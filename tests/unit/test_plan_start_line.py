"""The line at the end of a plan, pasted: it starts that very plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.base.errors import UsageError
from corral.cli import main
from corral.deploy.launch.links import Ports
from corral.deploy.launch.render import refuse_reserved
from corral.deploy.profile.profile import environment
from corral.deploy.targets import local
from corral.deploy.targets.base import ChosenPorts
from corral.plan.models import catalogue
from corral.plan.models.store import locate

Run = Callable[..., str]
FILLED = {"PARTITION": "gpu", "ACCOUNT": "lab"}


@pytest.fixture
def corral(clean_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    for name in [*environment(), "CORRAL_PROFILE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(clean_home)
    monkeypatch.setattr(local.LocalTarget, "choose_ports", lambda *_: ChosenPorts(Ports(8000)))

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        said = capsys.readouterr()
        assert caught.value.code in (0, None), said.err
        return said.out

    return run


def engine_flags(argv: list[str]) -> list[str]:
    """From the first flag that a plan decides to the last."""
    wanted = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--max-model-len",
              "--dtype", "--gpu-memory-utilization", "--max-num-batched-tokens", "--max-num-seqs",
              "--quantization")  # fmt: skip
    found = [f"{word} {argv[number + 1]}" for number, word in enumerate(argv) if word in wanted]
    return found + [word for word in argv if word == "--enforce-eager"]


@pytest.mark.parametrize(
    ("profile", "more"),
    [
        ("lambda-1cc", ()),
        ("digitalocean-baremetal", ()),
        ("digitalocean-droplet", ("--context", "16384")),
        ("kempner", ()),
        ("kempner", ("llama-3.1-70b-instruct", "--nodes", "1", "--set", "tensor=4", "--set", "eager=false")),
        ("kempner", ("--goal", "latency", "--concurrency", "8", "--", "--seed", "7")),
    ],
)
def test_what_is_pasted_is_what_was_planned(corral: Run, profile: str, more: tuple[str, ...]) -> None:
    if profile == "lambda-1cc":
        corral(
            "profile", "init", "mine", "--from", profile, "--set", "storage.home=/srv/corral", "--hosts", "a,b,c,d"
        )
        profile = "mine"
    cut = more.index("--") if "--" in more else len(more)
    before, after = more[:cut], more[cut:]
    plan = json.loads(corral("plan", "--on", profile, "--offline", "--json", *before, *after))
    text = corral("plan", "--on", profile, "--offline", *before, *after)
    (line,) = [line for line in text.splitlines() if "corral up" in line]
    words = shlex.split(line.partition("corral up")[2])
    assert words[words.index("--on") + 1] == profile
    filled = [FILLED.get(word, word).replace("HOST", "10.0.0.") for word in words]
    engine = filled[filled.index("--") :] if "--" in filled else []
    spec = json.loads(corral("up", *filled[: len(filled) - len(engine)], "--dry-run", "--json", *engine))
    assert len(spec["ranks"]) == plan["inventory"]["nodes"]
    argv = spec["ranks"][0]["argv"]
    assert engine_flags(argv) == engine_flags(plan["engine_args"])
    assert argv.count("--seed") == ("--seed" in more)


def test_without_a_profile_the_layout_is_pinned(corral: Run) -> None:
    out = corral("plan", "llama-3.1-70b", "--gpus", "8xH100", "--offline")
    assert "corral up llama-3.1-70b --context 131072 --set tensor=4 --set pipeline=1 --set data=2" in out


# --- ids and variables as documents write them


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b-instruct"),
        ("meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b-instruct-fp8"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b-instruct-fp8"),
    ],
)
def test_ids_of_2024_are_known(old: str, name: str) -> None:
    entry = catalogue.find(old)
    assert entry is not None
    assert entry.name == name
    assert old in entry.aliases
    assert locate(old).repo == entry.repo


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("HF_TOKEN", "it is a secret, and the model is on disk"),
        ("VLLM_API_KEY", "it is a secret"),
        ("PYTHONPATH", "is set by Corral itself"),
        ("CUSTOM_FASTAPI_PING_HANDLER", "is not passed to an engine"),
    ],
)
def test_a_refused_variable_is_refused_for_its_own_reason(name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_reserved([name])
    assert words in caught.value.message
    assert ("lock" in caught.value.remedy) == (name == "CUSTOM_FASTAPI_PING_HANDLER")

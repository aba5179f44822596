"""`corral profile`, and `--on` of `corral up` and `corral plan`, as people use them; their page is true."""

from __future__ import annotations

import json
import re
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.base.record import to_json
from corral.deploy.deployment.state import Patience
from corral.deploy.doctor.examination import Question
from corral.deploy.doctor.finding import Report
from corral.deploy.launch.links import Ports
from corral.deploy.profile import folders
from corral.deploy.profile.contract import all_keys
from corral.deploy.profile.profile import environment
from corral.deploy.targets.base import ChosenPorts
from corral.deploy.targets.local import LocalTarget
from tests.conftest import ROOT
from tests.unit.conftest import in_process

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def corral(clean_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    for name in [*environment(), "CORRAL_PROFILE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        LocalTarget, "choose_ports", lambda self, bind, wanted, avoid: ChosenPorts(Ports(wanted or 8000))
    )
    work = clean_home / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return in_process(capsys)


def own(name: str, text: str) -> Path:
    path = folders.user_folder() / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --------------------------------------------------------------------------------------------------------------- init
def test_init_writes_a_commented_draft_that_checks(corral: Command) -> None:
    code, out, _ = corral("profile", "init", "box")
    path = folders.user_folder() / "box.toml"
    assert code == 0
    assert str(path) in out
    text = path.read_text()
    assert all(f"{key.name} = " in text or key.name == "options" for key in all_keys())
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert corral("profile", "check", "box")[:2] == (0, "box: ok\n")


def test_init_never_overwrites_unless_forced(corral: Command) -> None:
    path = own("box", 'description = "precious"\n')
    code, _, err = corral("profile", "init", "box")
    assert code == 4
    assert "--force" in err
    assert "precious" in path.read_text()
    assert corral("profile", "init", "box", "--force")[0] == 0
    assert "precious" not in path.read_text()
    path.unlink()
    path.symlink_to(path.parent / "nowhere")
    assert corral("profile", "init", "box")[0] == 4


def test_init_from_an_example_keeps_its_comments_and_sets_values(corral: Command) -> None:
    code, out, _ = corral("profile", "init", "k", "--from", "kempner", "--set", "slurm.account=lab", "--json")
    assert code == 0
    assert json.loads(out)["to_fill_in"] == ["slurm.partition"]
    text = (folders.user_folder() / "k.toml").read_text()
    assert 'account = "lab"' in text
    assert "What the document did" in text


def test_init_with_hosts(corral: Command) -> None:
    assert corral("profile", "init", "two", "--hosts", "a, b", "--set", "hardware.gpus=8xH100")[0] == 0
    code, out, _ = corral("profile", "show", "two", "--json")
    values = {row["key"]: row["value"] for row in json.loads(out)["values"]}
    assert code == 0
    assert values["target"] == "ssh"
    assert values["ssh.hosts"] == ["a", "b"]
    assert values["hardware.gpus"] == "8xH100"


def test_init_in_a_project(corral: Command) -> None:
    assert corral("profile", "init", "here", "--project")[0] == 0
    assert Path(".corral/profiles/here.toml").is_file()
    assert "project" in corral("profile", "list")[1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("../x",), 2, "cannot be the name"),
        (("x", "--from", "kempnr"), 3, "there is no example"),
        (("x", "--from", "../kempner"), 2, "cannot be the name"),
        (("x", "--set", "slurm"), 2, "not TABLE.KEY=VALUE"),
        (("x", "--set", "slurm.acount=a"), 2, "Did you mean slurm.account?"),
        (("x", "--set", "endpoint.port=high"), 10, "endpoint.port must be a whole number"),
        (("x", "--hosts", "-oProxyCommand=boom"), 2, "is not the name of a host"),
    ],
)
def test_init_refuses_and_writes_nothing(corral: Command, words: tuple[str, ...], code: int, said: str) -> None:
    found, _, err = corral("profile", "init", *words)
    assert found == code
    assert said in err
    assert not folders.user_folder().exists()


# ------------------------------------------------------------------------------------------------------ list and show
def test_list(corral: Command) -> None:
    own("mine", 'target = "ssh"\ndescription = "two boxes"\n[ssh]\nhosts = ["a", "b"]\n')
    own("broken", "target = \n")
    code, out, _ = corral("profile", "list")
    assert code == 0
    assert re.search(r"mine +user +ssh +two boxes", out)
    assert re.search(r"broken +user +broken +.*broken.toml is not TOML", out)
    assert re.search(r"kempner +example +slurm", out)
    rows = {row["name"]: row for row in json.loads(corral("profile", "list", "--json")[1])}
    assert rows["mine"]["where"] == ["user"]
    assert rows["broken"]["error"]
    assert rows["broken"]["target"] is None


def test_show_says_where_each_value_comes_from(corral: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own("mine", 'target = "ssh"\n[ssh]\nhosts = ["a"]\n[runtime]\nname = "docker"\nimage = "x"\n')
    monkeypatch.setenv("CORRAL_CONTEXT", "4096")
    code, out, _ = corral("profile", "show", "mine")
    assert code == 0
    assert re.search(rf'ssh\.hosts +\["a"\] +{path}:3', out)
    assert re.search(rf'runtime\.image +"x" +{path}:6', out)
    assert re.search(r"defaults\.context +4096 +CORRAL_CONTEXT", out)
    assert re.search(r'link\.name +"auto" +default', out)
    assert "defaults.stall" not in out
    assert "defaults.stall" in corral("profile", "show", "mine", "--all")[1]
    assert corral("profile", "show", "nobody")[0] == 3


# -------------------------------------------------------------------------------------------------------------- check
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[engine]\nargs = ["--swap-space", "16"]\n', "has no --swap-space any more"),
        ('[engine]\nargs = ["--port", "1"]\n', "--port is set by Corral"),
        ('[engine]\nenv = { HF_TOKEN = "x" }\n', "HF_TOKEN is not passed to an engine"),
        ("[defaults]\nset = { tenser = 8 }\n", "Did you mean tensor?"),
        ('[runtime]\nname = "dokcer"\n', "there is no runtime 'dokcer'"),
        ('[runtime]\nname = "managed"\nimage = "x"\n', "the managed runtime takes no options, and was given 'image'"),
        ('[defaults]\nmodel = "<your model>"\n', "defaults.model needs a value"),
        ('target = "local"\n[limits]\nmax_nodes = 0\n', "1 or more"),
        ("[nonsense]\n", "no key 'nonsense'"),
    ],
)
def test_check_finds_what_would_fail_later(corral: Command, text: str, said: str) -> None:
    own("mine", text)
    code, out, _ = corral("profile", "check", "mine")
    assert code == 10
    assert said in out
    document = json.loads(corral("profile", "check", "mine", "--json")[1])
    assert document["mine"][0]["kind"].endswith("Error")


def test_check_names_every_problem_at_once(corral: Command) -> None:
    own("mine", '[engine]\nargs = ["--nope"]\nenv = { HF_TOKEN = "x" }\n[defaults]\nset = { tenser = 8 }\n')
    assert len(json.loads(corral("profile", "check", "mine", "--json")[1])["mine"]) == 3


def test_check_names_every_wrong_key_at_once(corral: Command) -> None:
    text = 'target = "slurm"\n[slurm]\npartiton = "gpu"\nnodes = 5000\n[limits]\nmax_nodes = 0\n[nonsense]\nx = 1\n'
    own("mine", text)
    found = json.loads(corral("profile", "check", "mine", "--json")[1])["mine"]
    said = " ".join(one["message"] for one in found)
    for words in ("no key 'partiton'", "from 1 to 4096", "limits.max_nodes must be", "no key 'nonsense'"):
        assert words in said
    assert len(found) == 4


def test_check_names_every_contradiction_at_once(corral: Command) -> None:
    own("mine", '[slurm]\ntime = "1:00:00"\n[ssh]\nhosts = ["a"]\n[endpoint]\nbind = "127.0.0.1"\nexpose = true\n')
    found = json.loads(corral("profile", "check", "mine", "--json")[1])["mine"]
    assert len(found) == 3


def test_check_of_all_leaves_the_examples_aside(corral: Command) -> None:
    assert corral("profile", "check")[0] == 0
    own("good", "")
    own("bad", "x = 1\n")
    code, out, _ = corral("profile", "check")
    assert code == 10
    assert "good: ok" in out
    assert "kempner" not in out
    assert corral("profile", "check", "nobody")[0] == 3


def test_the_examples_that_need_nothing_filled_in_check(corral: Command) -> None:
    assert corral("profile", "check", "single-node-docker")[0] == 0


@pytest.mark.parametrize("example", ["lambda-1cc", "digitalocean-baremetal", "digitalocean-droplet"])
def test_a_profile_without_hosts_is_not_ok_anywhere(
    corral: Command, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    """Not for `init`, `check` and `up`, and `doctor` does not look at this machine instead."""
    monkeypatch.setattr("corral.cli.doctor.examine", lambda *_: pytest.fail("a machine was looked at"))
    home = ("--set", "storage.home=/shared/corral")
    assert "Fill in: ssh.hosts\n" in corral("profile", "init", "mine", "--from", example, *home)[1]
    code, out, _ = corral("profile", "check", "mine")
    assert code == 10
    assert "ssh.hosts needs a value in the profile 'mine'." in out
    for verb in (("up", "llama-3.1-405b-instruct", "--dry-run", "--json"), ("doctor",)):
        code, _, err = corral(*verb, "--on", "mine")
        assert code == 2
        assert "ssh.hosts needs a value in the profile 'mine'." in err


def test_doctor_refuses_a_profile_with_open_places_and_takes_hosts_for_it(
    corral: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question] = []

    def examined(question: Question, _: object) -> Report:
        asked.append(question)
        return Report(question.hosts, (), (), None)

    monkeypatch.setattr("corral.cli.doctor.examine", examined)
    assert corral("profile", "init", "mine", "--from", "lambda-1cc")[0] == 0
    assert corral("doctor", "--on", "mine", "--hosts", "a,b")[0] == 2  # storage.home
    assert corral("profile", "init", "mine", "--from", "lambda-1cc", "--set", "storage.home=/s", "--force")[0] == 0
    assert corral("doctor", "--on", "mine", "--hosts", "a,b")[0] == 0
    assert [one.hosts for one in asked] == [("a", "b")]


def test_the_opening_of_the_page_runs_as_it_stands(corral: Command) -> None:
    """Every command of the first block of docs/profiles.md but the last, which needs the nodes."""
    page = (ROOT / "docs" / "profiles.md").read_text()
    block = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    assert block is not None
    commands = [shlex.split(line) for line in block[1].replace(" \\\n", " ").splitlines()]
    assert [words[1] for words in commands] == ["profile", "profile", "plan", "up", "up"]
    for words in commands[:-1]:
        code, out, err = corral(*words[1:])
        assert code == 0, err
        assert out
    assert "rank 3, on node03" in out


# --------------------------------------------------------------------------------------------------------------- --on
def test_up_on_a_profile_renders_what_it_says(corral: Command, tiny_model: Path) -> None:
    own(
        "mine",
        f'[defaults]\nmodel = "{tiny_model}"\ncontext = 128\nrestart = 2\nstall = 77\n'
        '[engine]\nargs = ["--enforce-eager"]\nenv = { A_B = "c" }\n[endpoint]\nport = 8123\n',
    )
    code, out, err = corral("up", "--on", "mine", "--dry-run", "--json")
    assert code == 0, err
    spec = json.loads(out)
    argv = spec["ranks"][0]["argv"]
    assert argv[argv.index("--max-model-len") + 1] == "128"
    assert argv[argv.index("--port") + 1] == "8123"
    assert argv.count("--enforce-eager") >= 1
    assert spec["ranks"][0]["env"]["A_B"] == "c"
    assert (spec["patience"]["restarts"], spec["patience"]["stall_s"]) == (2, 77)
    flags = ("--context", "64", "--restart", "0", "--stall", "99", "--env", "A_B=d", "--port", "8124")
    spec = json.loads(corral("up", "--on", "mine", *flags, "--dry-run", "--json")[1])
    argv = spec["ranks"][0]["argv"]
    assert argv[argv.index("--max-model-len") + 1] == "64"
    assert argv[argv.index("--port") + 1] == "8124"
    assert spec["ranks"][0]["env"]["A_B"] == "d"
    assert (spec["patience"]["restarts"], spec["patience"]["stall_s"]) == (0, 99)


def test_up_without_a_profile_is_as_it_was(corral: Command, tiny_model: Path) -> None:
    spec = json.loads(corral("up", str(tiny_model), "--dry-run", "--json", "--port", "8125")[1])
    assert (spec["patience"], spec["target"]) == (to_json(Patience()), "local")


def test_the_environment_names_the_profile_and_single_values(
    corral: Command, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own("mine", f'[defaults]\nmodel = "{tiny_model}"\ncontext = 128\n[endpoint]\nport = 8126\n')
    monkeypatch.setenv("CORRAL_PROFILE", "mine")
    monkeypatch.setenv("CORRAL_CONTEXT", "96")
    argv = json.loads(corral("up", "--dry-run", "--json")[1])["ranks"][0]["argv"]
    assert argv[argv.index("--max-model-len") + 1] == "96"
    assert argv[argv.index("--port") + 1] == "8126"


def test_up_refuses_secrets_and_locks_in_a_profile(corral: Command, tiny_model: Path) -> None:
    own("mine", '[engine]\nenv = { VLLM_API_KEY = "x" }\n')
    code, _, err = corral("up", str(tiny_model), "--on", "mine", "--dry-run", "--json")
    assert code == 2
    assert "VLLM_API_KEY is not passed" in err


def test_up_refuses_an_unknown_or_unfinished_profile(corral: Command) -> None:
    assert corral("up", "--on", "nobody", "--dry-run", "--json")[0] == 3
    code, _, err = corral("up", "--on", "kempner", "--dry-run", "--json")
    assert code == 2
    assert "slurm.partition, slurm.account need values" in err


def test_plan_on_a_profile(corral: Command) -> None:
    own("mine", 'target = "ssh"\n[hardware]\ngpus = "8xH100"\nnodes = 2\nlink = "ethernet-100"\n'
        '[defaults]\nmodel = "llama-3.1-405b"\ncontext = 8192\nset = { tensor = 8, pipeline = 2 }\n')  # fmt: skip
    code, out, _ = corral("plan", "--on", "mine", "--offline", "--json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["inventory"]["nodes"], plan["inventory"]["link"]) == (2, "ethernet-100")
    assert plan["parallel"] == {"tensor": 8, "pipeline": 2, "data": 1, "expert": False}
    assert plan["max_model_len"] == 8192
    flags = ("--nodes", "4", "--network", "ib-ndr", "--set", "pipeline=4", "--context", "4096")
    plan = json.loads(corral("plan", "--on", "mine", "--offline", "--json", *flags)[1])
    assert (plan["inventory"]["nodes"], plan["inventory"]["link"]) == (4, "ib-ndr")
    assert plan["parallel"]["pipeline"] == 4
    assert plan["max_model_len"] == 4096
    bare = json.loads(corral("plan", "llama-3.1-8b", "--on", "mine", "--gpus", "2xH200", "--offline", "--json",
                             "--set", "tensor=2", "--set", "pipeline=1")[1])  # fmt: skip
    assert bare["inventory"]["gpu"] == "H200"


def test_plan_on_a_profile_without_hardware(corral: Command) -> None:
    own("mine", 'target = "ssh"\n')
    code, _, err = corral("plan", "llama-3.1-8b", "--on", "mine", "--offline")
    assert code == 2
    assert "does not say what its nodes hold" in err


# ----------------------------------------------------------------------------------------------------------- the page
PAGE = ROOT / "docs" / "profiles.md"


def test_the_page_lists_every_key_as_it_is() -> None:
    section = PAGE.read_text().split("## The keys")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    written = {name: (takes, doc) for name, takes, doc in rows}
    assert written == {key.dotted: (key.takes, key.doc) for key in all_keys()}


def test_the_page_lists_every_variable() -> None:
    rows = dict(re.findall(r"^\| `(CORRAL_\w+)` \| `(.+?)` \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {**environment(), "CORRAL_PROFILE": "--on"}


def test_the_page_names_every_example() -> None:
    text = PAGE.read_text()
    for path in folders.example("kempner").parent.glob("*.toml"):
        assert f"`{path.stem}`" in text

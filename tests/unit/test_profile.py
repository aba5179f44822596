"""Profiles: read strictly, found by name, resolved in one order."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.base.errors import AccessError, CorralError, DataError, NotFoundError, UsageError
from corral.base.wording import time_limit_s
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.profile import folders
from corral.deploy.profile.contract import all_keys
from corral.deploy.profile.drafting import as_toml, draft, with_value
from corral.deploy.profile.merging import merged, use_hub_of
from corral.deploy.profile.profile import Profile, all_profiles, assemble, environment, load_profile
from corral.deploy.profile.reading import MOST_BYTES, build_settings, parse, read_file
from corral.engines.settings import SETTINGS


@pytest.fixture(autouse=True)
def quiet_environment(clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*environment(), "CORRAL_PROFILE"]:
        monkeypatch.delenv(name, raising=False)
    elsewhere = clean_home / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)


def profile_of(text: str, environ: dict[str, str] | None = None) -> Profile:
    return assemble("p", [parse(text, "p.toml")], environ or {})


def user_file(name: str, text: str) -> Path:
    path = folders.user_folder() / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(text: str) -> CorralError:
    with pytest.raises(CorralError) as caught:
        profile_of(text)
    return caught.value


# -------------------------------------------------------------------------------------------------------- strictness
@pytest.mark.parametrize(
    ("text", "line", "words", "remedy"),
    [
        ('target = "ssh"\n[ssh]\nhots = ["a"]\n', 3, "[ssh] has no key 'hots'", "'hosts'"),
        ('tagret = "ssh"\n', 1, "a profile has no key 'tagret'", "'target'"),
        ("[slrum]\nnodes = 1\n", 1, "no key 'slrum'", "'slurm'"),
        ('partition = "gpu"\n', 1, "no key 'partition'", "belongs into [slurm]"),
        ('[defaults]\nport = 8000\n', 2, "[defaults] has no key 'port'", "belongs into [endpoint]"),
        ('[hardware]\nzzz = 1\n', 2, "no key 'zzz'", "Known: gpus"),
        ('target = "cloud"\n', 1, "one of local, ssh, slurm, not 'cloud'", "Correct"),
        ('target = "slurm"\n[slurm]\n\nnodes = "two"\n', 4, "slurm.nodes must be a whole number, not 'two'", ""),
        ('target = "slurm"\n[slurm]\nnodes = true\n', 3, "slurm.nodes must be a whole number, not True", ""),
        ('target = "slurm"\n[slurm]\nnodes = 0\n', 3, "from 1 to 4096", ""),
        ('target = "slurm"\n[slurm]\ntime = "soon"\n', 3, "a time limit such as", ""),
        ('target = "slurm"\n[slurm]\ntime = 4\n', 3, "slurm.time must be text, not 4", "quotes"),
        ('target = "slurm"\n[slurm]\nexclusive = "yes"\n', 3, "true or false", ""),
        ('target = "slurm"\n[slurm]\nmem = [1]\n', 3, "text or a whole number", ""),
        ('target = "slurm"\n[slurm]\naccount = "-x"\n', 3, "does not begin with a dash", ""),
        ('target = "slurm"\n[slurm]\naccount = "a\\nb"\n', 3, "one word", ""),
        ('target = "slurm"\n[slurm]\nextra = { "--x" = 1 }\n', 3, "without dashes", ""),
        ('target = "slurm"\n[slurm]\nextra = { comment = "a\\n#SBATCH --x" }\n', 3, "text, numbers or true", ""),
        ('target = "ssh"\n[ssh]\nhosts = "a,b"\n', 3, "a list such as", ""),
        ('target = "ssh"\n[ssh]\nhosts = ["a", 2]\n', 3, "a list of text", ""),
        ('target = "ssh"\n[ssh]\nhosts = ["-oProxyCommand=x"]\n', 3, "hosts as ssh knows them", ""),
        ('target = "ssh"\n[ssh]\nhosts = ["a", "a"]\n', 3, "no host twice", ""),
        ('[hardware]\ngpus = "8xH1000"\n', 2, "8xH100", ""),
        ('[hardware]\nlink = "string"\n', 2, "one of ib-ndr", ""),
        ('[link]\nname = "chain"\n', 2, "one of auto, native, ray, single", ""),
        ('[engine]\nenv = { A = 1 }\n', 2, "engine.env.A must be text, not 1", "quotes"),
        ('[engine]\nenv = { "A B" = "1" }\n', 2, "names of variables", ""),
        ('[engine.env]\nA = 1\n', 2, "engine.env.A must be text", ""),
        ('[engine]\nargs = "--enforce-eager"\n', 2, "a list such as", ""),
        ('[endpoint]\nport = 70000\n', 2, "from 1 to 65535", ""),
        ('[storage]\nhome = "here"\n', 2, "begins with / or ~", ""),
        ('[defaults]\nset = { tensor = [1] }\n', 2, "defaults.set.tensor must be", ""),
        ('runtime = "docker"\n', 1, "runtime must be a table, not 'docker'", "[runtime]"),
        ('[runtime]\nname = 3\n', 2, "runtime.name must be text", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_file_and_line(text: str, line: int, words: str, remedy: str) -> None:
    error = refusal(text)
    assert isinstance(error, DataError)
    assert error.message.startswith(f"p.toml:{line}: "), error.message
    assert words in error.message
    assert remedy in error.remedy
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('target = "local"\n[ssh]\nhosts = ["a"]\n', "p.toml:2: [ssh] is there, but the target is 'local'"),
        ('[slurm]\nnodes = 1\n', "[slurm] is there"),
        ('target = "ssh"\n[ssh]\nhosts = ["a"]\nhosts_file = "h"\n', "both hosts and hosts_file"),
        ('target = "slurm"\n[slurm]\ngpus_per_node = 8\n[hardware]\ngpus = "4xH100"\n', "a node has 4xH100"),
        ('target = "slurm"\n[slurm]\nnodes = 4\n[hardware]\ngpus = "4xH100x2"\n', "says 2 nodes, but 4"),
        ('[endpoint]\nbind = "127.0.0.1"\nexpose = true\n', "p.toml:3: [endpoint] says bind"),
        ('target = "slurm"\n[slurm]\ntime = "5:00:00"\n[limits]\nmax_time = "4:00:00"\n', "max_time is 4:00:00"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused(text: str, words: str) -> None:
    assert words in refusal(text).message


def test_every_key_can_be_said() -> None:
    values: dict[str, Any] = {"target": "ssh", "description": "all of it"}
    for key in all_keys():
        if key.table and key.table != "slurm" and key.sample is not None:
            values.setdefault(key.table, {})[key.name] = key.sample
    values["ssh"].pop("hosts_file")
    values["endpoint"].pop("expose")
    values["runtime"] = {"name": "docker", "image": "x", "options": {"nested": 1}}
    profile = profile_of(draft(values))
    assert profile.target_options["hosts"] == ["node00", "node01"]
    assert profile.runtime_options == {"image": "x", "options": {"nested": 1}}
    assert profile.settings.limits.max_gpus == 32


def test_every_sample_of_a_draft_is_valid_once_its_sign_is_taken_away() -> None:
    for target in ("ssh", "slurm", "local"):
        lines, asleep = [], False
        for line in draft({"target": target}).splitlines():
            if line.startswith(("[", "# [")):
                asleep = line.startswith("#")  # the table of another target
            bare = line.removeprefix("# ")
            sample = " = " in bare and not bare.startswith(("hosts_file", "expose", "A profile"))
            lines.append(bare if sample and not asleep else line)
        assert profile_of("\n".join(lines)).target == target


def test_times_as_slurm_writes_them() -> None:
    assert [time_limit_s(text) for text in ("30", "10:30", "4:00:00", "1-12", "1-0:30", "2-01:02:03")] == [
        1800, 630, 14400, 129600, 88200, 176523,
    ]  # fmt: skip
    assert time_limit_s("never") is None


# ------------------------------------------------------------------------------------------------------ hostile files
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"target = \xff\xfe\n", "p.toml:1 is not UTF-8"),
        (b"a = 1\n\n# \xe9\n", "p.toml:3 is not UTF-8"),
        (b"\x00\x01\x02", "is not TOML"),
        (b"target = ssh\n", "line 1"),
        (b"target = \n", "line 1"),
        (b"[ssh\n", "line 1"),
        (b'target = "ssh"\ntarget = "ssh"\n', "line 2"),
        (b"x = " + b"[" * 50_000, "nested too deeply"),
        (b"#" * 1_000_000, "1,000,000 bytes"),
        (b'description = "' + b"x" * (MOST_BYTES - 40) + b'"\nfoo = 1\n', "no key 'foo'"),
        (b"x = 2026-11-15\n", "no key 'x'"),
    ],
)
def test_hostile_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_file(path, "user")
    assert words in caught.value.message
    assert len(caught.value.message) < 500


def test_things_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    (tmp_path / "gone.toml").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "pipe", "loop", "gone"):
        with pytest.raises(DataError, match=f"{name}.toml"):
            read_file(tmp_path / f"{name}.toml", "user")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.toml"
    path.write_text("")

    def refused(self: Path) -> bytes:  # root may read everything, so the refusal is played
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(AccessError, match="may not be read"):
        read_file(path, "user")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(b'\xef\xbb\xbftarget = "local"\r\n[link]\r\nname = "ray"\r\n')
    assert assemble("p", [read_file(path, "user")], {}).link == "ray"


@given(st.binary(max_size=200))
def test_no_file_ends_in_a_traceback(content: bytes) -> None:
    with contextlib.suppress(DataError):
        parse(content.decode("utf-8", "replace"), "p.toml")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner:
       st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5),
       st.sampled_from([key.dotted for key in all_keys()]))  # fmt: skip
def test_any_value_of_any_key_is_taken_or_refused_clearly(value: Any, dotted: str) -> None:
    from corral.deploy.profile.reading import Layer

    table, _, name = dotted.rpartition(".")
    values = {table: {name: value}} if table else {name: value}
    with contextlib.suppress(DataError):
        profile = assemble("p", [Layer("user", "p.toml", values)], {})
        profile.rows()
        with contextlib.suppress(UsageError):
            merged(profile, {})


# -------------------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a b", "-x", "a\n", "ü", "x" * 65, "a."]
)
def test_names_that_no_profile_has(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        folders.find(name)


@pytest.mark.parametrize("name", ["a", "A1", "x" * 64, "my.cluster_2-b", "toml", "a.toml"])
def test_names_that_profiles_may_have(name: str) -> None:
    user_file(name, 'description = "x"\n')
    assert load_profile(name).name == name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    user_file("mine", "")
    with pytest.raises(NotFoundError) as caught:
        load_profile("kempnr")
    assert "Did you mean kempner" in caught.value.remedy
    assert "mine" in caught.value.remedy
    assert caught.value.exit_code == 3


# ------------------------------------------------------------------------------------------------------------- places
def test_where_the_users_own_lie(clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders.user_folder() == clean_home / ".config/corral/profiles"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/x/config")
    assert folders.user_folder() == Path("/x/config/corral/profiles")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # the specification says: ignore it
    assert folders.user_folder() == clean_home / ".config/corral/profiles"


def project_file(folder: Path, name: str, text: str) -> Path:
    path = folder / ".corral" / "profiles" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_projects_profiles_are_found_up_to_the_root_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, inner = tmp_path / "repo", tmp_path / "repo" / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    project_file(tmp_path, "outside", "")
    project_file(root, "at-root", "")
    with pytest.raises(NotFoundError):  # no repository: only the working directory counts
        load_profile("at-root")
    (root / ".git").mkdir()
    assert load_profile("at-root").layers[0].kind == "project"
    with pytest.raises(NotFoundError):
        load_profile("outside")
    project_file(root / "a", "at-root", 'description = "nearer"\n')
    assert load_profile("at-root").settings.description == "nearer"
    assert len(load_profile("at-root").layers) == 1


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_profile("kempner").target == "slurm"


def test_examples_are_used_only_where_nobody_else_has_the_name() -> None:
    assert load_profile("lambda-1cc").settings.hardware.gpus == "8xH100"
    user_file("lambda-1cc", 'target = "ssh"\n')
    assert load_profile("lambda-1cc").settings.hardware.gpus is None
    assert folders.example("lambda-1cc").is_file()


def test_the_list_holds_broken_ones_with_their_error() -> None:
    user_file("broken", "target = 1\n")
    user_file("odd name", "")
    (folders.user_folder() / "folder.toml").mkdir()
    found = {one.name: one for one in all_profiles()}
    assert "must be text" in str(found["broken"].error)
    assert "is not a file" in str(found["folder"].error)
    assert found["kempner"].kinds == ("example",)
    assert found["kempner"].profile is not None
    assert "odd name" not in found


# --------------------------------------------------------------------------------------------------------- precedence
USER = """\
target = "slurm"
[slurm]
account = "lab"
partition = "old"
time = "1:00:00"
[engine]
env = { A = "user", B = "user" }
[defaults]
context = 1000
concurrency = 1
goal = "latency"
restart = 1
"""
PROJECT = """\
target = "slurm"
[slurm]
partition = "project"
[engine]
env = { B = "project" }
[defaults]
context = 2000
concurrency = 2
goal = "throughput"
"""


def test_flag_over_environment_over_project_over_user_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    user, project = user_file("c", USER), project_file(tmp_path, "c", PROJECT)
    profile = load_profile("c", {"CORRAL_CONTEXT": "3000", "CORRAL_CONCURRENCY": "3"})
    found = merged(profile, {"context": 4000, "port": None})
    assert found["goal"] == {"context": 4000, "concurrency": 3, "goal": "throughput"}
    assert found["patience"] == {"restarts": 1}  # nobody said more: the defaults of `Patience`
    assert found["target_options"]["account"] == "lab"
    assert found["target_options"]["partition"] == "project"
    assert found["extra_env"] == {"A": "user", "B": "project"}
    assert profile.origin("slurm.account") == f"{user}:3"
    assert profile.origin("slurm.partition") == f"{project}:3"
    assert profile.origin("defaults.context") == "CORRAL_CONTEXT"
    assert profile.origin("defaults.stall") == "default"
    listed = next(one for one in all_profiles() if one.name == "c")
    assert listed.kinds == ("project", "user")


def test_another_runtime_or_target_above_leaves_the_options_of_the_one_below_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    user_file("c", 'target = "ssh"\n[ssh]\nhosts = ["a"]\n[runtime]\nname = "conda"\nenv = "x"\n')
    project_file(tmp_path, "c", 'target = "local"\n[runtime]\nname = "docker"\n')
    profile = load_profile("c")
    assert (profile.target, profile.target_options, profile.runtime, profile.runtime_options) == (
        "local",
        {},
        "docker",
        {},
    )
    assert load_profile("c", {"CORRAL_RUNTIME": "venv"}).runtime_options == {}


def test_a_context_is_said_as_on_the_command_line() -> None:
    assert load_profile(None, {"CORRAL_CONTEXT": "32k"}).settings.defaults.context == 32768
    layer = parse('[defaults]\ncontext = "128K"\n', "x.toml")
    assert build_settings(layer.values, layer).defaults.context == 131072
    with pytest.raises(
        DataError, match=r'x\.toml:2: defaults\.context must be a number of tokens such as 32768 or "32k"'
    ):
        parse('[defaults]\ncontext = "3kk"\n', "x.toml")


def test_the_environment_is_read_as_strictly_as_a_file() -> None:
    with pytest.raises(
        DataError, match=r"CORRAL_CONTEXT: defaults\.context must be a number of tokens.*, not 'many'"
    ):
        load_profile(None, {"CORRAL_CONTEXT": "many"})
    with pytest.raises(DataError, match=r"CORRAL_LINK: link\.name must be one of"):
        load_profile(None, {"CORRAL_LINK": "chain"})
    profile = load_profile("digitalocean-droplet", {"CORRAL_HOSTS": "a, b,", "CORRAL_ACCOUNT": "ignored"})
    assert profile.target_options["hosts"] == ["a", "b"]
    assert profile.origin("ssh.hosts") == "CORRAL_HOSTS"
    assert load_profile(None, {"CORRAL_HOSTS": "a"}).target_options == {}  # no target of its own for it
    assert load_profile(None, {"CORRAL_PORT": "  "}).settings.endpoint.port is None


def test_every_variable_stands_for_a_key() -> None:
    assert set(environment().values()) <= {key.dotted for key in all_keys()}


# ------------------------------------------------------------------------------------------------------------ merging
FULL = """\
target = "ssh"
[ssh]
hosts = ["a", "b"]
[hardware]
gpus = "8xH100"
link = "ethernet-100"
[runtime]
name = "docker"
image = "img"
[link]
name = "ray"
[network]
interface = "bond0"
hca = "mlx5"
env = { NCCL_DEBUG = "INFO" }
[storage]
home = "/srv/corral"
[engine]
env = { X = "1" }
args = ["--enforce-eager"]
[defaults]
model = "llama-3.1-8b"
context = 8192
set = { tensor = 8, pipeline = 2 }
stall = 1200
[endpoint]
port = 9000
"""


def test_a_profile_becomes_a_wish() -> None:
    found = merged(profile_of(FULL), {})
    assert found == {
        "model": "llama-3.1-8b",
        "target": "ssh",
        "target_options": {
            "hosts": ["a", "b"], "interface": "bond0", "hca": "mlx5", "env": {"NCCL_DEBUG": "INFO"},
            "home": "/srv/corral", "gpus": "8xH100-SXM", "fabric": "ethernet-100",
        },
        "storage": {"home": "/srv/corral"},
        "runtime": "docker",
        "runtime_options": {"image": "img"},
        "link": "ray",
        "port": 9000,
        "patience": {"stall_s": 1200.0},
        "api": {},
        "goal": {"context": 8192},
        "fixed": {"tensor": 8, "pipeline": 2, "eager": "true"},
        "extra_args": (),
        "extra_env": {"NCCL_DEBUG": "INFO", "X": "1"},
    }  # fmt: skip
    request = DeployRequest.of(found)
    assert request.goal.goal == "balanced"
    assert request.patience.restarts == 0


def test_nothing_said_is_the_wish_as_it_was() -> None:
    found = merged(Profile(), {"context": None, "extra_args": (), "fixed": {}})
    assert DeployRequest.of(found) == DeployRequest()


def test_an_option_given_always_wins() -> None:
    found = merged(
        profile_of(FULL),
        {
            "model": "other", "target_options": {"hosts": ("c",)}, "link": "native", "port": 1, "context": 1,
            "goal": "latency", "fixed": {"tensor": "4"}, "extra_args": ("--max-num-seqs", "4", "--seed", "1"),
            "extra_env": {"X": "2"}, "restarts": 0, "stall_s": 10.0, "name": "n", "bind": "0.0.0.0",
            "runtime_options": {"image": "mine"}, "hung_s": 11.0,
        },
    )  # fmt: skip
    assert found["target_options"]["hosts"] == ("c",)
    assert found["target_options"]["interface"] == "bond0"
    assert found["fixed"] == {"tensor": "4", "pipeline": 2, "eager": "true", "max_num_seqs": "4"}
    assert found["extra_args"] == ("--seed", "1")
    assert found["extra_env"]["X"] == "2"
    assert found["runtime_options"] == {"image": "mine"}
    given = ("model", "link", "port", "name", "bind")
    assert [found[key] for key in given] == ["other", "native", 1, "n", "0.0.0.0"]
    assert found["patience"] == {"restarts": 0, "stall_s": 10.0, "hung_s": 11.0}


@pytest.mark.parametrize(
    ("flags", "fixed", "context"),
    [
        ({}, {"weights": "fp16", "max_model_len": 100}, None),
        ({"context": 50}, {"weights": "fp16"}, 50),
        ({"fixed": {"max_model_len": "60"}}, {"weights": "fp16", "max_model_len": "60"}, None),
        ({"extra_args": ("--dtype", "bfloat16")}, {"dtype": "bf16", "max_model_len": 100}, None),
        ({"extra_args": ("-q", "fp8")}, {"quantization": "fp8", "max_model_len": 100}, None),
    ],
)
def test_what_a_command_says_takes_the_place_of_every_name_of_it(
    flags: dict[str, object], fixed: dict[str, object], context: int | None
) -> None:
    found = merged(profile_of('[defaults]\nset = { weights = "fp16", max_model_len = 100 }\n'), flags)
    assert found["fixed"] == fixed
    assert found["goal"].get("context") == context


def test_another_target_or_runtime_on_the_command_line_leaves_the_profiles_options_behind() -> None:
    found = merged(profile_of(FULL), {"target": "local", "runtime": "managed"})
    assert (found["target"], found["target_options"], found["runtime_options"]) == ("local", {}, {})


def test_bind_and_expose_are_one_question() -> None:
    exposed = profile_of("[endpoint]\nexpose = true\n")
    assert merged(exposed, {})["expose"] is True
    assert "expose" not in merged(exposed, {"bind": "127.0.0.1"})
    bound = profile_of('[endpoint]\nbind = "10.0.0.1"\n')
    assert "bind" not in merged(bound, {"expose": True})


def test_a_flag_that_no_wish_has_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="hots"):
        merged(Profile(), {"hots": 1})


def test_placeholders_must_be_filled_in_before_use() -> None:
    profile = load_profile("kempner")
    assert profile.placeholders() == ["slurm.partition", "slurm.account"]
    with pytest.raises(UsageError) as caught:
        merged(profile, {})
    assert "slurm.partition, slurm.account need values" in caught.value.message
    assert "corral profile init my-kempner --from kempner" in caught.value.remedy
    own = user_file("mine", 'target = "slurm"\n[slurm]\naccount = "<your account>"\n')
    with pytest.raises(UsageError) as caught:
        merged(load_profile("mine"), {})
    assert caught.value.remedy == f"Set it in {own}, or on the command line."
    filled = load_profile("kempner", {"CORRAL_PARTITION": "gpu", "CORRAL_ACCOUNT": "lab"})
    assert merged(filled, {})["target_options"]["account"] == "lab"
    assert merged(profile, {"target_options": {"partition": "gpu", "account": "lab"}})["target_options"]["nodes"] == 4


@pytest.mark.parametrize(
    ("limits", "flags", "words"),
    [
        ("max_nodes = 1", {}, "2 nodes exceed the 1"),
        ("max_gpus = 8", {}, "16 GPUs exceed the 8"),
        ("max_nodes = 2", {"target_options": {"hosts": ("a", "b", "c")}}, "3 nodes exceed the 2"),
    ],
)
def test_limits_hold_whatever_the_command_line_says(limits: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        merged(profile_of(FULL + f"[limits]\n{limits}\n"), flags)
    assert words in caught.value.message
    assert "p.toml:" in caught.value.remedy


def test_the_limit_of_time_holds_for_the_command_line_too() -> None:
    profile = profile_of('target = "slurm"\n[slurm]\ntime = "1:00:00"\n[limits]\nmax_time = "2:00:00"\n')
    assert merged(profile, {"target_options": {"time": "2:00:00"}})["target_options"]["time"] == "2:00:00"
    with pytest.raises(UsageError, match="10,800 seconds"):
        merged(profile, {"target_options": {"time": "3:00:00"}})


def test_limits_hold_for_words_of_the_command_line() -> None:
    profile = profile_of('target = "slurm"\n[limits]\nmax_gpus = 8\n')
    assert merged(profile, {"target_options": {"nodes": 2, "gpus_per_node": "4"}})
    with pytest.raises(UsageError, match="12 GPUs"):
        merged(profile, {"target_options": {"nodes": "3", "gpus_per_node": "4"}})
    assert (
        merged(profile, {"target_options": {"nodes": "many"}})["target_options"]["nodes"] == "many"
    )  # the target's to refuse


def test_slurm_options() -> None:
    profile = profile_of(
        'target = "slurm"\n[slurm]\npartition = "gpu"\nmem = 0\nexclusive = false\nsignal_s = 60\n'
        'extra = { "mail-type" = "END", comment = "a b" }\n[hardware]\ngpus = "4xA100"\nnodes = 2\n'
        "[limits]\nmax_jobs = 3\n"
    )
    assert profile.target_options == {
        "partition": "gpu", "mem": 0, "exclusive": False, "signal_s": 60, "nodes": 2,
        "hardware": {"gpus": "4xA100", "nodes": 2}, "extra": {"mail-type": "END", "comment": "a b"}, "max_jobs": 3,
    }  # fmt: skip


def test_named_hardware_is_an_inventory() -> None:
    profile = profile_of(FULL)
    found = profile.inventory()
    assert found is not None
    assert (found.gpu, found.gpus_per_node, found.nodes, found.link) == ("H100-SXM", 8, 2, "ethernet-100")
    assert Profile().inventory() is None
    cpu = profile_of("[hardware]\ncpu_cores = 8\nmemory_gib = 32\n").inventory()
    assert cpu is not None
    assert (cpu.gpu, cpu.cpu_cores, cpu.host_memory_bytes) == (None, 8, 32 << 30)
    written = profile_of('[hardware]\ngpus = "8xH100x2"\n').inventory()
    assert written is not None
    assert written.nodes == 2


def test_a_hosts_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# nodes\nhead slots=8\n\nworker # second\n")
    path = tmp_path / "p.toml"
    path.write_text('target = "ssh"\n[ssh]\nhosts_file = "hosts"\n')
    assert assemble("p", [read_file(path, "user")], {}).target_options["hosts"] == ["head", "worker"]
    (tmp_path / "hosts").write_text("good\n-bad\n")
    with pytest.raises(DataError, match=r"p\.toml:3: the hosts file"):
        assemble("p", [read_file(path, "user")], {})
    (tmp_path / "hosts").unlink()
    with pytest.raises(DataError, match="there is no file"):
        assemble("p", [read_file(path, "user")], {})
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(DataError, match="is not a file"):
        assemble("p", [read_file(path, "user")], {})


# ------------------------------------------------------------------------------------------------------------ storage
def test_the_hub_of_a_profile_is_used_where_it_is_and_no_other_is_set(tmp_path: Path) -> None:
    profile = profile_of(f'[storage]\nhf_home = "{tmp_path}"\n')
    environ: dict[str, str] = {}
    use_hub_of(profile, environ)
    assert environ == {"HF_HOME": str(tmp_path)}
    use_hub_of(profile, environ := {"HF_HOME": "/mine"})
    assert environ == {"HF_HOME": "/mine"}
    use_hub_of(profile_of('[storage]\nhf_home = "/nowhere"\n'), environ := {})
    assert not environ


# ------------------------------------------------------------------------------------------------------------ writing
SCALARS = st.booleans() | st.integers(-(2**62), 2**62) | st.text()
NESTED = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(NESTED)
def test_values_are_written_as_toml_reads_them(value: Any) -> None:
    import tomllib

    assert tomllib.loads(f"x = {as_toml(value)}")["x"] == value


def test_a_value_is_set_where_its_key_stands() -> None:
    text = '# why\ntarget = "ssh"\n[ssh]\nhosts = []  # here\n[defaults]\nmodel = "a"\n'
    assert with_value(text, "ssh.hosts", ["a"]) == text.replace("hosts = []  # here", 'hosts = ["a"]')
    assert profile_of(with_value(text, "endpoint.port", 9000)).settings.endpoint.port == 9000
    assert profile_of(with_value(text, "defaults.context", 1)).settings.defaults.context == 1
    assert profile_of(with_value(text, "description", "x")).settings.description == "x"
    assert profile_of(with_value(text, "runtime.image", "x")).runtime_options == {"image": "x"}
    with pytest.raises(UsageError, match=r"no key 'ssh.hots'"):
        with_value(text, "ssh.hots", [])
    with pytest.raises(UsageError, match="several lines"):
        with_value('[ssh]\nhosts = [\n  "a",\n]\n', "ssh.hosts", ["b"])


def test_fields_of_the_plan_in_examples_exist() -> None:
    for one in all_profiles():
        assert one.profile is not None, one.error
        assert set(one.profile.settings.defaults.set) <= set(SETTINGS)

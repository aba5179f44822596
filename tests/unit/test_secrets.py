"""Secrets of the user stay out of argument lists, of what is shown, and of folders that others can make."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from corral.base import ssh
from corral.base.files import write_atomic
from corral.base.masking import is_secret_name, masked_argv
from corral.base.record import dump_json
from corral.base.shell import Completed
from corral.cli import root
from corral.console.commands import line_of
from corral.console.statuses import deployment_row
from corral.deploy.deployment.state import Patience
from corral.deploy.launch.paste import masked
from corral.deploy.launch.render import LaunchSpec, RankSpec
from corral.engines import environments
from corral.engines.locks import Sources, parse_sources
from corral.lab.bench.fingerprint import _flags
from tests.console_home import make


# ------------------------------------------------------------------------------------------------- package indexes
def test_passwords_of_package_indexes_are_not_in_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = """global.index-url='https://me:s3cret@mirror/simple'
global.extra-index-url='https://me:s3cret@other/simple https://plain/simple'
global.find-links='https://me:s3cret@wheels/ /wheels'
global.trusted-host='mirror other'
"""
    seen: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def stream(argv: Sequence[str], on_line: object, env: Mapping[str, str]) -> Completed:
        seen.append((argv, env))
        return Completed(tuple(argv), 1, "error: https://me:s3cret@mirror/simple is away", "")

    monkeypatch.setattr(environments, "read_sources", lambda: parse_sources(listing))
    monkeypatch.setattr(environments, "stream", stream)
    done = environments._pip_install("python", ["-r", "lock"], lambda text: None, "https://torch/cpu")
    ((argv, env),) = seen
    assert "s3cret" not in " ".join(argv)
    assert env["UV_DEFAULT_INDEX"] == "https://me:s3cret@mirror/simple"
    assert env["UV_INDEX"] == "https://torch/cpu https://me:s3cret@other/simple https://plain/simple"
    assert env["UV_FIND_LINKS"] == "https://me:s3cret@wheels/,/wheels"
    assert env["UV_INSECURE_HOST"] == "mirror other"
    assert "s3cret" not in environments._last_words(done)
    assert Sources(no_index=True).as_arguments() == ["--no-index"]


# ------------------------------------------------------------------------------------------------------ dry runs
@pytest.mark.parametrize("shown", [[], ["--json"], ["--shell"]])
def test_a_dry_run_does_not_show_the_values_of_secrets(clean_home: Path, shown: list[str]) -> None:
    said = ["--env", "MY_API_KEY=hush-hush", "--env", "OTHER=see hush-hush", "--env", "DB_PASSWORD=pw-pw-pw"]
    done = CliRunner().invoke(root, ["up", "--dry-run", *shown, *said])
    assert done.exit_code == 0, done.output
    assert ("MY_API_KEY" in done.output) == bool(shown)  # the summary has no environment
    assert "hush-hush" not in done.output
    assert "pw-pw-pw" not in done.output
    if shown == ["--json"]:
        rank = json.loads(done.stdout)["ranks"][0]
        assert rank["env"]["MY_API_KEY"] == "****"
        assert rank["env"]["OTHER"] == "see ****"


def test_places_of_secrets_are_shown() -> None:
    names = ["MY_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "APIKEY"]
    assert all(map(is_secret_name, names))
    assert not any(map(is_secret_name, ["CORRAL_KEY_FILE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "MONKEY", "PATH"]))


# --------------------------------------------------------------------------------------------------- ssh's sockets
@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ssh, "LONGEST_FOLDER", 400)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


def test_a_folder_that_somebody_else_made_does_not_block_ssh(clean_home: Path, tmp: Path) -> None:
    """The attack: mkdir /tmp/corral-ssh-UID before the victim does."""
    (tmp / f"corral-ssh-{os.getuid()}").mkdir(mode=0o777)
    folder = ssh.socket_folder()
    assert folder.name != f"corral-ssh-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert ssh.socket_folder() == folder  # found again by later commands


def test_a_planted_link_is_not_followed(clean_home: Path, tmp: Path) -> None:
    first = ssh.socket_folder()
    first.rmdir()
    (tmp / "theirs").mkdir(mode=0o700)
    first.symlink_to(tmp / "theirs")
    assert ssh.socket_folder() not in (first, tmp / "theirs")


def test_a_folder_that_others_may_enter_is_left(clean_home: Path, tmp: Path) -> None:
    first = ssh.socket_folder()
    first.chmod(0o777)
    assert ssh.socket_folder() != first


def test_the_users_runtime_folder_is_taken_where_it_is_private(
    clean_home: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp / "run"))
    assert ssh.socket_folder() == tmp / "run" / "corral-ssh"
    (tmp / "run").chmod(0o755)
    assert ssh.socket_folder().parent == tmp


# ------------------------------------------------------------------------------------------------- argument lists
SECRET_WORDS = [
    (("--env", "HF_TOKEN=hush"), ("--env", "HF_TOKEN=****")),
    (("--env=HF_TOKEN=hush",), ("--env=HF_TOKEN=****",)),
    (("HF_TOKEN=a=hush",), ("HF_TOKEN=****",)),
    (("--", "--hf-token", "hush"), ("--", "--hf-token", "****")),
    (("--", "--hf_token", "hush"), ("--", "--hf_token", "****")),
    (("--hf-token=hush",), ("--hf-token=****",)),
    (("--api-key", "hush", "hush"), ("--api-key", "****", "****")),
    (("--api-key", "hush", "--port", "1"), ("--api-key", "****", "--port", "1")),
    (("--API-KEY", "-hush"), ("--API-KEY", "****")),
]
PLAIN_WORDS = [
    ("--max-num-batched-tokens", "8192", "--tokenizer", "x", "--ssl-keyfile", "/k", "--key-file", "/k"),
    ("--return-tokens-as-token-ids", "--port", "1", "HF_TOKEN_PATH=/x", "--tool-call-parser", "llama3_json"),
    ("up", "--name", "a", "smollm2", "--env", "VLLM_LOGGING_LEVEL=DEBUG"),
]


@pytest.mark.parametrize(("words", "shown"), SECRET_WORDS)
def test_secrets_in_arguments_are_masked_in_every_form(words: tuple[str, ...], shown: tuple[str, ...]) -> None:
    assert masked_argv(words) == shown


@pytest.mark.parametrize("words", PLAIN_WORDS)
def test_arguments_that_only_look_like_secrets_stay(words: tuple[str, ...]) -> None:
    assert masked_argv(words) == words


@pytest.mark.parametrize("words", [words for words, _ in SECRET_WORDS])
def test_the_console_shows_no_secret_of_a_command(clean_home: Path, words: tuple[str, ...]) -> None:
    made = make("one", words=("up", "smollm2", *words)).agent().course(("starting", 1), ("ready", 20))
    _, row = deployment_row(made.folder)
    assert row is not None
    assert row["restart"] is None
    assert "hush" not in json.dumps(row)
    assert "hush" not in line_of(["up", *words])


@pytest.mark.parametrize("words", [words for words, _ in SECRET_WORDS])
def test_a_report_of_a_measurement_shows_no_secret(clean_home: Path, words: tuple[str, ...]) -> None:
    made = make("one")
    rank = RankSpec(0, "here", ("vllm", "serve", "m", *words), {}, (), "/", None)
    launch = LaunchSpec(
        1, "one", "id", "m", "m", "m", "vllm", "local", "managed", "single", "", (rank,), (), Patience(), {}
    )
    write_atomic(made.folder.launch, dump_json(launch))
    assert "hush" not in " ".join(_flags(made.folder))
    assert "hush" not in dump_json(masked(launch))


@pytest.mark.parametrize("shown", [[], ["--json"], ["--shell"]])
def test_a_dry_run_masks_secrets_of_the_engine(clean_home: Path, shown: list[str]) -> None:
    done = CliRunner().invoke(root, ["up", "--dry-run", *shown, "--", "--hf-token", "hush-hush"])
    assert done.exit_code == 0, done.output
    assert "--hf-token" in done.output
    assert "hush-hush" not in done.output

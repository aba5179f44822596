"""What clients may use of an endpoint: tools, pages of other origins, stored responses, a key of the user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from corral.deploy.deployment.folder import DeploymentFolder
from tests.unit.conftest import Corral

KEY = "k" * 32


def rank(corral: Corral, *options: str) -> tuple[list[str], dict[str, str]]:
    """The engine's words and environment in a dry run."""
    done = corral("up", str(corral.model), "--dry-run", "--json", *options)
    assert done.code == 0, done.err
    spec = json.loads(done.out)["ranks"][0]
    return spec["argv"], spec["env"]


def after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_an_endpoint_is_closed_to_pages_and_its_key_is_new(corral: Corral) -> None:
    argv, env = rank(corral)
    assert after(argv, "--allowed-origins") == "[]"  # vLLM's own default is every origin
    assert {"--enable-request-id-headers", "--enable-tokenizer-info-endpoint"} <= {*argv}
    assert not {"CORRAL_ALLOWED_ORIGINS", "CORRAL_STORE_RESPONSES"} & {*env}


def test_pages_and_stored_responses_are_switched_on(corral: Corral) -> None:
    argv, env = rank(
        corral, "--allowed-origins", "https://chat.example.org/, http://localhost:3000", "--store-responses"
    )
    origins = ["https://chat.example.org", "http://localhost:3000"]
    assert json.loads(after(argv, "--allowed-origins")) == json.loads(env["CORRAL_ALLOWED_ORIGINS"]) == origins
    assert env["CORRAL_STORE_RESPONSES"] == "1"
    done = corral("up", str(corral.model), "--dry-run", "--json", "--allowed-origins", "chat.example.org")
    assert done.code == 2
    assert "'chat.example.org' is not an origin: write https://chat.example.org, or * for all." in done.err


def test_tools_are_said_and_switched_off(corral: Corral) -> None:
    template = corral.model / "chat_template.jinja"
    template.write_text("<tool_call>{{ x }}")
    done = corral("up", str(corral.model), "--dry-run", "--json")
    assert after(json.loads(done.out)["ranks"][0]["argv"], "--tool-call-parser") == "hermes"
    assert "tool calls are read by vLLM's parser hermes; --no-tools switches them off" in done.err
    for own in (["--no-tools"], ["--", "--tool-call-parser", "pythonic", "--enable-auto-tool-choice"]):
        done = corral("up", str(corral.model), "--dry-run", "--json", *own)
        assert "hermes" not in done.out
        assert "hermes" not in done.err


def test_a_key_file_is_the_endpoints_key(answering: Corral, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    done = answering("up", str(answering.model), "--name", "mine", "--key-file", str(file))
    assert done.code == 0, done.err
    assert DeploymentFolder.of("mine").key.read_text() == KEY + "\n"
    assert KEY not in done.err + done.out
    assert KEY not in DeploymentFolder.of("mine").launch.read_text()


@pytest.mark.parametrize(
    ("text", "mode", "code", "said"),
    [
        (KEY, 0o644, 6, r"others may read the key in .*key\."),
        ("short", 0o600, 10, "holds no usable key"),
        ("two words that are long enough", 0o600, 10, "holds no usable key"),
        (None, 0o600, 3, "there is no file"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused(
    corral: Corral, tmp_path: Path, text: str | None, mode: int, code: int, said: str
) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    done = corral("up", str(corral.model), "--key-file", str(file))
    assert done.code == code, done.err
    assert re.search(said, done.err)
    assert text is None or text not in done.err
    assert corral("ps", "--json").json() == []

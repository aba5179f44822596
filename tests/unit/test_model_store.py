"""Models from the hub, through the real client library against a small hub on loopback."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from corral.base.errors import DataError, NotFoundError
from corral.plan.models.store import locate, verify_folder
from tests.fake_hub import FakeHub
from tests.unit.conftest import Corral


@pytest.fixture
def repository(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    shutil.copytree(tiny_model, folder)
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"x" * 5000)
    (folder / "README.md").write_text("hello")
    return folder


def online(corral: Corral, hub: FakeHub, *arguments: str, **env: str):
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **env}
    return corral(*arguments, **env)


def test_a_hub_model_is_fetched_served_and_kept(corral: Corral, repository: Path) -> None:
    with FakeHub({"lab/tiny-llama": repository}) as hub:
        up = online(corral, hub, "up", "lab/tiny-llama", "--json")
        assert up.code == 0, up.err
        assert up.json()["endpoint"]["model"] == "tiny-llama"
        assert "model.safetensors" in hub.served
        assert not any("original" in name for name in hub.served)
        assert online(corral, hub, "down", "--all").code == 0
        hub.served.clear()
        again = online(corral, hub, "up", "lab/tiny-llama", "--json")
        assert again.code == 0, again.err
        assert not hub.served
        assert online(corral, hub, "down", "--all").code == 0
    offline = corral.apart("up", "lab/tiny-llama", "--json")  # no hub at all any more
    assert offline.code == 0, offline.err


def test_a_download_that_breaks_is_resumed(corral: Corral, repository: Path) -> None:
    with FakeHub({"lab/tiny-llama": repository}) as hub:
        hub.break_after["model.safetensors"] = 100_000
        up = online(corral, hub, "up", "lab/tiny-llama", "--json")
        if up.code:  # the library gave up on it: the same command goes on
            up = online(corral, hub, "up", "lab/tiny-llama", "--json")
        assert up.code == 0, up.err
        fetched = next((corral.home / ".cache/huggingface/hub").rglob("model.safetensors"))
        assert fetched.read_bytes() == (repository / "model.safetensors").read_bytes()


def test_a_gated_model_is_explained_before_anything_happens(corral: Corral, repository: Path) -> None:
    shutil.rmtree(corral.home / "corral" / "engines")
    with FakeHub({"lab/gated": repository}, gated={"lab/gated"}) as hub:
        for token in ({}, {"HF_TOKEN": "bad"}):
            up = online(corral, hub, "up", "lab/gated", **token)
            assert up.code == 6, up.err
            assert "lab/gated is gated" in up.err
            assert "HF_TOKEN" in up.err
            assert "bad" not in up.err
    assert not (corral.home / "corral" / "engines").exists()
    assert not (corral.home / "corral" / "deployments").exists()


def test_the_right_token_opens_it(corral: Corral, repository: Path) -> None:
    with FakeHub({"lab/gated": repository}, gated={"lab/gated"}) as hub:
        up = online(corral, hub, "up", "lab/gated", "--json", HF_TOKEN="tok-en-that-is-good")
        assert up.code == 0, up.err
    for path in (corral.home / "corral").rglob("*"):
        if path.is_file():
            assert "tok-en-that-is-good" not in path.read_text(errors="replace")


def test_a_repository_that_does_not_exist(corral: Corral, repository: Path) -> None:
    with FakeHub({"lab/tiny-llama": repository}) as hub:
        up = online(corral, hub, "up", "lab/other")
        assert up.code == 3
        assert "lab/other" in up.err


def test_a_hub_that_cannot_be_reached(corral: Corral) -> None:
    up = corral("up", "lab/other", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert up.code == 9
    assert "lab/other" in up.err


def test_names(tiny_model: Path) -> None:
    assert locate(str(tiny_model)).kind == "folder"
    assert locate("smollm2").kind == "embedded"
    assert locate("LLAMA-3.1-8b").repo == "meta-llama/Llama-3.1-8B"
    assert locate("meta-llama/Llama-3.1-8B").name == "llama-3.1-8b"
    assert locate("some/model").name == "model"
    with pytest.raises(NotFoundError) as caught:
        locate("llama-3.1-9b")
    assert "llama-3.1-8b" in caught.value.remedy


def test_folders_without_all_their_weights(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no weights"):
        verify_folder(tmp_path)

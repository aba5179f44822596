"""Where a model's files are: one answer for what was downloaded in any way, here and on nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.base.errors import DataError, UnreachableError
from corral.base.ssh import Ssh
from corral.deploy.doctor.examination import Question, model_paths
from corral.deploy.transfer.pull import _of_hosts
from corral.plan import places
from corral.plan.hardware.survey import PathFacts
from corral.plan.models.store import ModelSource
from corral.plan.places import Storage, find_on_nodes, located, remember
from tests.fake_hub import FakeHub
from tests.fake_ssh import make_fake_ssh
from tests.unit.conftest import Corral

LLAMA = ModelSource("llama-3.1-70b", "hub", "meta-llama/Llama-3.1-70B")
FIRST_UPLOAD = "7129260dd854a80eb10ace5f61c20324b472b31c"


@pytest.fixture
def nodes(tmp_path: Path, clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORRAL_SSH", make_fake_ssh(tmp_path / "hosts", ["a", "b"]))
    return tmp_path / "hosts"


def weights(folder: Path, size: int = 5000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(size))
    return folder


def find(source: ModelSource = LLAMA, least: int = 4000, **storage: str) -> str | None:
    found = find_on_nodes(Ssh(), ["a", "b"], source, Storage(**storage), least)
    return found.folder if found else None


def cached(hub: Path, repo: str, commit: str = "abc123") -> Path:
    """A repository in a cache of the hub, as the hub's library keeps it."""
    repository = hub / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f00").write_bytes(bytes(5000))
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return snapshot


# --------------------------------------------------------------------------------------------------------- on nodes
def test_a_hugging_face_home_of_the_nodes_is_looked_in(nodes: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub-home"
    snapshot = cached(hub, LLAMA.repo)
    assert find(hf_home=str(hub)) == str(snapshot)
    assert find(hf_home=str(hub), least=6000) is None  # not whole
    main = snapshot.parents[1] / "refs" / "main"
    main.write_text("../../../../etc")
    assert find(hf_home=str(hub)) is None
    main.unlink()
    assert find(hf_home=str(hub)) is None  # no ref: nobody knows which snapshot is meant


@pytest.mark.parametrize("repo", ["meta-llama/Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B"])
def test_a_cache_under_the_name_that_the_repository_had(nodes: Path, tmp_path: Path, repo: str) -> None:
    snapshot = cached(tmp_path / "shared" / ".cache" / "huggingface", repo)
    assert find(hf_home=f"{tmp_path}/shared/.cache/huggingface") == str(snapshot)


def test_a_revision_of_another_shape_is_not_the_model(nodes: Path, tmp_path: Path) -> None:
    """The first upload of 405B has twice the KV heads: its plan would be wrong."""
    source = ModelSource("llama-3.1-405b-instruct", "hub", "meta-llama/Llama-3.1-405B-Instruct")
    cached(tmp_path / "hub", "meta-llama/Meta-Llama-3.1-405B-Instruct", FIRST_UPLOAD)
    assert find(source, hf_home=str(tmp_path / "hub")) is None


@pytest.mark.parametrize("name", ["Llama-3.1-70B", "meta-llama/Llama-3.1-70B", "Meta-Llama-3.1-70B", "llama-3.1-70b"])
def test_a_folder_of_models_by_any_name(nodes: Path, tmp_path: Path, name: str) -> None:
    folder = weights(tmp_path / "models" / name)
    assert find(models=str(tmp_path / "models")) == str(folder)


def test_what_was_pulled_elsewhere_is_found_while_it_is_there(nodes: Path, tmp_path: Path) -> None:
    folder = weights(tmp_path / "elsewhere" / "70b")
    assert find() is None
    remember(LLAMA, str(folder), ["b", "c"], 5000)
    remember(LLAMA, str(tmp_path / "never"), ["a"], 5000)
    assert find() == str(folder)
    assert find(ModelSource("other", "hub", "owner/other")) is None
    with places._memory().open("a") as file:
        file.write('not JSON\n{"repo": 3}\n')
    assert find() == str(folder)
    shutil.rmtree(folder)
    assert find() is None


def test_a_node_that_cannot_be_asked_is_no_node_without_the_model(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nodes / "b" / "down").touch()
    with pytest.raises(UnreachableError, match="b cannot be reached"):
        find()
    (nodes / "b" / "down").unlink()
    facts = PathFacts(True, size_bytes=10, whole=False)
    with pytest.raises(DataError, match="could not list /models/x in time"):
        places._size("b", "/models/x", facts, 4000)
    assert places._size("b", "/models/x", facts, 5) == 10


def test_the_doctor_looks_in_the_same_places(clean_home: Path) -> None:
    storage = Storage(models="/shared/models", hf_home="/shared/hf")
    paths = model_paths(Question(hosts=("a", "b"), model="llama-3.1-70b", storage=storage))
    assert paths[0] == "/shared/models/meta-llama/Llama-3.1-70B"
    assert {"/shared/models/Llama-3.1-70B", "/shared/hf/hub/models--meta-llama--Meta-Llama-3.1-70B/snapshots"} <= {
        *paths
    }
    assert model_paths(Question(hosts=("a",), model="/data/model")) == ("/data/model",)


def test_a_home_that_a_shell_wrote_for_the_users_is_the_hosts(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--to ~/shared/405b` on a laptop: the hosts have no such home."""
    assert nodes.is_dir()
    monkeypatch.setenv("HOME", "/nobody/ann")
    assert _of_hosts("/nobody/ann/shared/405b", ("a", "b"), Ssh()) == "~/shared/405b"
    assert _of_hosts("/data/405b", ("a", "b"), Ssh()) == "/data/405b"
    monkeypatch.setenv("HOME", str(nodes))  # a home that the hosts have as well
    assert _of_hosts(f"{nodes}/shared/405b", ("a", "b"), Ssh()) == f"{nodes}/shared/405b"


# ----------------------------------------------------------------------------------------------------- this machine
@pytest.mark.parametrize("name", ["Llama-3.1-70B", "Meta-Llama-3.1-70B", "llama-3.1-70b"])
@pytest.mark.parametrize("asked", ["llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B"])
def test_a_catalogue_name_in_a_folder_of_models_here(clean_home: Path, tmp_path: Path, name: str, asked: str) -> None:
    """As Kempner's cluster has it on storage that the login node sees; the name stays the catalogue's."""
    folder = weights(tmp_path / name)
    source = located(asked, Storage(models=str(tmp_path)))
    assert (source.name, source.path) == ("llama-3.1-70b", str(folder))
    assert located(asked).path == ""


def test_a_name_that_no_catalogue_has_in_a_folder_of_models(clean_home: Path, tmp_path: Path) -> None:
    folder = weights(tmp_path / "tiny")
    storage = Storage(models=str(tmp_path))
    for named in ("tiny", "owner/tiny"):
        assert located(named, storage) == ModelSource("tiny", "folder", path=str(folder))
    for other in ("owner/big", "x/y"):
        assert located(other, storage).path == ""


@pytest.fixture
def hub(corral: Corral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The tiny model as a repository, and a home and hub that this process and its commands share."""
    with FakeHub({"owner/tiny": corral.model}) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield made


def sent(hub: FakeHub) -> int:
    return hub.served.get("model.safetensors", 0)


def test_what_was_pulled_to_a_folder_here_is_served_from_there(corral: Corral, hub: FakeHub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    done = corral("pull", "owner/tiny", "--to", str(tmp_path / "disk" / "tiny"), **env)
    assert done.code == 0, done.err
    once = sent(hub)
    assert once >= (corral.model / "model.safetensors").stat().st_size
    spec = corral("up", "owner/tiny", "--dry-run", "--json", **env)
    assert spec.code == 0, spec.err
    assert spec.json()["model_path"] == str(tmp_path / "disk" / "tiny")
    done = corral("pull", "owner/tiny", "--json", **env)
    assert (done.code, done.json()["folder"]) == (0, str(tmp_path / "disk" / "tiny"))
    plan = corral("plan", "owner/tiny", "--gpus", "1xH100", **env).out
    assert f"the files are in {tmp_path}/disk/tiny".replace(" ", "") in "".join(plan.split())  # it is wrapped
    assert sent(hub) == once

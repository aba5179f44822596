"""`corral models`: what is known, what lies where, what fits; and removing one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from corral.base.errors import ConflictError
from corral.cli.models import command
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from tests.tiny_llama import make_tiny_llama
from tests.unit.conftest import Corral


def cached(home: Path, repo: str) -> Path:
    """A repository as the hub's cache holds it: blobs, a snapshot of links, a reference."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    for number, file in enumerate(sorted(make_tiny_llama(home / "made").iterdir())):
        blob = folder / "blobs" / f"{number:064d}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return folder


def test_the_catalogue_says_what_fits(corral: Corral) -> None:
    here = {row["name"]: row for row in corral("models", "--json").json()}
    assert here["smollm2"]["fits"] == "yes"
    assert here["llama-3.1-405b"]["fits"] == "no"
    eight = {row["name"]: row for row in corral("models", "--gpus", "8xH100", "--json").json()}
    assert eight["llama-3.1-405b"]["fits"] == "no"  # as it is stored, in bf16
    assert eight["llama-3.1-405b-fp8"]["fits"] != "no"
    assert eight["llama-3.1-405b"]["gated"]
    shown = corral("models", "--gpus", "8xH100", "--all").out
    assert "FITS 8xH100" in shown.splitlines()[0]
    assert "812 GB" in shown


def test_a_newcomer_sees_what_fits_once_and_by_size(corral: Corral) -> None:
    told = corral("models", "--gpus", "1xL4").out.splitlines()
    names = [line.split()[0] for line in told[1:-2]]
    assert "qwen3-32b" not in names
    assert "do not fit" in told[-1]
    rows = {row["name"]: row for row in corral("models", "--gpus", "1xL4", "--json").json()}
    sizes = [rows[name]["parameters"] for name in names]
    assert sizes == sorted(sizes)
    families = [rows[name]["family"] for name in names]
    assert len(set(families)) == len(families)
    assert len(rows) > 60


def test_models_are_searched_by_name_and_task(corral: Corral) -> None:
    found = {row["name"] for row in corral("models", "--search", "GPT oss", "--json").json()}
    assert found == {"gpt-oss-20b", "gpt-oss-120b"}
    assert "bge-m3" in corral("models", "--search", "embed").out


def test_what_is_on_disk_is_shown_and_can_be_removed(corral: Corral, tmp_path: Path) -> None:
    folder = cached(tmp_path / "hf", "meta-llama/Llama-3.1-8B")
    other = cached(tmp_path / "hf", "somebody/their-model")
    env = {"HF_HOME": str(tmp_path / "hf")}
    rows = {row["name"]: row for row in json.loads(corral("models", "--json", **env).out)}
    assert rows["llama-3.1-8b"]["path"] == str(folder)
    assert rows["somebody/their-model"]["path"] == str(other)
    assert rows["somebody/their-model"]["bytes"] > 1000
    assert rows["somebody/their-model"]["whole"]
    (next((other / "snapshots").glob("*/*.safetensors"))).unlink()  # as a download leaves it that was ended
    assert "partly downloaded" in next(line for line in corral("models", "--all", **env).out.splitlines()
                                       if line.startswith("somebody/their-model"))  # fmt: skip
    unknown = corral("models", "remove", "their-model", **env)
    assert unknown.code == 3
    assert "somebody/their-model" in unknown.err
    gone = corral("models", "remove", "somebody/their-model", **env)
    assert gone.code == 0, gone.err
    assert not other.exists()
    assert folder.exists()
    assert corral("models", "remove", "meta-llama/Llama-3.1-8B", **env).code == 0  # by its repository, too
    assert sorted(path.name for path in (tmp_path / "hf" / "hub").iterdir()) == []


@pytest.mark.parametrize("served", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B"])
@pytest.mark.parametrize("named", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B"])
def test_a_model_that_is_served_stays_whatever_it_is_called(
    served: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = SimpleNamespace(name="mine", model=served, state=State.READY)
    monkeypatch.setattr(deployments, "statuses", lambda: [status])
    monkeypatch.setattr("corral.cli.models.remove", lambda name: pytest.fail(f"{name} was removed"))
    done = CliRunner().invoke(command, ["remove", named])
    assert isinstance(done.exception, ConflictError)
    assert done.exception.remedy == "Stop it first: corral down mine"

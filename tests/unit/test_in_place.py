"""What nodes see under the path that this machine has is used there; what differs is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from corral.base.errors import CorralError
from corral.base.shell import Completed
from corral.deploy.transfer.in_place import lacking
from corral.node.survey.storage import fingerprint
from corral.plan.hardware.survey import Here
from tests.fake_ssh import make_fake_ssh


class Elsewhere(Here):
    """Hosts that are this machine, with other folders under the paths they are asked for."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders, self.sampled = folders, 0

    def python(self, host: str, source: str, arguments: object = (), *_: object, **__: object) -> Completed:
        asked = json.loads(arguments[0])  # type: ignore[index]
        self.sampled += bool(asked["samples"])
        (path,) = asked["fingerprints"]
        there = self.folders[host]
        found = {path: fingerprint(str(there), asked["samples"])} if there.is_dir() else {}
        said = {"fingerprints": found, "began_s": 1.0, "ended_s": 2.0}
        return Completed((), 0, json.dumps(said), "")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"header" + bytes(200_000) + b"end")
    return folder


def test_the_same_files_are_known_by_their_inodes_and_nothing_is_read(model: Path) -> None:
    hosts = Elsewhere({"a": model, "b": model})
    assert lacking(hosts, ["a", "b"], model) == {}  # type: ignore[arg-type]
    assert hosts.sampled == 0


def test_a_copy_of_its_own_on_a_node_is_as_good(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / ".cache").mkdir()  # what downloads leave beside a model
    (tmp_path / "copy" / ".cache" / "lock").touch()
    hosts = Elsewhere({"a": model, "b": tmp_path / "copy"})
    assert lacking(hosts, ["a", "b"], model) == {}  # type: ignore[arg-type]
    assert hosts.sampled == 1  # only the one whose inodes differ


def test_who_lacks_it_or_has_something_else_is_named(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "tuned")  # the same shape, other weights: names, sizes and header are equal
    with (tmp_path / "tuned" / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"other")
    shutil.copytree(model, tmp_path / "short")
    (tmp_path / "short" / "model.safetensors").write_bytes(b"header")
    places = {"same": model, "none": tmp_path / "none", "tuned": tmp_path / "tuned", "short": tmp_path / "short"}
    found = lacking(Elsewhere(places), list(places), model)  # type: ignore[arg-type]
    assert found == {
        "none": "does not have it there",
        "short": "has other files there",
        "tuned": "has files of the same names and sizes there that hold something else",
    }


def test_a_dangling_link_is_not_a_file_that_can_be_served(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "linked")
    (tmp_path / "linked" / "model.safetensors").unlink()
    (tmp_path / "linked" / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    found = lacking(Elsewhere({"a": tmp_path / "linked"}), ["a"], model)  # type: ignore[arg-type]
    assert found == {"a": "cannot read model.safetensors there"}


def test_a_host_that_does_not_answer_is_an_error_not_a_lack(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from corral.base.ssh import Ssh

    monkeypatch.setenv("CORRAL_SSH", make_fake_ssh(tmp_path / "hosts", ["a"]))
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    assert lacking(Ssh(), ["a"], model) == {}
    (tmp_path / "hosts" / "a" / "down").touch()
    with pytest.raises(CorralError, match="cannot be reached"):
        lacking(Ssh(), ["a"], model)

"""Real Apptainer, the real agent and a stand-in engine in a .sif file: started, watched, stopped, lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.node.processes import process_table
from tests import testbed
from tests.cluster.bed import FILES, SECRET, Bed, commands_of_everybody
from tests.testbed.containers import build_sif
from tests.tiny_llama import make_tiny_llama
from tests.until import until

pytestmark = pytest.mark.skipif(bool(testbed.missing("apptainer")), reason=testbed.missing("apptainer"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "it's a.sif"
    build_sif(path, FILES)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def bed(image: Path, model: Path, clean_home: Path) -> Iterator[Bed]:
    passed_on = {"APPTAINERENV_HF_TOKEN": SECRET}  # as some users have it in their profile
    env = {**os.environ, "PATH": testbed.PATH, "HF_TOKEN": SECRET, **passed_on}
    made = Bed(clean_home, model, env, ("--runtime", "apptainer"), str(image))
    yield made
    made.close()


def engines(bed: Bed) -> list[int]:
    """Engines of this test: a stand-in that was told of this home."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, environment = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if b"/stub_engine.py" in words.split(b"\0") and str(bed.home).encode() in environment:
            found.append(int(folder.name))
    return found


def test_an_image_from_up_to_down(bed: Bed, tmp_path: Path) -> None:
    adapter = tmp_path / 'an "adapter", mine'
    adapter.write_text("weights")
    told = bed.up("it's one", "--", "--enable-lora", "--lora-modules", f"mine={adapter}")
    assert told["state"] == "ready"
    assert told["engine"] == f"apptainer {bed.image}"
    assert told["first_answer"] == "Paris."
    (engine,) = engines(bed)
    inside = Path(f"/proc/{engine}")
    environment = dict(word.split(b"=", 1) for word in (inside / "environ").read_bytes().split(b"\0") if b"=" in word)
    assert environment[b"APPTAINER_CONTAINER"] == bed.image.encode()
    assert environment[b"TMPDIR"] == b"/tmp"
    key = (bed.folder("it%27s one") / "key").read_text().strip()
    for secret in (SECRET, key):
        assert not any(secret.encode() in value for value in environment.values())
        assert not any(secret.encode() in command for command in commands_of_everybody())
    assert Path(f"{inside}/root{adapter}").read_text() == "weights"
    (inside / "root" / "tmp" / "mine").write_text("x")  # /tmp inside is the launch's own, which ends with it
    assert not Path("/tmp/mine").exists()
    assert not (inside / "root" / "root" / ".local").exists()
    bed.corral("down", "it's one")
    assert not inside.exists()
    assert bed.image not in Path("/proc/mounts").read_text().replace("\\040", " ")


def test_an_engine_that_dies_inside_is_told(bed: Bed) -> None:
    bed.up("one", options="die-after-ready=3")
    assert bed.ended("one")["reason"] == "engine_exited"
    assert not engines(bed)


@pytest.mark.parametrize("victims", ["worker", "supervisor", "both"])
def test_an_engine_does_not_outlive_its_agent(bed: Bed, victims: str) -> None:
    bed.up("one")
    assert engines(bed)
    supervisor = bed.pid_of_agent("one")
    (worker,) = [pid for pid, row in process_table().items() if row[0] == supervisor]
    for pid in {"worker": [worker], "supervisor": [supervisor], "both": [supervisor, worker]}[victims]:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not engines(bed))
    assert bed.ended("one")["reason"] == "agent_killed"


def test_it_is_restarted(bed: Bed) -> None:
    bed.up("one", "--restart", "2")
    (first,) = engines(bed)
    os.kill(first, signal.SIGKILL)
    until(lambda: bed.status("one")["restarts"] == 1 and bed.status("one")["state"] == "ready")
    (second,) = engines(bed)
    assert second != first


def test_an_image_that_is_not_there(bed: Bed) -> None:
    told = bed.up("one", code=8, image="/no/such/image.sif")["error"]
    assert told["reason"] == "no_image"
    assert "/no/such/image.sif" in told["message"]


def test_a_file_that_is_no_image(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "text.sif").write_text("not an image\n" * 1000)
    told = bed.up("one", code=8, image=str(tmp_path / "text.sif"))["error"]
    assert told["reason"] == "no_image"
    assert "text.sif" in told["message"]


def test_an_image_without_vllm(bed: Bed, tmp_path: Path) -> None:
    build_sif(tmp_path / "empty.sif", {})
    told = bed.up("one", code=8, image=str(tmp_path / "empty.sif"))["error"]
    assert told["reason"] == "engine_broken"
    assert "the image has no command vllm" in told["message"]


def test_a_folder_that_is_not_there_to_mount(bed: Bed) -> None:
    told = bed.up("one", "--runtime-option", "mounts=/no/such/folder", code=8)["error"]
    assert told["reason"] == "bad_argument"
    assert "/no/such/folder" in told["message"]


def test_a_word_that_apptainer_does_not_know(bed: Bed) -> None:
    told = bed.up("one", "--runtime-option", "args=--no-such-word", code=8)["error"]
    assert told["reason"] == "bad_argument"
    assert "--no-such-word" in told["message"]

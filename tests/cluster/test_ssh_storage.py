"""Models and engines on nodes over real sshd: what is copied, what is found, and where `up` could not write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.ssh_bench import NODES, Bench
from tests.testbed import missing
from tests.tiny_llama import make_tiny_llama

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def test_nodes_that_share_nothing_get_the_engine_and_the_model(bench: Bench) -> None:
    local = bench.hosts.folder.parent / "local"  # another empty disk on every node
    profiles = Path(bench.env["HOME"]) / ".config/corral/profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    text = f'target = "ssh"\n[ssh]\nhosts = {json.dumps(NODES)}\n[storage]\nhome = "{local}"\n'
    (profiles / "apart.toml").write_text(text)
    model = make_tiny_llama(bench.hosts.folder.parent / "mine" / "tiny")  # where only this machine sees it
    for turn in ("copied", "found"):
        done = bench.run("up", str(model), "--name", "apart", "--on", "apart", "--json")
        assert done.returncode == 0, f"{turn}: {done.stderr}"
        launch = json.loads((Path(bench.env["CORRAL_HOME"]) / "deployments/apart/launch.json").read_text())
        assert all(rank["argv"][0].startswith(f"{local}/engines/") for rank in launch["ranks"])
        assert launch["model_path"] == f"{local}/models/tiny"
        for host in NODES:
            there = bench.hosts.exec(host, ["ls", f"{local}/models/tiny"]).stdout.split()
            assert {path.name for path in bench.model.iterdir()} <= set(there)
        assert bench.run("down", "apart").returncode == 0
        bench.nothing_left()


def test_a_model_on_shared_storage_is_served_from_there(bench: Bench) -> None:
    """Whatever Corral's home on the nodes is: nothing is copied that every node sees at the same path."""
    local, mine = (bench.hosts.folder.parent / name for name in ("local", "mine"))
    profiles = Path(bench.env["HOME"]) / ".config/corral/profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    text = f'target = "ssh"\n[ssh]\nhosts = {json.dumps(NODES)}\n[storage]\nhome = "{local}"\n'
    (profiles / "shelf.toml").write_text(text)

    def served(model: Path) -> str:
        done = bench.run("up", str(model), "--name", "shelf", "--on", "shelf", "--json")
        assert done.returncode == 0, done.stderr
        launch = json.loads((Path(bench.env["CORRAL_HOME"]) / "deployments/shelf/launch.json").read_text())
        assert bench.run("down", "shelf").returncode == 0
        return str(launch["model_path"])

    seen = make_tiny_llama(bench.hosts.folder.parent / "seen")
    assert served(seen) == str(seen)
    for host in NODES:
        assert "seen" not in bench.hosts.exec(host, ["sh", "-c", f"ls {local}/models || true"]).stdout.split()
    own = make_tiny_llama(mine / "own")  # each node its own copy: the same path, other inodes
    for host in NODES:
        bench.hosts.exec(host, ["cp", "-r", str(seen), f"{mine}/own"])
    assert served(own) == str(own)
    weights = next(path.name for path in own.glob("*.safetensors"))  # on one node of the same size, but another's
    size = (own / weights).stat().st_size
    change = f"printf other | dd of={mine}/own/{weights} bs=1 conv=notrunc seek={size - 5}"
    bench.hosts.exec("node2", ["sh", "-c", change])
    assert served(own) == f"{local}/models/own"
    bench.hosts.exec("node2", ["rm", "-r", f"{mine}/own", f"{local}/models/own"])  # on one node not at all
    assert served(own) == f"{local}/models/own"


def test_a_hugging_face_home_on_shared_storage_needs_no_copy(bench: Bench) -> None:
    """As Lambda's cluster has it."""
    shared = bench.hosts.folder.parent / "shared-hub"
    repository = shared / "hub" / "models--someone--tiny-llama"
    snapshot = repository / "snapshots" / ("0" * 40)
    made = make_tiny_llama(repository / "made")
    (repository / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for path in made.iterdir():  # as the hub's cache has it: links to where the files are
        path.rename(repository / "blobs" / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    made.rmdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    profiles = Path(bench.env["HOME"]) / ".config/corral/profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    local = bench.hosts.folder.parent / "local"
    text = f'target = "ssh"\n[ssh]\nhosts = {json.dumps(NODES)}\n[storage]\nhome = "{local}"\nhf_home = "{shared}"\n'
    (profiles / "hub.toml").write_text(text)
    done = bench.run("up", "someone/tiny-llama", "--name", "hub", "--on", "hub", "--json", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    launch = json.loads((Path(bench.env["CORRAL_HOME"]) / "deployments/hub/launch.json").read_text())
    assert launch["model_path"] == str(snapshot)
    assert bench.run("down", "hub").returncode == 0
    bench.nothing_left()


def test_doctor_tries_to_write_where_up_will(bench: Bench) -> None:
    """A home that is full, or not a folder, on one node: `corral up` would fail there, and the doctor says so."""
    nodes = bench.home / "nodes"
    nodes.mkdir(exist_ok=True)
    bench.hosts.limit_disk("node2", nodes, 4096)
    bench.hosts.exec("node2", ["sh", "-c", f"head -c 4096 /dev/zero >{nodes}/full"])
    try:
        done = bench.run("doctor", "--hosts", ",".join(NODES), "--quick", "--json")
        assert bench.hosts.exec("node2", ["ls", "-A", str(nodes)]).stdout.split() == ["full"]
    finally:
        bench.hosts.exec("node2", ["umount", str(nodes)])
    assert done.returncode == 8, done.stdout
    wrong = [one for one in json.loads(done.stdout)["findings"] if one["level"] == "fatal"]
    assert [(one["host"], one["what"]) for one in wrong] == [("node2", "folders")]
    assert wrong[0]["text"] == f"{bench.home} cannot be written to: {nodes}: No space left on device"
    good = bench.run("doctor", "--hosts", ",".join(NODES), "--quick").stdout
    assert f"{bench.home} and /tmp can be written to" in " ".join(good.split())  # lines are wrapped

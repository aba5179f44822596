"""Several nodes over real sshd, with a stand-in engine: what is started, seen, lost, named and cleaned up.

The engine is a stand-in so that faults take seconds; real vLLM over the same hosts is in `test_multi_node.py`.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.cluster.ssh_bench import NODES, Bench, open_bench
from tests.testbed import missing
from tests.tiny_llama import make_tiny_llama
from tests.until import LIMIT_S, polled, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_bench(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def ready(bench: Bench, request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name[:60]
    done = bench.up(name, *getattr(request, "param", ()))
    assert done.returncode == 0, done.stderr
    yield name
    bench.mend()
    assert bench.run("down", name).returncode == 0
    bench.nothing_left()


def noticed(bench: Bench, name: str, since: float) -> Any:
    """The failure, and how long the agents took to say so: printed, and bounded by the promise of 15 s."""
    found = bench.wait(name, lambda status: status["state"] == "failed")
    print(f"\nnoticed after {found['since_s'] - since:.1f} s: {found['text']}")
    return found


def test_from_nothing_to_an_answer_and_back(bench: Bench) -> None:
    done = bench.up("first")
    assert done.returncode == 0, done.stderr
    assert "answered  Paris." in done.stdout
    assert "link native" in done.stderr
    found = bench.status("first")
    assert found["state"] == "ready"
    assert found["endpoint"]["base_url"].startswith("http://127.0.0.1:")
    launch = json.loads((Path(bench.env["CORRAL_HOME"]) / "deployments/first/launch.json").read_text())
    head, worker = launch["ranks"]
    assert head["env"]["VLLM_HOST_IP"] == bench.hosts.address("node1")
    assert worker["env"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "--headless" in worker["argv"]
    assert "--headless" not in head["argv"]
    key = (Path(bench.env["CORRAL_HOME"]) / "deployments/first/key").read_text().strip()
    for host in NODES:  # the key is a file, and stands in no process list
        assert not any(key in line for _, line in bench.hosts.processes(host))
    events = bench.run("events", "first").stdout
    assert "rank 1" in events
    assert bench.run("logs", "first", "--rank", "1").stdout.count("\n") > 3
    assert bench.run("complete", "--deployment", "first", "Hello").returncode in (0, 2, 10)  # through the tunnel
    assert bench.run("down", "first").returncode == 0
    bench.nothing_left()
    assert not list((Path(bench.env["CORRAL_HOME"]) / "nodes").glob("*"))  # no key stays behind


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


def test_no_stranger_gets_the_tunnels_port_while_ssh_is_away(bench: Bench, ready: str) -> None:
    folder = Path(bench.env["CORRAL_HOME"]) / "deployments" / ready
    port = int(bench.status(ready)["endpoint"]["base_url"].rpartition(":")[2].partition("/")[0])
    holder = json.loads((folder / "tunnel.json").read_text())["holder"]["pid"]
    thief = (
        "import os, socket, sys\n"
        "os.setgid(65534)\n"
        "os.setuid(65534)\n"
        "listener = socket.socket()\n"
        "listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "listener.bind(('127.0.0.1', int(sys.argv[1])))\n"
        "listener.listen()\n"
    )
    for _ in range(4):
        found = subprocess.run(["pgrep", "-P", str(holder)], capture_output=True, text=True).stdout.split()
        for pid in found:  # the forwarding ssh: it is started again
            os.kill(int(pid), signal.SIGKILL)
        done = subprocess.run([sys.executable, "-c", thief, str(port)], capture_output=True, text=True)
        assert "Address already in use" in done.stderr
    ask = ("complete", "--deployment", ready, "Hello")
    assert polled(lambda: bench.run(*ask).returncode in (0, 2, 10), LIMIT_S), (folder / "tunnel.log").read_text()
    assert "the connection ended" in (folder / "tunnel.log").read_text()
    assert json.loads((folder / "tunnel.json").read_text())["holder"]["pid"] == holder


def test_exposed_it_answers_on_the_clusters_network_and_only_with_the_key(bench: Bench) -> None:
    done = bench.up("exposed", "--expose", "--json")
    assert done.returncode == 0, done.stderr
    endpoint = json.loads(done.stdout)["endpoint"]
    assert endpoint["base_url"].startswith(f"http://{bench.hosts.address('node1')}:")
    key = Path(endpoint["key_file"]).read_text().strip()
    ask = (
        "import sys, urllib.request, urllib.error\n"
        "request = urllib.request.Request(sys.argv[1] + '/models')\n"
        "key = sys.stdin.read()\n"
        "key and request.add_header('Authorization', 'Bearer ' + key)\n"
        "try: print(urllib.request.urlopen(request, timeout=10).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)"
    )
    for given, expected in ((key, "200"), ("", "401")):
        answer = bench.hosts.exec("head", ["python3", "-c", ask, endpoint["base_url"]], input=given)
        assert answer.stdout.strip() == expected
    assert bench.run("down", "exposed").returncode == 0
    bench.nothing_left()


def test_a_node_without_power_is_named_and_the_rest_taken_down(bench: Bench, ready: str) -> None:
    began = time.time()
    bench.hosts.power_off("node2")
    found = noticed(bench, ready, began)
    assert found["reason"] == "node_lost"
    assert "node2 stopped answering at" in found["text"]
    assert "rank 1 last said" in found["text"]
    assert found["since_s"] - began < 20
    assert not bench.engines("node1")


def test_a_cut_cable_is_named_and_both_sides_end(bench: Bench, ready: str) -> None:
    began = time.time()
    bench.hosts.cut("node2")
    found = noticed(bench, ready, began)
    assert found["reason"] == "node_lost"
    assert "node2" in found["text"]
    until(lambda: not bench.engines("node2"), "the end of a rank that lost its head")


def test_a_lost_head_ends_the_workers(bench: Bench, ready: str) -> None:
    bench.hosts.power_off("node1")
    until(lambda: not bench.engines("node2"), "the end of the workers")
    found = bench.wait(ready, lambda status: status["state"] == "failed")
    assert "the head node1 stopped answering" in found["text"]


def test_a_killed_engine_ends_the_gang_and_is_named(bench: Bench, ready: str) -> None:
    began = time.time()
    for pid in bench.engines("node1"):
        os.kill(pid, signal.SIGKILL)
    found = noticed(bench, ready, began)
    assert found["text"].startswith("rank 0 on node1: ")
    assert not bench.engines("node2")
    states = [json.loads(line) for line in (bench.folder(ready) / "rank0" / "events.jsonl").read_text().splitlines()]
    until(lambda: not list((bench.home / "nodes").glob("*/key")), "the end of the key on the nodes")
    draining = next(one for one in states if one.get("state") == "draining")  # what a look in between shows
    assert draining["reason"] == "engine_exited"
    assert "rank 0 on node1: the engine ended by signal 9" in draining["text"]


def test_a_killed_worker_is_the_cause_not_the_head(bench: Bench, ready: str) -> None:
    began = time.time()
    for pid in bench.engines("node2"):
        os.kill(pid, signal.SIGKILL)
    found = noticed(bench, ready, began)
    events = bench.run("events", ready).stdout
    assert "rank 1 on node2" in events
    assert found["state"] == "failed"
    assert not bench.engines("node1")


def test_killed_agents_end_the_gang(bench: Bench, ready: str) -> None:
    began = time.time()
    for pid in bench.agents("node2"):
        os.kill(pid, signal.SIGKILL)
    found = noticed(bench, ready, began)
    assert "node2" in found["text"]
    assert not bench.engines("node1")


@pytest.mark.parametrize("ready", [("--restart", "2")], indirect=True)
def test_with_restarts_the_gang_comes_back(bench: Bench, ready: str) -> None:
    for pid in bench.engines("node2"):
        os.kill(pid, signal.SIGKILL)
    found = bench.wait(ready, lambda status: status["restarts"] == 1 and status["state"] == "ready")
    assert found["endpoint"]
    assert bench.engines("node1")
    bench.wait(ready, lambda _: bench.engines("node2"))


def test_the_server_outlives_the_command_that_started_it(bench: Bench) -> None:
    process = bench.start("up", str(bench.model), "--name", "orphan", "--hosts", ",".join(NODES),
                          "--env", "STUB_OPTIONS=slow=3")  # fmt: skip
    journal = Path(bench.env["CORRAL_HOME"]) / "deployments/orphan/rank0/agent.json"
    until(journal.exists, "the agent")
    os.killpg(process.pid, signal.SIGKILL)  # with every ssh it had started
    process.communicate()
    done = bench.run("wait", "orphan")
    assert done.returncode == 0, done.stderr
    assert bench.run("down", "orphan").returncode == 0
    bench.nothing_left()


def test_a_down_that_cannot_reach_a_node_names_it_and_works_later(bench: Bench) -> None:
    assert bench.up("cutoff").returncode == 0
    bench.hosts.cut("node2")
    try:
        done = bench.run("down", "cutoff")
        assert done.returncode == 9
        assert "node2" in done.stderr
    finally:
        bench.hosts.heal("node2")
    assert bench.run("down", "cutoff").returncode == 0
    bench.nothing_left()


def test_a_wrong_interface_is_refused_with_those_there_are(bench: Bench) -> None:
    done = bench.up("wrong", "--interface", "eth9")
    assert done.returncode != 0
    assert "eth9" in done.stderr
    assert "eth0" in done.stderr
    assert not bench.engines("node1")


def test_a_taken_port_is_named(bench: Bench) -> None:
    listener = (
        "import socket,time; s=socket.create_server(('127.0.0.1', 18000)); print('', flush=True); time.sleep(99)"
    )
    with bench.hosts.popen("node1", ["python3", "-c", listener], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        holder.stdout.readline()
        try:
            done = bench.up("taken", "--port", "18000")
        finally:
            for pid, line in bench.hosts.processes("node1"):
                if "create_server" in line:
                    os.kill(pid, signal.SIGKILL)
    assert done.returncode == 4, done.stderr
    assert "18000" in done.stderr
    assert "node1" in done.stderr


def test_different_versions_are_named_before_anything_starts(bench: Bench) -> None:
    bench.hosts.exec("node2", ["sh", "-c", "echo 0.31.0 > /run/stub_version"])
    try:
        done = bench.up("skewed")
    finally:
        bench.hosts.exec("node2", ["rm", "/run/stub_version"])
    assert done.returncode == 4, done.stderr
    assert "node1 has 0.32.0, node2 has 0.31.0" in done.stderr
    assert not bench.engines("node1")


def test_a_full_disk_on_one_node_stops_the_start_everywhere(bench: Bench) -> None:
    folder = Path(bench.env["CORRAL_HOME"]) / "nodes"
    folder.mkdir(exist_ok=True)
    bench.hosts.limit_disk("node2", folder, 4096)
    try:
        done = bench.up("full")
        assert done.returncode == 8, done.stderr
        assert "node2" in done.stderr
        assert "No space left" in done.stderr
        bench.nothing_left()
        assert not bench.hosts.exec("node2", ["ls", "-A", str(folder)]).stdout  # neither files nor a key
        assert bench.run("down", "full").returncode == 0  # which knows it
    finally:
        bench.hosts.exec("node2", ["umount", str(folder)])


def test_an_engine_that_ends_at_the_start_is_explained_by_its_rank(bench: Bench) -> None:
    done = bench.up("bad", "--env", "STUB_OPTIONS=slow=20 worker-exit=1")
    assert done.returncode == 8
    assert "rank 1 on node2" in bench.run("events", "bad").stdout
    bench.nothing_left()


def test_a_changed_host_key_is_refused(bench: Bench) -> None:
    subprocess.run([*bench.hosts.ssh_command, "-O", "exit", "node2"], capture_output=True)
    bench.hosts.change_host_key("node2")
    try:
        with TemporaryDirectory() as fresh:  # no connection of earlier tests is shared there
            arguments = ("up", str(bench.model), "--name", "key", "--hosts", "node1,node2")
            done = bench.run(*arguments, XDG_RUNTIME_DIR=fresh)
    finally:
        bench.hosts.trust("node2")
    assert done.returncode == 6, done.stderr
    assert "host key" in done.stderr
    assert "node2" in done.stderr


def test_two_that_load_on_one_head_at_the_same_time_get_two_ports(bench: Bench) -> None:
    """The port is taken among Corral's own from the start, not from the moment at which an engine listens."""
    gate = bench.home.parent / "gate"
    words = ("--env", f"STUB_OPTIONS=after={gate}", "--json")
    pair = [
        bench.start("up", str(bench.model), "--name", name, "--hosts", "node1", *words) for name in ("one", "two")
    ]
    until(lambda: len(bench.engines("node1")) == 2, "two engines that load")
    gate.touch()
    told = [json.loads(process.communicate(timeout=120)[0]) for process in pair]
    assert [one["state"] for one in told] == ["ready", "ready"]
    urls = {one["endpoint"]["base_url"] for one in told}
    served = {json.loads((bench.folder(name) / "launch.json").read_text())["ranks"][0]["serve"]["port"]
              for name in ("one", "two")}  # fmt: skip
    assert len(urls) == len(served) == 2
    gate.unlink()
    assert bench.run("down", "one", "two").returncode == 0
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


def test_a_tunnel_through_another_machine_follows_the_server_and_says_when_it_is_gone(bench: Bench) -> None:
    corral = ["env", f"CORRAL_HOME={bench.home}", sys.executable, "-m", "corral"]
    endpoints = {}
    for name in ("far", "moved"):
        up = [*corral, "up", str(bench.model), "--name", name, "--served-name", name, "--json"]
        endpoints[name] = json.loads(bench.hosts.exec("head", up, timeout=120).stdout)["endpoint"]
    tunnel = bench.start("tunnel", "far", "--through", "head", "--corral", shlex.join(corral))
    assert tunnel.stdout
    assert tunnel.stderr
    try:
        url = tunnel.stdout.readline().strip().partition("=")[2]
        key = Path(tunnel.stdout.readline().partition("cat ")[2].strip('\n")'))
        until(lambda: models_at(url, key) == ["far"], "an answer through the tunnel")
        endpoint = bench.folder("far") / "endpoint.json"
        before = endpoint.read_text()
        endpoint.write_text(json.dumps(endpoints["moved"]))  # as the head of a job does that starts elsewhere
        said = next(line for line in tunnel.stderr if "the tunnel leads there" in line)
        assert endpoints["moved"]["base_url"] in said
        until(lambda: models_at(url, key) == ["moved"], "an answer from where it is now")
        endpoint.write_text(before)
        bench.hosts.exec("head", [*corral, "down", "--purge", "far", "moved"])
        until(lambda: not models_at(url, key) and tunnel.poll() is not None, "the end of the tunnel")
        assert tunnel.returncode == 3
        assert "the server is gone: " in tunnel.stderr.read()
    finally:
        tunnel.kill()
        tunnel.communicate()


def models_at(url: str, key_file: Path) -> list[str]:
    """Who answers there."""
    key = key_file.read_text().strip()
    request = urllib.request.Request(url + "/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return [one["id"] for one in json.load(answer)["data"]]
    except (OSError, http.client.HTTPException):
        return []


def test_a_head_whose_link_was_cut_blames_itself_and_is_waited_for_in_words(bench: Bench, ready: str) -> None:
    bench.hosts.cut("node1")
    looked = bench.run("status", ready)
    assert "waiting for node1" in looked.stderr
    until(lambda: not bench.engines("node2") and not bench.engines("node1"), "the end of both ranks")
    bench.hosts.heal("node1")
    found = bench.wait(ready, lambda status: "the link of node1 was cut" in status["text"])
    assert found["reason"] == "node_lost"


def test_down_finds_the_hosts_of_a_record_that_cannot_be_read(bench: Bench) -> None:
    assert bench.up("torn").returncode == 0
    record = bench.folder("torn") / "deployment.json"
    record.write_bytes(record.read_bytes()[:40])
    done = bench.run("down", "torn")
    assert done.returncode == 0, done.stderr
    bench.nothing_left()
    assert not list((bench.home / "nodes").glob("torn-*"))

"""Several nodes over real sshd, with a stand-in engine: what is started, used and cleaned up.

The engine is a stand-in so that a start takes seconds; real vLLM over the same hosts is in `test_multi_node.py`.
What is lost, refused and stored has files of its own beside this one: a file is what one worker does alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster.ssh_bench import NODES, Bench
from tests.testbed import missing
from tests.until import LIMIT_S, polled, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


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
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself meanwhile
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


def test_the_server_outlives_the_command_that_started_it(bench: Bench) -> None:
    process = bench.start("up", str(bench.model), "--name", "orphan", "--hosts", ",".join(NODES),
                          "--env", "STUB_OPTIONS=slow=3")  # fmt: skip
    journal = Path(bench.env["CORRAL_HOME"]) / "deployments/orphan/rank0/agent.json"
    until(journal.exists, "the agent")
    os.killpg(process.pid, signal.SIGKILL)  # with every ssh it had started
    process.communicate()
    promised = urlsplit(json.loads((bench.folder("orphan") / "endpoint.json").read_text())["base_url"]).port
    try:
        with socket.create_server(("127.0.0.1", promised)):  # nobody held it for the tunnel any more
            done = bench.run("wait", "orphan", "--json")
            assert done.returncode == 0, done.stderr
            told = json.loads(done.stdout)["endpoint"]["base_url"]
            assert urlsplit(told).port != promised
            assert f"The endpoint is {told} now." in (bench.folder("orphan") / "tunnel.log").read_text()
            assert bench.run("complete", "--deployment", "orphan", "Hello").returncode == 0
    finally:
        assert bench.run("down", "orphan").returncode == 0
    bench.nothing_left()


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


def test_down_right_after_up_was_killed_leaves_nothing_that_comes_later(bench: Bench) -> None:
    """The ssh clients of a killed `up` go on: what they start while `down` looks, or after it, must end as well."""
    with bench.start("up", str(bench.model), "--name", "killed", "--hosts", ",".join(NODES)) as up:
        until((bench.folder("killed") / "started").exists)
        os.kill(up.pid, signal.SIGKILL)
    done = bench.run("down", "killed")
    assert done.returncode == 0, done.stderr
    until(lambda: not clients_of(up.pid), "the end of what `up` had begun")
    bench.nothing_left()
    assert bench.status("killed")["state"] == "stopped"


def clients_of(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(stat.parent.name))
    return found


def test_doctor_lists_what_nobody_owns_on_the_nodes(bench: Bench, ready: str) -> None:
    lost = bench.hosts.popen("node2", ["sleep", "600"], env={"CORRAL_LAUNCH": "f" * 16})
    try:
        until(lambda: any(line == "sleep 600" for _, line in bench.hosts.processes("node2")))
        report = json.loads(bench.run("doctor", "--orphans", "--json").stdout)
        on_nodes = [(one["host"], one["what"], one["text"]) for one in report["findings"] if one["host"] in NODES]
        ((host, what, text),) = [one for one in on_nodes if one[1] == "orphan"]
        assert (host, what) == ("node2", "orphan")
        assert "(sleep 600) are of launch ffffffffffffffff" in text
        assert {node["host"] for node in report["nodes"]} >= set(NODES)
        assert all(node["launches"] for node in report["nodes"] if node["host"] in NODES)  # those of the deployment
    finally:
        for pid, line in bench.hosts.processes("node2"):
            if line == "sleep 600":
                os.kill(pid, signal.SIGKILL)
        lost.kill()
        lost.wait()

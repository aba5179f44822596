"""Two nodes over real sshd of which one is lost, or what runs there killed: who is named, and what is left."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.cluster.ssh_bench import Bench
from tests.testbed import missing
from tests.until import until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def test_a_node_without_power_is_named_and_the_rest_taken_down(bench: Bench, ready: str) -> None:
    bench.hosts.power_off("node2")
    found = bench.failed(ready)
    assert found["reason"] == "node_lost"
    assert "node2 stopped answering at" in found["text"]
    assert "rank 1 last said" in found["text"]
    assert not bench.engines("node1")


def test_a_cut_cable_is_named_and_both_sides_end(bench: Bench, ready: str) -> None:
    bench.hosts.cut("node2")
    found = bench.failed(ready)
    assert found["reason"] == "node_lost"
    assert "node2" in found["text"]
    until(lambda: not bench.engines("node2"), "the end of a rank that lost its head")


def test_a_lost_head_ends_the_workers(bench: Bench, ready: str) -> None:
    bench.hosts.power_off("node1")
    until(lambda: not bench.engines("node2"), "the end of the workers")
    found = bench.wait(ready, lambda status: status["state"] == "failed")
    assert "the head node1 stopped answering" in found["text"]


def test_a_killed_engine_ends_the_gang_and_is_named(bench: Bench, ready: str) -> None:
    for pid in bench.engines("node1"):
        os.kill(pid, signal.SIGKILL)
    found = bench.failed(ready)
    assert found["text"].startswith("rank 0 on node1: ")
    until(lambda: not bench.engines("node2"), "the end of the others")  # a failure is told before they are gone
    states = [json.loads(line) for line in (bench.folder(ready) / "rank0" / "events.jsonl").read_text().splitlines()]
    until(lambda: not list((bench.home / "nodes").glob("*/key")), "the end of the key on the nodes")
    draining = next(one for one in states if one.get("state") == "draining")  # what a look in between shows
    assert draining["reason"] == "engine_exited"
    assert "rank 0 on node1: the engine ended by signal 9" in draining["text"]


def test_a_killed_worker_is_the_cause_not_the_head(bench: Bench, ready: str) -> None:
    for pid in bench.engines("node2"):
        os.kill(pid, signal.SIGKILL)
    found = bench.failed(ready)
    events = bench.run("events", ready).stdout
    assert "rank 1 on node2" in events
    assert found["state"] == "failed"
    assert not bench.engines("node1")


def test_killed_agents_end_the_gang(bench: Bench, ready: str) -> None:
    for pid in bench.agents("node2"):
        os.kill(pid, signal.SIGKILL)
    found = bench.failed(ready)
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


def test_a_head_whose_link_was_cut_blames_itself_and_is_shown_as_it_was_last_read(bench: Bench, ready: str) -> None:
    bench.hosts.cut("node1")
    looked = bench.run("status", ready)
    assert "unknown" in looked.stdout
    assert "ready" in next(line for line in looked.stdout.splitlines() if line.startswith("last read"))
    assert "node1" in next(line for line in looked.stdout.splitlines() if line.startswith("because"))
    until(lambda: not bench.engines("node2") and not bench.engines("node1"), "the end of both ranks")
    bench.hosts.heal("node1")
    found = bench.wait(ready, lambda status: "the link of node1 was cut" in status["text"])
    assert found["reason"] == "node_lost"


def test_a_down_that_cannot_reach_a_node_names_it_and_works_later(bench: Bench) -> None:
    assert bench.up("cutoff").returncode == 0
    bench.hosts.cut("node2")
    try:
        done = bench.run("down", "cutoff")
        assert done.returncode == 9
        assert "node2" in done.stderr
    finally:
        bench.hosts.heal("node2")
    until(lambda: bench.run("down", "cutoff").returncode == 0, "its end")  # a link needs a moment to be back
    bench.nothing_left()

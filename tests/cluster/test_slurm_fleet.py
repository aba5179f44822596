"""A fleet on a real controller: jobs come and go with the load, and no request fails (a day: `fleet_day.py`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from corral.client.client import run
from tests.cluster.fleet_day import PER_MEMBER, Load, decisions, open_cluster, start_fleet, steps, wanted
from tests.cluster.test_slurm_handover import SMALL, Cluster
from tests.testbed import missing
from tests.until import until

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))
MOST = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with open_cluster(tmp_path_factory.mktemp("fleet")) as found:
        yield found


def test_jobs_follow_the_load_and_no_request_fails(cluster: Cluster) -> None:
    endpoint = start_fleet(cluster, f"1..{MOST}")
    try:
        load = Load(cluster, steps((18.0, 1.8 * PER_MEMBER)))
        run(load.run(endpoint))
        assert load.failures == []
        assert len(load.waits) == len(load.due)
        assert 2 <= load.most_jobs <= MOST
        until(lambda: wanted(cluster) == 1, "members are handed back", 240)
        told = decisions(cluster)
    finally:
        cluster.corral("down", "day")  # its job is on one of the two nodes
    grown = [event["wanted"] for event in told if "would wait" in event["text"]]
    assert grown
    assert max(grown) <= MOST
    assert "enough for" in told[-1]["text"]


def test_the_keeper_lives_in_the_jobs_and_moves_on(cluster: Cluster) -> None:
    """The login host's keeper ends when a job's can work; when that job is lost, the other one's goes on."""
    words = (
        "--name",
        "inside",
        "--replicas",
        "2",
        "--keeper",
        "job",
        *SMALL,
        "--slurm",
        "exclusive=true",
        "--no-wait",
    )
    done = cluster.corral("up", str(cluster.model), *words)
    assert done.returncode == 0, done.stderr
    lock = cluster.home / "fleets" / "inside" / "keeper.lock"

    def keeper(*others: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            host = str(json.loads(lock.read_text())["host"])
            return "" if host in others else host
        return ""

    off = ""
    try:
        first = until(lambda: keeper("login"), "a keeper in a job", 240)
        assert json.loads(cluster.corral("status", "inside", "--json").stdout)["kept"] is True
        until(
            lambda: json.loads(cluster.corral("status", "inside", "--json").stdout)["ready"] == 2, "two members", 240
        )
        cluster.hosts.power_off(first)
        off = first
        second = until(lambda: keeper("login", first), "the keeper of the other job", 240)
        assert second != first
    finally:
        if off:
            cluster.hosts.power_on(off)
        cluster.corral("down", "inside")

"""How ranks find each other: what each link adds, and what it refuses."""

from __future__ import annotations

import pytest

from corral.base.errors import UsageError
from corral.deploy.launch.links import LINKS, LinkRequest, Node, Ports, choose_link, link_ranks
from corral.engines.flags import FlagList

NODES = tuple(Node(f"n{i}", f"10.0.0.{i}", {"GLOO_SOCKET_IFNAME": "bond0"}) for i in range(4))
PORTS = Ports(8000, 29501, 29502)
KNOWN = FlagList("0.32.0", {"--nnodes": True})


def test_native_ranks_meet_at_the_head_and_only_it_serves() -> None:
    head, worker = link_ranks("native", LinkRequest(NODES[:2], PORTS, 8, replica_ranks=16))
    assert " ".join(head.arguments) == "--nnodes 2 --node-rank 0 --master-addr 10.0.0.0 --master-port 29501"
    assert worker.arguments[-1] == "--headless"
    assert worker.arguments[3] == "1"
    assert (head.serves, worker.serves) == (True, False)
    assert worker.env == {"GLOO_SOCKET_IFNAME": "bond0", "VLLM_HOST_IP": "10.0.0.1"}


def test_whole_replicas_on_each_node_are_joined_by_data_parallelism() -> None:
    head, worker = link_ranks("native", LinkRequest(NODES[:2], PORTS, 1, replicas=16, replica_ranks=1))
    assert "--nnodes" not in head.arguments
    assert head.arguments[:2] == worker.arguments[:2] == ("--data-parallel-size-local", "8")
    assert worker.arguments[-3:] == ("--data-parallel-start-rank", "8", "--headless")


def test_ray_starts_before_the_engine_and_only_the_head_has_one() -> None:
    head, worker = link_ranks("ray", LinkRequest(NODES[:2], PORTS, 8, replica_ranks=16, node_files="/node"))
    assert head.script[:2] == ("/node/ray_rank.py", "head")
    assert worker.script[1] == "worker"
    assert "10.0.0.0:29501" in worker.script
    assert (head.engine, worker.engine) == (True, False)
    assert head.env["RAY_AUTH_MODE"] == worker.env["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize(
    ("link", "wanted", "words"),
    [
        ("ray", LinkRequest(NODES[:2], PORTS, 2, replicas=4, replica_ranks=4), "one replica, not 4"),
        ("native", LinkRequest(NODES[:2], PORTS, 1, replicas=3, replica_ranks=1), "3 replicas"),
        ("native", LinkRequest(NODES, PORTS, 1, replicas=2, replica_ranks=8), "2 replicas"),
        ("native", LinkRequest(NODES[:3], PORTS, 6, replica_ranks=16), "16 ranks"),
        ("single", LinkRequest(NODES[:2], PORTS), "one node, not 2"),
        ("carrier-pigeon", LinkRequest(NODES[:1], PORTS), "no link"),
    ],
)
def test_what_would_wait_for_ever_is_refused(link: str, wanted: LinkRequest, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        link_ranks(link, wanted)


def test_the_choice_says_why() -> None:
    assert choose_link("auto", NODES[:1], KNOWN) == ("single", "one node")
    assert choose_link("auto", NODES, KNOWN)[0] == "native"
    assert choose_link("auto", NODES, FlagList("0.8", {}))[0] == "ray"
    assert choose_link("ray", NODES, KNOWN) == ("ray", "asked for")
    assert choose_link("ray", NODES[:1], KNOWN)[0] == "single"
    with pytest.raises(UsageError, match="tin-can") as caught:
        choose_link("tin-can", NODES, KNOWN)
    assert all(name in caught.value.remedy for name in LINKS)

"""Which part of the machines a member gets: whole nodes, GPUs, cores; never more than there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.base.errors import ConflictError
from corral.plan.hardware.inventory import Inventory, NodeSlice, parse_gpus, within
from corral.serve.fleet.creation import place, place_all
from corral.serve.fleet.record import FleetNode

GIB = 1 << 30


def gpu_nodes(count: int, gpus: int = 8) -> tuple[FleetNode, ...]:
    return tuple(FleetNode(f"n{number}", gpus) for number in range(count))


def test_whole_nodes_where_there_are_enough() -> None:
    assert place_all(gpu_nodes(4), 4, 4) == tuple(NodeSlice((f"n{n}",)) for n in range(4))
    assert place_all(gpu_nodes(4), 2, 2) == (NodeSlice(("n0", "n1")), NodeSlice(("n2", "n3")))


def test_some_gpus_each_where_members_share_a_node() -> None:
    shares = place_all(gpu_nodes(2), 4, 4)
    assert [(share.nodes, share.gpus) for share in shares] == [
        (("n0",), (0, 1, 2, 3)), (("n1",), (0, 1, 2, 3)), (("n0",), (4, 5, 6, 7)), (("n1",), (4, 5, 6, 7)),
    ]  # fmt: skip
    assert shares[2].env() == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    with pytest.raises(ConflictError, match="4 members hold 16 of 16 GPUs"):
        place(gpu_nodes(2), shares, 5)
    with pytest.raises(ConflictError):
        place_all(gpu_nodes(1, 1), 2, 2)  # a GPU is not shared


def test_a_fleet_that_may_grow_leaves_room() -> None:
    shares = place_all(gpu_nodes(1), 2, 8)
    assert [share.gpus for share in shares] == [(0,), (1,)]
    assert place(gpu_nodes(1), shares, 8).gpus == (2,)
    assert place(gpu_nodes(1), [shares[1]], 8).gpus == (0,)  # what was given back is given again


def test_cores_and_memory_of_a_machine_without_gpus() -> None:
    nodes = (FleetNode("here", 0, tuple(range(8)), 16 * GIB),)
    shares = place_all(nodes, 2, 2)
    assert [share.cores for share in shares] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {share.memory_bytes for share in shares} == {8 * GIB}
    assert shares[1].env() == {"VLLM_CPU_OMP_THREADS_BIND": "4,5,6,7"}
    assert place_all(nodes, 1, 1) == (NodeSlice(("here",)),)  # alone: nothing is divided
    more = place(nodes, shares, 4)  # beyond what it was divided for: the least used ones, twice
    assert more.cores == (0, 1)
    assert place(nodes, [*shares, more], 4).cores == (2, 3)
    assert place_all((FleetNode("here", 0, (0, 1), GIB),), 4, 4)[3].cores == (1,)  # more members than cores


def test_a_scheduler_divides_its_nodes_itself() -> None:
    assert place_all((), 3, 3) == (NodeSlice(), NodeSlice(), NodeSlice())


@given(nodes=st.integers(1, 5), gpus=st.integers(0, 8), cores=st.integers(1, 16), most=st.integers(1, 12))
def test_members_never_share_a_gpu_and_stay_on_the_machine(nodes: int, gpus: int, cores: int, most: int) -> None:
    machines = tuple(FleetNode(f"n{n}", gpus, tuple(range(cores)), GIB) for n in range(nodes))
    try:
        shares = place_all(machines, most, most)
    except ConflictError:
        shares = ()
    if not shares:
        assert gpus
        assert gpus * nodes < most or gpus // -(-most // nodes) == 0
    held = [(name, number) for share in shares for name in share.nodes for number in share.gpus or range(gpus)]
    assert len(held) == len(set(held))
    assert all(0 <= number < gpus for _, number in held)
    assert all(set(share.cores) <= set(range(cores)) for share in shares)
    assert all(share.nodes for share in shares)
    if not gpus:
        assert sum(share.memory_bytes for share in shares if "n0" in share.nodes) <= GIB


def test_a_plan_sees_only_its_share() -> None:
    whole = parse_gpus("8xH100")
    assert within(whole, NodeSlice(("n0",), gpus=(2, 3))).gpus_per_node == 2
    assert within(whole, NodeSlice(("n0",))) == whole
    cpu = Inventory(None, 1, 1, 0, 8, 32 * GIB, 20 * GIB)
    mine = within(cpu, NodeSlice(("n0",), cores=(0, 1), memory_bytes=10 * GIB))
    assert (mine.cpu_cores, mine.host_memory_bytes, mine.host_available_bytes) == (2, 10 * GIB, 10 * GIB)
    assert within(cpu, NodeSlice(("n0",), cores=(0,), memory_bytes=30 * GIB)).host_available_bytes == 20 * GIB

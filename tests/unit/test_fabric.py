"""The network is found by itself on the documented machines, and what cannot work is refused with what there is."""

from __future__ import annotations

import dataclasses

import pytest

from corral.base.errors import CorralError, UnreachableError, UsageError
from corral.plan.hardware.fabric import choose_fabric
from corral.plan.hardware.survey import Interface, NodeFacts, RdmaPort
from tests.unit.machines import DOCKER, digitalocean_droplets, digitalocean_metal, kempner, lambda_1cc, node

RAILS = "=" + ",".join(f"mlx5_{i}:1" for i in range(8))


def pair(*interfaces: tuple[str, str, str], **more: object) -> list[NodeFacts]:
    """Two nodes with the same kinds of interface: (name, kind, address with {} for the node's number)."""
    return [
        dataclasses.replace(
            node(f"n{i}", *(Interface(n, k, (a.format(i),) if a else ()) for n, k, a in interfaces)),
            **more,  # type: ignore[arg-type]
        )
        for i in (1, 2)
    ]


@pytest.mark.parametrize(
    ("nodes", "interface", "first", "hcas"),
    [
        (digitalocean_droplets(), "eth2", "192.168.50.2", RAILS),
        (digitalocean_metal(), "bond0", "10.128.0.3", RAILS),
        (lambda_1cc(), "eno1", "172.26.135.124", RAILS),
        (kempner(), "ib0", "10.33.12.20", "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1"),
        (lambda_1cc(16), "eno1", "172.26.135.124", RAILS),
    ],
    ids=["droplets", "metal", "lambda", "kempner", "lambda16"],
)
def test_documented_machines(nodes: list[NodeFacts], interface: str, first: str, hcas: str) -> None:
    fabric = choose_fabric(nodes)
    head = nodes[0].host
    assert set(fabric.interfaces.values()) == {interface}
    assert fabric.addresses[head] == first
    assert len(set(fabric.addresses.values())) == len(nodes)
    assert fabric.env(head) == {
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_IB_HCA": hcas,
    }
    assert interface in fabric.because


@pytest.mark.parametrize(
    ("interfaces", "chosen"),
    [
        ([("docker0", "docker", "172.17.0.1/16"), ("eth0", "ethernet", "10.0.0.{}/24")], "eth0"),
        ([("virbr0", "bridge", "192.168.122.{}/24"), ("eth0", "ethernet", "10.0.0.{}/24")], "eth0"),
        ([("br0", "bridge", "10.0.0.{}/24"), ("virbr0", "bridge", "192.168.122.1/24")], "br0"),
        ([("usb0", "ethernet", "169.254.3.{}/16"), ("eth0", "ethernet", "10.0.0.{}/24")], "eth0"),
        ([("tailscale0", "tun", "100.64.0.{}/10"), ("eth0", "ethernet", "10.0.0.{}/24")], "eth0"),
        ([("eth0", "veth", "10.0.0.{}/24")], "eth0"),  # containers and the like
        ([("eth0", "ethernet", "8.8.4.{}/24"), ("eth1", "ethernet", "10.0.0.{}/24")], "eth1"),  # private first
        ([("eth0", "ethernet", "8.8.4.{}/24")], "eth0"),
        ([("eth1", "ethernet", "10.1.0.{}/24"), ("eth0", "ethernet", "10.0.0.{}/24")], "eth0"),
        ([("ib0", "infiniband", "10.1.0.{}/24"), ("eth0", "ethernet", "10.0.0.{}/24")], "ib0"),
    ],
)
def test_the_wild(interfaces: list[tuple[str, str, str]], chosen: str) -> None:
    fabric = choose_fabric(pair(*interfaces))
    assert set(fabric.interfaces.values()) == {chosen}
    assert fabric.env("n1") == {"NCCL_SOCKET_IFNAME": f"={chosen}", "GLOO_SOCKET_IFNAME": chosen}


def test_a_public_network_is_used_with_a_word() -> None:
    fabric = choose_fabric(pair(("eth0", "ethernet", "8.8.4.{}/24")))
    assert any("not encrypted" in note for note in fabric.notes)


def test_the_slowest_node_decides() -> None:
    fast, slow = Interface("a", ipv4=("10.0.0.1/24",), speed_mbps=100_000), Interface("b", ipv4=("10.1.0.1/24",))
    one = node("one", fast, dataclasses.replace(slow, speed_mbps=25_000))
    two = node(
        "two",
        dataclasses.replace(fast, ipv4=("10.0.0.2/24",), speed_mbps=1_000),
        dataclasses.replace(slow, ipv4=("10.1.0.2/24",), speed_mbps=25_000),
    )
    fabric = choose_fabric([one, two])
    assert fabric.interfaces == {"one": "b", "two": "b"}
    assert fabric.speed_mbps == 25_000


def test_names_may_differ_between_nodes() -> None:
    nodes = [node("a", Interface("eth0", ipv4=("10.0.0.1/24",))), node("b", Interface("ens3", ipv4=("10.0.0.2/24",)))]
    fabric = choose_fabric(nodes)
    assert fabric.interfaces == {"a": "eth0", "b": "ens3"}
    assert fabric.env("b")["GLOO_SOCKET_IFNAME"] == "ens3"
    assert "eth0 on a, ens3 on b" in fabric.because
    assert choose_fabric(nodes, interface="10.0.0.0/16").interfaces == fabric.interfaces


def test_interfaces_that_are_down_are_passed_over() -> None:
    down = [Interface("fast", ipv4=(f"10.9.0.{i}/24",), up=i == 1, speed_mbps=400_000) for i in (1, 2)]
    nodes = [node(f"n{i}", down[i - 1], Interface("eth0", ipv4=(f"10.0.0.{i}/24",))) for i in (1, 2)]
    assert choose_fabric(nodes).interfaces["n1"] == "eth0"
    unplugged = [dataclasses.replace(row, up=True, carrier=False) for row in down]
    nodes = [node(f"n{i}", unplugged[i - 1], Interface("eth0", ipv4=(f"10.0.0.{i}/24",))) for i in (1, 2)]
    assert choose_fabric(nodes).interfaces["n1"] == "eth0"


def test_nodes_of_several_networks_use_their_default_routes() -> None:
    nodes = [
        node("a", DOCKER, Interface("eth0", ipv4=("10.0.1.5/32",)), default="eth0"),
        node("b", DOCKER, Interface("ens4", ipv4=("10.0.2.5/32",)), default="ens4"),
    ]
    fabric = choose_fabric(nodes)
    assert fabric.addresses == {"a": "10.0.1.5", "b": "10.0.2.5"}
    assert fabric.network == ""
    assert "default routes" in fabric.because
    assert fabric.notes


@pytest.mark.parametrize(
    "interfaces",
    [
        [("eth0", "ethernet", "")],  # IPv6 only
        [("docker0", "docker", "172.17.0.1/16")],
        [("tun0", "tun", "10.8.0.{}/24")],
        [("usb0", "ethernet", "169.254.3.{}/16")],
    ],
)
def test_no_network_in_common(interfaces: list[tuple[str, str, str]]) -> None:
    with pytest.raises(UnreachableError) as caught:
        choose_fabric(pair(*interfaces))
    assert "no network in common" in caught.value.message
    assert "n1:" in caught.value.remedy
    assert interfaces[0][0] in caught.value.remedy


def test_one_machine_under_two_names_is_told() -> None:
    one = dataclasses.replace(node("a", Interface("eth0", ipv4=("10.0.0.1/24",)), default="eth0"), boot_id="x")
    with pytest.raises(UnreachableError, match="a and b are one machine"):
        choose_fabric([dataclasses.replace(one, hostname="m"), dataclasses.replace(one, host="b", hostname="m")])


def test_a_tunnel_may_be_asked_for() -> None:
    nodes = pair(("tailscale0", "tun", "100.64.0.{}/10"), ("eth0", "ethernet", "10.0.0.{}/24"))
    assert choose_fabric(nodes, interface="tailscale0").addresses["n2"] == "100.64.0.2"


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ("eth7", "no such interface on n1, n2"),
        ("down0", "it is down on n1, n2"),
        ("bare0", "no IPv4 address"),
        ("docker0", "does not join"),
        ("lo", "does not join"),
        ("apart0", "n1 10.1.0.1/24, n2 10.2.0.2/24"),
        ("10.99.0.0/16", "no address in it"),
        ("10.99.0.0/99", "neither an interface nor a network"),
    ],
)
def test_a_forced_interface_that_cannot_work(wanted: str, word: str) -> None:
    nodes = [
        node(
            f"n{i}",
            DOCKER if wanted != "docker0" else dataclasses.replace(DOCKER, carrier=True),
            Interface("eth0", ipv4=(f"10.0.0.{i}/24",)),
            Interface("down0", ipv4=(f"10.5.0.{i}/24",), up=False),
            Interface("apart0", ipv4=(f"10.{i}.0.{i}/24",)),
            Interface("bare0"),
        )
        for i in (1, 2)
    ]
    with pytest.raises(UsageError) as caught:
        choose_fabric(nodes, interface=wanted)
    assert word in caught.value.message
    if "neither" not in word:
        for text in ("n1: ", "n2: ", "eth0 10.0.0.1/24", "down0 10.5.0.2/24 (down)", "bare0"):
            assert text in caught.value.remedy


def test_the_users_own_variables_win() -> None:
    nodes = digitalocean_droplets()
    fabric = choose_fabric(nodes, user_env={"NCCL_SOCKET_IFNAME": "eth1", "NCCL_IB_HCA": "mlx5"})
    env = fabric.env("droplet-0")
    assert env == {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_IB_HCA": "mlx5"}
    assert fabric.addresses["droplet-0"] == "10.110.0.2"  # the address is that of the interface they named
    silent = choose_fabric(nodes, user_env={"NCCL_SOCKET_IFNAME": "eth", "NCCL_IB_DISABLE": "1"}).env("droplet-0")
    assert silent == {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth2"}


def test_rdma_on_some_nodes_only_is_left_alone() -> None:
    nodes = lambda_1cc(3)
    nodes[1] = dataclasses.replace(nodes[1], rdma=())
    fabric = choose_fabric(nodes)
    assert fabric.env("lambda-0")["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_HCA" not in fabric.env("lambda-0")
    assert any("lambda-1 has no active InfiniBand ports" in note for note in fabric.notes)


def test_a_management_adapter_is_not_for_compute() -> None:
    nodes = [
        node(
            f"n{i}",
            Interface("eth0", ipv4=(f"10.0.0.{i}/24",), speed_mbps=25_000),
            rdma=[RdmaPort("mlx5_0", 1, "active", "ethernet", 25.0, "eth0")],
            default="eth0",
        )
        for i in (1, 2)
    ]
    assert choose_fabric(nodes).env("n1")["NCCL_IB_DISABLE"] == "1"
    assert choose_fabric(nodes, hca="mlx5_0").env("n1")["NCCL_IB_HCA"] == "=mlx5_0:1"


def test_a_cable_to_one_other_node_is_not_the_network() -> None:
    nodes = [
        node(
            f"n{i}",
            Interface("eth0", ipv4=(f"10.0.0.{i}/24",), speed_mbps=100_000),
            Interface("direct", ipv4=(f"10.{i}.7.1/30",), speed_mbps=200_000),
            rdma=[
                RdmaPort("mlx5_0", 1, "active", "ethernet", 100.0, "eth0"),
                RdmaPort("mlx5_1", 1, "active", "ethernet", 200.0, "direct"),
            ],
        )
        for i in (1, 2)
    ]
    assert choose_fabric(nodes).hcas["n1"] == ("mlx5_0:1",)


def test_adapters_may_be_named() -> None:
    assert choose_fabric(lambda_1cc(), hca="mlx5_1").hcas["lambda-1"] == ("mlx5_1:1",)
    every_active = tuple(f"mlx5_{n}:1" for n in range(9))  # as the prefix says, also the Ethernet one; mlx5_9 is down
    assert choose_fabric(lambda_1cc(), hca="mlx5").hcas["lambda-1"] == every_active
    assert choose_fabric(lambda_1cc(), hca="=mlx5_1:1,mlx5_2").hcas["lambda-0"] == ("mlx5_1:1", "mlx5_2:1")
    with pytest.raises(UsageError, match="no active RDMA port 'mlx5_9'") as caught:
        choose_fabric(lambda_1cc(), hca="mlx5_9")
    assert "mlx5_0:1 (active)" in caught.value.remedy


def test_one_node_is_trivial() -> None:
    fabric = choose_fabric(digitalocean_droplets(1))
    assert fabric.env("droplet-0") == {}
    assert choose_fabric([NodeFacts("bare")]).addresses == {"bare": "127.0.0.1"}
    assert choose_fabric(digitalocean_droplets(1), interface="eth1").addresses == {"droplet-0": "10.110.0.2"}
    with pytest.raises(CorralError, match="no such interface"):
        choose_fabric(digitalocean_droplets(1), interface="eth77")
    with pytest.raises(UsageError):
        choose_fabric([])

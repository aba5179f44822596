"""Nodes as the documented deployments have them, and as they are found in the wild: facts for tests."""

from __future__ import annotations

from collections.abc import Sequence

from corral.plan.hardware.survey import Interface, NodeFacts, RdmaPort

LO = Interface("lo", "loopback", ("127.0.0.1/8",), mtu=65536)
DOCKER = Interface("docker0", "docker", ("172.17.0.1/16",), carrier=False, driver="bridge")


def node(host: str, *interfaces: Interface, rdma: Sequence[RdmaPort] = (), default: str = "") -> NodeFacts:
    return NodeFacts(host, hostname=host, interfaces=(LO, *interfaces), rdma=tuple(rdma), default_interface=default)


def digitalocean_droplets(count: int = 2) -> list[NodeFacts]:
    """eth0 public, eth1 private, eth2 to eth9 one fast adapter per GPU, each rail a network of its own."""
    return [
        node(
            f"droplet-{i}",
            DOCKER,
            Interface("eth0", ipv4=(f"134.122.10.{i + 10}/20", f"10.17.0.{i + 5}/16"), driver="virtio_net"),
            Interface("eth1", ipv4=(f"10.110.0.{i + 2}/20",), driver="virtio_net"),
            *(
                Interface(f"eth{r + 2}", ipv4=(f"192.168.{50 + r}.{i + 2}/24",), speed_mbps=400_000, mtu=4200)
                for r in range(8)
            ),
            rdma=[RdmaPort(f"mlx5_{r}", 1, "active", "ethernet", 400.0, f"eth{r + 2}") for r in range(8)],
            default="eth0",
        )
        for i in range(count)
    ]


def digitalocean_metal(count: int = 2) -> list[NodeFacts]:
    """Two ports joined to bond0, which carries everything; the eight rails have no IPv4 address."""
    return [
        node(
            f"metal-{i}",
            DOCKER,
            Interface("bond0", "bond", (f"10.128.0.{i + 3}/20",), speed_mbps=50_000, mtu=9000),
            Interface("eno1", ipv4=()),
            *(
                Interface(f"fabric{r}", ipv4=(), ipv6=(f"fe80::{i}:{r}/64",), speed_mbps=400_000, mtu=4200)
                for r in range(8)
            ),
            rdma=[
                RdmaPort("mlx5_bond_0", 1, "active", "ethernet", 25.0, "bond0"),
                *(RdmaPort(f"mlx5_{r}", 1, "active", "ethernet", 400.0, f"fabric{r}") for r in range(8)),
            ],
            default="bond0",
        )
        for i in range(count)
    ]


def lambda_1cc(count: int = 2) -> list[NodeFacts]:
    """Eight InfiniBand adapters for the GPUs (no IP on them) and Ethernet adapters of the same make for the rest."""
    return [
        node(
            f"lambda-{i}",
            DOCKER,
            Interface("eno1", ipv4=(f"172.26.135.{i + 124}/22",), speed_mbps=100_000, driver="mlx5_core"),
            *(Interface(f"ibp{r}", "infiniband", (), carrier=True, mtu=4092) for r in range(8)),
            rdma=[
                *(RdmaPort(f"mlx5_{r}", 1, "active", "infiniband", 400.0, f"ibp{r}") for r in range(8)),
                RdmaPort("mlx5_8", 1, "active", "ethernet", 100.0, "eno1"),
                RdmaPort("mlx5_9", 1, "down", "ethernet", 40.0, ""),
            ],
            default="eno1",
        )
        for i in range(count)
    ]


def kempner(count: int = 4) -> list[NodeFacts]:
    """A university's cluster: management Ethernet, and four InfiniBand adapters of which one carries IP."""
    return [
        node(
            f"holygpu8a{i + 10}",
            Interface("eno8303", ipv4=(f"10.31.179.{i + 20}/16",), speed_mbps=1_000, driver="tg3"),
            Interface("ib0", "infiniband", (f"10.33.12.{i + 20}/16",), mtu=2044),
            *(Interface(f"ib{r}", "infiniband", (), mtu=2044) for r in range(1, 4)),
            rdma=[RdmaPort(f"mlx5_{r}", 1, "active", "infiniband", 400.0, f"ib{r}") for r in range(4)],
            default="eno8303",
        )
        for i in range(count)
    ]

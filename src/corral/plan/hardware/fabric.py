"""On which network the nodes of a deployment talk to each other: NodeFacts -> Fabric. Pure.

Every node must be told one address of its own on a network that all nodes share (VLLM_HOST_IP), and NCCL and Gloo the
interface that carries it; left to themselves they may each take another one (docker0, a management port, loopback).
The choice: among the networks in which every node has an address of its own, private before public, then the fastest.
Only when there is none do the interfaces of the default routes serve, and the network must route between them.

NCCL reads `=eth1` as exactly eth1, where `eth1` would also match eth10; the same for adapters in NCCL_IB_HCA. Gloo
takes plain names. RDMA adapters are named only where all nodes have active ones of the same kind: a node that speaks
InfiniBand to one that does not makes NCCL fail at its first collective.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv4Network, ip_network
from typing import Any

from corral.base.errors import UnreachableError, UsageError
from corral.base.record import to_json
from corral.node.network import choose_adapters, some_of
from corral.plan.hardware.survey import Interface, NodeFacts

# kinds that may carry a deployment unasked; tunnels, container bridges and loopback only when the user names one
CARRIES = ("infiniband", "bond", "ethernet", "bridge", "veth")
NOT_OURS = re.compile(r"^(docker|virbr|vnet|br-[0-9a-f]{12}$|lxcbr|lxdbr|cni|podman|flannel|cali)")
# what to take an interface for when the kernel does not say its speed (virtual machines mostly do not)
ASSUMED_MBPS = {"mlx5_core": 25_000, "mlx4_core": 10_000, "ena": 10_000, "gve": 10_000, "hv_netvsc": 10_000}
SLOWEST_MBPS = 1_000


@dataclass(frozen=True)
class Fabric:
    """The chosen network. `hcas` are RDMA ports as `device:port`; empty where NCCL is left its own choice."""

    addresses: dict[str, str]
    interfaces: dict[str, str]
    hcas: dict[str, tuple[str, ...]]
    because: str
    network: str = ""  # empty: several, with routing between them
    speed_mbps: int = 0  # of the slowest node; 0: not known
    sockets_only: bool = False  # RDMA is there on some nodes and cannot be used by all
    notes: tuple[str, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)  # the user's own variables; they win

    def env(self, host: str) -> dict[str, str]:
        """What the ranks of a host must find in their environment; nothing for a deployment of one node."""
        if len(self.addresses) == 1:
            return {}
        name = self.interfaces[host]
        found = {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name}
        if self.sockets_only:
            found["NCCL_IB_DISABLE"] = "1"
        elif self.hcas.get(host) and "NCCL_IB_DISABLE" not in self.given:
            found["NCCL_IB_HCA"] = "=" + ",".join(self.hcas[host])
        return {name: self.given.get(name, value) for name, value in found.items()}


@dataclass(frozen=True)
class _NodeAddress:
    """One address of one node."""

    host: str
    interface: Interface
    address: IPv4Interface
    speed: int
    default: bool


def choose_fabric(
    facts: Sequence[NodeFacts],
    interface: str | None = None,
    hca: str | None = None,
    user_env: Mapping[str, str] | None = None,
) -> Fabric:
    """The network for these nodes. `interface` is a name that every node has, or a network such as 10.1.0.0/16."""
    given = dict(user_env or {})
    if not facts:
        raise UsageError("there are no nodes to join.", "Name at least one host.")
    interface = interface or _named_in(given, facts)
    if len(facts) == 1:
        return _alone(facts[0], interface, given)
    chosen, because, notes = _forced(facts, interface) if interface else _best(facts)
    hcas, sockets_only, rdma_note = _adapters(facts, hca)
    networks = {one.address.network for one in chosen}
    return Fabric(
        addresses={one.host: str(one.address.ip) for one in chosen},
        interfaces={one.host: one.interface.name for one in chosen},
        hcas=hcas,
        because=because,
        network=str(networks.pop()) if len(networks) == 1 else "",
        speed_mbps=min(one.speed for one in chosen),
        sockets_only=sockets_only,
        notes=tuple(note for note in (*notes, rdma_note) if note),
        given=given,
    )


def speed_mbps(facts: NodeFacts, interface: Interface) -> int:
    """How fast an interface is: what the kernel says, or the adapter behind it, or a careful guess."""
    behind = max((int(port.rate_gbps * 1000) for port in facts.rdma if port.netdev == interface.name), default=0)
    if interface.kind == "veth":
        return SLOWEST_MBPS  # the kernel says 10 Gb/s of every veth, whatever is behind it
    if interface.kind == "infiniband":
        return max(interface.speed_mbps, behind) or 40_000
    return interface.speed_mbps or behind or ASSUMED_MBPS.get(interface.driver, SLOWEST_MBPS)


def _addresses_of(facts: NodeFacts) -> list[_NodeAddress]:
    return [
        _NodeAddress(
            facts.host, row, IPv4Interface(text), speed_mbps(facts, row), row.name == facts.default_interface
        )
        for row in facts.interfaces
        for text in row.ipv4
    ]


def _usable(one: _NodeAddress) -> bool:
    row = one.interface
    ours = row.kind in CARRIES and not NOT_OURS.match(row.name)
    return ours and row.up and row.carrier is not False and not one.address.is_link_local


def _shared(
    facts: Sequence[NodeFacts], addresses: Mapping[str, Sequence[_NodeAddress]]
) -> list[tuple[_NodeAddress, ...]]:
    """For every network in which all nodes have an address of their own: the fastest address of each node."""
    found = []
    first = dict.fromkeys(p.address.network for p in addresses[facts[0].host] if p.address.network.prefixlen < 31)
    for network in first:
        members = [[p for p in addresses[node.host] if p.address.network == network] for node in facts]
        if all(members):
            best = tuple(max(own, key=_preference) for own in members)
            if len({one.address.ip for one in best}) == len(facts):  # docker0 has the same address everywhere
                found.append(best)
    return found


def _preference(one: _NodeAddress) -> tuple[bool, int, int, int, bool, int]:
    """Larger is better."""
    kind = CARRIES.index(one.interface.kind) if one.interface.kind in CARRIES else len(CARRIES)
    digits = re.search(r"(\d+)\D*$", one.interface.name)  # among equals eth2 comes before eth9
    early = -int(digits[1]) if digits else 0
    return (not one.address.is_global, one.speed, one.interface.mtu, -kind, one.default, early)


def _best(facts: Sequence[NodeFacts]) -> tuple[tuple[_NodeAddress, ...], str, list[str]]:
    addresses = {node.host: [one for one in _addresses_of(node) if _usable(one)] for node in facts}
    rows = _shared(facts, addresses)
    if not rows:
        return _routed(facts, addresses)
    ranked = sorted(rows, key=lambda row: min(_preference(one) for one in row), reverse=True)
    chosen = ranked[0]
    network = chosen[0].address.network
    alone = "the only network" if len(rows) == 1 else f"the fastest of {len(rows)} networks"
    if any(_slower(chosen, other) for other in ranked[1:]):
        alone = "the fastest private network"
    notes = []
    if chosen[0].address.is_global:
        notes.append(f"{network} is a public network, and what nodes tell each other is not encrypted")
    return chosen, f"{_names(chosen)}: {network}, {_speed(chosen)}, {alone} that all nodes share", notes


def _slower(chosen: Sequence[_NodeAddress], other: Sequence[_NodeAddress]) -> bool:
    return min(one.speed for one in chosen) < min(one.speed for one in other)


def _routed(
    facts: Sequence[NodeFacts], addresses: Mapping[str, Sequence[_NodeAddress]]
) -> tuple[tuple[_NodeAddress, ...], str, list[str]]:
    """Nodes of several networks: the interfaces of their default routes, if every node has one of its own."""
    chosen = []
    for node in facts:
        own = [one for one in addresses[node.host] if one.default]
        if own:
            chosen.append(max(own, key=_preference))
    if len(chosen) < len(facts) or len({one.address.ip for one in chosen}) < len(facts):
        raise UnreachableError(
            f"the {len(facts)} nodes have no network in common{_same_machine(facts)}.",
            f"Connect them to one, or name it with --interface. {_listing(facts)}",
        )
    because = f"{_names(chosen)}: the nodes share no network, so the interfaces of their default routes are used"
    return tuple(chosen), because, ["the nodes are in several networks; a router must pass all ports between them"]


def _forced(facts: Sequence[NodeFacts], wanted: str) -> tuple[tuple[_NodeAddress, ...], str, list[str]]:
    """What the user asked for, or an error that shows what there is."""
    network = _as_network(wanted)
    own: dict[str, list[_NodeAddress]] = {}
    lacking: dict[str, list[str]] = {}
    for node in facts:
        addresses = [
            p for p in _addresses_of(node) if (p.address.ip in network if network else p.interface.name == wanted)
        ]
        own[node.host] = [one for one in addresses if one.interface.up and one.interface.carrier is not False]
        if not own[node.host]:
            lacking.setdefault(_why_not(node, wanted, network), []).append(node.host)
    if lacking:
        why = "; ".join(f"{reason} on {some_of(hosts)}" for reason, hosts in lacking.items())
        raise UsageError(f"--interface {wanted} cannot be used: {why}.", _listing(facts))
    if network:
        chosen = tuple(max(addresses, key=_preference) for addresses in own.values())
    else:
        chosen = next(iter(_shared(facts, own)), ())
    if not chosen or len({one.address.ip for one in chosen}) < len(facts):
        said = some_of([f"{host} {addresses[0].address}" for host, addresses in own.items()])
        raise UsageError(f"--interface {wanted} does not join the nodes: they have {said} there.", _listing(facts))
    return chosen, f"{_names(chosen)}: asked for", []


def _why_not(node: NodeFacts, wanted: str, network: IPv4Network | None) -> str:
    row = node.interface(wanted)
    if network:
        return "no address in it"
    if row is None:
        return "no such interface"
    if not row.up or row.carrier is False:
        return "it is down"
    return "it has no IPv4 address"


def _as_network(text: str) -> IPv4Network | None:
    try:
        found = ip_network(text, strict=False) if "/" in text else None
    except ValueError:
        raise UsageError(f"{text!r} is neither an interface nor a network.", "Write eth0, or 10.1.0.0/16.") from None
    return found if isinstance(found, IPv4Network) else None


def _named_in(given: Mapping[str, str], facts: Sequence[NodeFacts]) -> str | None:
    """The interface that the user's own variables name, when it is one that every node has."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        name = given.get(variable, "").removeprefix("=")
        if name and all(node.interface(name) for node in facts):
            return name
    return None


def _alone(node: NodeFacts, interface: str | None, given: Mapping[str, str]) -> Fabric:
    """One node needs no network; its address serves those who want to reach it."""
    if interface:
        chosen, _, _ = _forced([node], interface)
        one: _NodeAddress | None = chosen[0]
    else:
        usable = [one for one in _addresses_of(node) if _usable(one)]
        one = max(usable, key=lambda one: (one.default, _preference(one)), default=None)
    address, name = (str(one.address.ip), one.interface.name) if one else ("127.0.0.1", "lo")
    return Fabric({node.host: address}, {node.host: name}, {}, "one node", given=given)


# --- RDMA --------------------------------------------------------------------------------------------------------


def _adapters(facts: Sequence[NodeFacts], wanted: str | None) -> tuple[dict[str, tuple[str, ...]], bool, str]:
    """The ports NCCL may use on each node, whether RDMA must be left alone, and a word about it."""
    if wanted:
        return {node.host: _asked_ports(node, wanted) for node in facts}, False, ""
    found, sockets_only, why = choose_adapters([_for_adapters(node) for node in facts])
    hcas = {node.host: tuple(ports) for node, ports in zip(facts, found, strict=False)}
    return hcas, sockets_only, why


def _for_adapters(node: NodeFacts) -> dict[str, Any]:
    networks = {row.name: [str(IPv4Interface(text).network) for text in row.ipv4] for row in node.interfaces}
    rdma = [to_json(port) for port in node.rdma]
    return {"name": node.host, "rdma": rdma, "networks": networks, "default": node.default_interface}


def _asked_ports(node: NodeFacts, wanted: str) -> tuple[str, ...]:
    """The ports a user's list means on this node; `mlx5` means all active ones whose names begin so."""
    found = []
    for word in wanted.removeprefix("=").split(","):
        name, _, port = word.strip().partition(":")
        devices = [p for p in node.rdma if p.device == name] or [p for p in node.rdma if p.device.startswith(name)]
        rows = [p for p in devices if p.state == "active" and (not port or str(p.port) == port)]
        if not rows or not name:
            there = ", ".join(f"{p.device}:{p.port} ({p.state})" for p in node.rdma) or "none"
            raise UsageError(f"{node.host} has no active RDMA port {word.strip()!r}.", f"It has: {there}.")
        found += [f"{p.device}:{p.port}" for p in rows]
    return tuple(dict.fromkeys(found))


# --- words -------------------------------------------------------------------------------------------------------


def _names(chosen: Sequence[_NodeAddress]) -> str:
    by_name: dict[str, list[str]] = {}
    for one in chosen:
        by_name.setdefault(one.interface.name, []).append(one.host)
    if len(by_name) == 1:
        return next(iter(by_name))
    return ", ".join(f"{name} on {', '.join(hosts)}" for name, hosts in by_name.items())


def _speed(chosen: Sequence[_NodeAddress]) -> str:
    if all(_guessed(one) for one in chosen):
        return "speed not known"
    return f"{min(one.speed for one in chosen) / 1000:g} Gb/s"


def _guessed(one: _NodeAddress) -> bool:
    row = one.interface
    return one.speed <= SLOWEST_MBPS and (row.kind == "veth" or not row.speed_mbps)


def _listing(facts: Sequence[NodeFacts], most: int = 8) -> str:
    """All interfaces with addresses, per node."""
    lines = []
    for node in facts[:most]:
        rows = [row for row in node.interfaces if row.ipv4 and row.kind != "loopback"]
        words = [f"{r.name} {' '.join(r.ipv4)}{'' if r.up and r.carrier is not False else ' (down)'}" for r in rows]
        bare = [row.name for row in node.interfaces if not row.ipv4 and row.kind in CARRIES]
        words += [f"without an address: {' '.join(bare)}"] if bare else []
        lines.append(f"{node.host}: {', '.join(words) or 'none'}")
    rest = f"; and {len(facts) - most} more nodes" if len(facts) > most else ""
    return f"Interfaces: {'; '.join(lines)}{rest}."


def _same_machine(facts: Sequence[NodeFacts]) -> str:
    seen: dict[tuple[str, str], str] = {}
    for node in facts:
        key = (node.boot_id, node.hostname)
        if node.boot_id and key in seen:
            return f": {seen[key]} and {node.host} are one machine"
        seen[key] = node.host
    return ""

"""The network between the nodes: every node connects to every other one at its chosen address, and measures."""

from __future__ import annotations

import json
import secrets
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from corral.base.bundle import bundle
from corral.base.errors import CorralError, DataError
from corral.base.record import from_json
from corral.base.ssh import Ssh, each
from corral.base.untrusted import last_object
from corral.deploy.doctor.finding import Finding, Pair, fatal, ok, warning
from corral.deploy.doctor.judge import names
from corral.plan.hardware.fabric import Fabric
from corral.plan.hardware.survey import Here, NodeFacts

MOST_S = 20.0
MOST_ANSWER_BYTES = 4 << 20
MOST = 1e15  # bits per second, or seconds
START_S = 6.0  # until the last node has begun, and until the answers are back
SLOW_SHARE = 0.3  # of the middle pair
FAR_S = 1e-3
EXPECTED_MOST_BITS = 10e9  # one TCP stream in a short time shows no more, however fast the adapter


HOW = {"timeout": "no answer", "refused": "the connection is refused", "": "no answer in time"}


@dataclass(frozen=True)
class Peer:
    """One node's measurement of another: whether it reached it, and how fast."""

    reach: str
    rtt_s: float | None = None
    there_bps: float = 0.0
    back_bps: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class _Answer:
    peers: dict[str, Peer]
    error: str = ""


@dataclass(frozen=True)
class NetworkResult:
    """What each node measured of every other one, or why it could not be asked."""

    rows: dict[str, dict[str, Peer]]
    errors: dict[str, str]


def stream_time_s(nodes: int, limit_s: float) -> float:
    """How long one stream may take, so that all pairs get their turn."""
    return max(0.02, min(0.3, 0.6 * limit_s / (3 * max(1, nodes - 1))))


def probe_network(ssh: Ssh | Here, facts: Sequence[NodeFacts], fabric: Fabric, timeout_s: float) -> NetworkResult:
    """Run the test on all nodes at once, at ports that the survey found free."""
    limit_s = max(2.0, min(MOST_S, timeout_s - START_S))
    peers = [[node.host, fabric.addresses[node.host], node.free_ports[0]] for node in facts]
    order = {"peers": peers, "token": secrets.token_hex(16), "limit_s": limit_s}
    order["stream_s"] = stream_time_s(len(facts), limit_s)
    numbers = {node.host: number for number, node in enumerate(facts)}

    def task(host: str) -> _Answer:
        stdin = json.dumps(
            {**order, "me": numbers[host]}
        ).encode()  # it holds the token by which they know each other
        done = ssh.python(host, bundle("node/network_probe.py"), stdin=stdin, timeout_s=timeout_s)
        return read_measurements(done.or_raise(f"on {host}").stdout, host, set(numbers) - {host})

    rows, errors = {}, {}
    for host, answer in each(list(numbers), task, width=len(numbers)).items():
        if isinstance(answer, CorralError):
            errors[host] = answer.message
        elif answer.error:
            errors[host] = answer.error
        else:
            rows[host] = answer.peers
    return NetworkResult(rows, errors)


def read_measurements(text: str, host: str, others: set[str]) -> _Answer:
    """What one node measured; it may name only the other nodes, and only possible numbers."""
    what = f"the answer of {host}"
    answer = from_json(_Answer, last_object(text, what, MOST_ANSWER_BYTES, "Look at the node."), what)
    numbers = [
        number for peer in answer.peers.values() for number in (peer.rtt_s or 0.0, peer.there_bps, peer.back_bps)
    ]
    if not set(answer.peers) <= others or not all(0 <= number < MOST for number in numbers):
        raise DataError(f"{what} names other nodes, or impossible speeds.", "Look at the node.", host=host)
    return answer


def pairs_of(result: NetworkResult) -> tuple[Pair, ...]:
    return tuple(
        Pair(first, second, row.rtt_s, row.there_bps, row.back_bps)
        for first, peers in result.rows.items()
        for second, row in peers.items()
        if row.rtt_s is not None
    )


def judge_network(result: NetworkResult, fabric: Fabric) -> tuple[list[Finding], tuple[Pair, ...]]:
    """Findings, and what the pairs measured."""
    pairs = pairs_of(result)
    failed = [warning("network", f"the test did not run: {why}", "Try again.", h) for h, why in result.errors.items()]
    return [*failed, *_reach(result, fabric), *_speeds(pairs, fabric)], pairs


def _reach(result: NetworkResult, fabric: Fabric) -> list[Finding]:
    """Directions in which no connection was made, by destination: that is where a firewall is."""
    blocked: dict[tuple[str, str], list[str]] = {}
    for host, peers in result.rows.items():
        for peer, row in peers.items():
            if row.reach != "ok" and peer not in result.errors:
                blocked.setdefault((peer, row.reach), []).append(host)
    findings = []
    for (peer, how), hosts in blocked.items():
        where = f"{fabric.addresses[peer]} ({fabric.interfaces[peer]})"
        text = f"{names(hosts)} cannot connect to {peer} at {where}: {HOW.get(how, how)}"
        remedy = f"Open all ports between the nodes in the firewall of {peer}, or choose another --interface."
        findings.append(fatal("firewall", text, remedy))
    if not findings and len(result.rows) > 1:
        return [ok("firewall", "every node reaches every other one")]
    return findings


def _speeds(pairs: Sequence[Pair], fabric: Fabric) -> list[Finding]:
    if not pairs:
        return []
    slowest = min(pairs, key=lambda pair: pair.slowest_bits_per_s)
    fastest = max(pairs, key=lambda pair: pair.slowest_bits_per_s)
    farthest = max(pairs, key=lambda pair: pair.round_trip_s)
    middle = statistics.median(pair.slowest_bits_per_s for pair in pairs)
    text = f"{slowest.slowest_bits_per_s / 1e9:.1f} Gb/s between {slowest.first} and {slowest.second}"
    findings = []
    expected = min(fabric.speed_mbps * 1e6, EXPECTED_MOST_BITS)
    if slowest.slowest_bits_per_s < SLOW_SHARE * middle:
        remedy = "Look at the cable, the port's negotiated speed (ethtool) and other traffic of these nodes."
        findings.append(warning("bandwidth", f"only {text}, {middle / 1e9:.1f} between others", remedy))
    elif slowest.slowest_bits_per_s < SLOW_SHARE * expected:
        remedy = "Is another network faster? Name it with --interface."
        findings.append(warning("bandwidth", f"only {text}; {expected / 1e9:g} were expected", remedy))
    elif len(pairs) > 1:
        text = f"{slowest.slowest_bits_per_s / 1e9:.1f} to {fastest.slowest_bits_per_s / 1e9:.1f} Gb/s over TCP"
        findings.append(ok("bandwidth", f"{text}, slowest {slowest.first} ↔ {slowest.second}"))
    else:
        findings.append(ok("bandwidth", text))
    far = f"{farthest.round_trip_s * 1e3:.2f} ms there and back between {farthest.first} and {farthest.second}"
    if farthest.round_trip_s > FAR_S:
        remedy = "Nodes this far apart serve one model badly; pipeline parallelism suffers least."
        return [*findings, warning("latency", far, remedy)]
    return [*findings, ok("latency", f"at most {far}")]

"""Findings of an examination, each with a remedy, and the report that holds them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from corral.plan.hardware.fabric import Fabric
from corral.plan.hardware.survey import NodeFacts


class Level(enum.StrEnum):
    """How bad it is: a deployment would work, work badly, or not work."""

    OK = "ok"
    WARNING = "warning"
    FATAL = "fatal"


@dataclass(frozen=True)
class Finding:
    """One sentence about one node, or about all of them when `host` is empty."""

    level: Level
    what: str
    text: str
    host: str = ""
    remedy: str = ""
    commands: tuple[str, ...] = ()  # that fix it, on the node; Corral runs none of them


@dataclass(frozen=True)
class Pair:
    """What two nodes measured between them."""

    first: str
    second: str
    round_trip_s: float
    there_bits_per_s: float
    back_bits_per_s: float

    @property
    def slowest_bits_per_s(self) -> float:
        return min(self.there_bits_per_s, self.back_bits_per_s)


@dataclass(frozen=True)
class Report:
    """Everything that was found; `nodes` are those that answered."""

    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    nodes: tuple[NodeFacts, ...]
    fabric: Fabric | None
    pairs: tuple[Pair, ...] = ()
    seconds: float = 0.0
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  # host -> part -> version

    @property
    def level(self) -> Level:
        return worst(self.findings)

    def of(self, host: str) -> Level:
        """How bad the node's own findings are, whatever is wrong between nodes."""
        return worst(finding for finding in self.findings if finding.host == host)

    @property
    def fatal(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == Level.FATAL)


def worst(findings: Iterable[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.FATAL, Level.WARNING) if level in levels), Level.OK)


def ok(what: str, text: str, host: str = "") -> Finding:
    return Finding(Level.OK, what, text, host)


def warning(what: str, text: str, remedy: str, host: str = "") -> Finding:
    return Finding(Level.WARNING, what, text, host, remedy)


def fatal(what: str, text: str, remedy: str, host: str = "") -> Finding:
    return Finding(Level.FATAL, what, text, host, remedy)

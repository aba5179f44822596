"""A home full of deployments in every state, made of files alone: what the console reads, without an engine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from corral.base.files import make_private_dir, write_atomic
from corral.base.processes import own_identity
from corral.base.record import dump_json, to_json
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.deployments import Record
from corral.serve.fleet.record import (
    Fleet,
    FleetFolder,
    FleetMember,
    GatewayAddress,
    GatewayLoad,
    MemberLoad,
    create_fleet,
)

__all__ = ["Made", "fake_program", "make", "make_fleet", "submitted"]

EXPECTED = {"starting": 8.0, "initialising": 4.0, "loading": 20.0, "compiling": 30.0, "warming": 6.0}


@dataclass
class Made:
    """A deployment made by hand, with a journal that can be written on."""

    folder: DeploymentFolder
    began_s: float
    events: list[dict[str, Any]] = field(default_factory=list)

    def event(self, kind: str, after_s: float | None = None, rank: int = 0, **details: Any) -> Made:
        """One line of the journal, so many seconds after the beginning; None: now."""
        at_s = self.began_s + after_s if after_s is not None else time.time()
        line = {"t": at_s, "kind": kind, "rank": rank, "elapsed_s": at_s - self.began_s, **details}
        with self.folder.rank(rank).events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return self

    def agent(self) -> Made:
        """Its agent is this process: it lives."""
        head = self.folder.rank(0)
        write_atomic(head.agent, json.dumps(to_json(own_identity())))
        write_atomic(head.heartbeat, "{}")
        return self

    def serves(self, url: str) -> Made:
        write_atomic(self.folder.endpoint, dump_json(Endpoint(url, self.folder.name, str(self.folder.key))))
        return self

    def log(self, *lines: str, rank: int = 0) -> Made:
        with self.folder.rank(rank).log.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
        return self

    def course(self, *steps: tuple[str, float]) -> Made:
        """Phases and states, each with the second it began at."""
        for name, after_s in steps:
            states = ("starting", "loading", "ready", "stopped", "failed", "draining")
            kind = "state" if name in states else "phase"
            details: dict[str, Any] = {kind: name}
            self.event(kind, after_s, **details)
        return self


def make(
    name: str,
    ago_s: float = 60.0,
    model: str = "",
    target: str = "local",
    nodes: tuple[str, ...] = ("rank0",),
    words: tuple[str, ...] = (),
    engine: str = "vllm 0.24.0 (cuda)",
) -> Made:
    """A deployment that was launched so long ago, and has said nothing yet."""
    folder = DeploymentFolder.of(name)
    folder.create()
    began_s = time.time() - ago_s
    model = model or name
    record = Record(name, "0123456789abcdef", model, model, target, began_s, own_identity(), engine, words=words)
    write_atomic(folder.record, dump_json(record))
    expected = {phase: {"seconds": seconds, "remembered": True} for phase, seconds in EXPECTED.items()}
    ranks = [{"node": node} for node in nodes]
    write_atomic(folder.launch, json.dumps({"launch_id": record.launch_id, "expected": expected, "ranks": ranks}))
    for rank in range(len(nodes)):
        make_private_dir(folder.rank(rank).path)
    return Made(folder, began_s)


def submitted(made: Made, id: str, after_s: float = 0.0, time_s: float | None = None) -> Made:
    """Its job is in SLURM's queue since."""
    body = {"id": id, "submitted_s": made.began_s + after_s, "time_s": time_s}
    write_atomic(made.folder.job, json.dumps(body))
    return made


def fake_program(folder: Path, name: str, body: str) -> None:
    """A command of the cluster that answers as it is told."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def make_fleet(name: str, model: str, members: tuple[str, ...], gateway: str = "", running: int = 0) -> FleetFolder:
    """A fleet of deployments that were made; `gateway` is where it is reached."""
    count, who = len(members), tuple(map(FleetMember, members))
    folder = create_fleet(Fleet(name, model, 1, max(4, count), count, time.time() - 900, who))
    write_atomic(folder.keeper, dump_json(own_identity()))
    if gateway:
        address = urlsplit(gateway)
        assert address.hostname is not None
        assert address.port is not None
        listens = GatewayAddress(address.hostname, address.port, own_identity(), (model,))
        write_atomic(folder.gateway("g1"), dump_json(listens))
        loads = {member: MemberLoad(running // len(members)) for member in members}
        write_atomic(folder.gateway_load("g1"), dump_json(GatewayLoad(time.time(), running, members=loads)))
    return folder

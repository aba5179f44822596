"""Deployments and fleets for people: the rows of `corral ps`, the lines of `corral status` and `corral events`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from corral.base.wording import duration
from corral.deploy.deployment.events import Event
from corral.deploy.deployment.start_times import Expected, amount
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle.deployments import HeldJob, RankMember, Status
from corral.lab.report import tables
from corral.lab.report.screen import since
from corral.plan.measured import Differences
from corral.serve.fleet.record import Judgement
from corral.serve.fleet.status import NOT_STARTED, FleetStatus, MemberStatus


def deployment_row(status: Status) -> list[str]:
    """A deployment as `ps` shows it."""
    state = status.state.value
    if status.state in (State.STAGING, State.LOADING, State.STARTING):
        state = f"{status.phase} {100 * (status.done or 0) // status.total}%" if status.total else status.phase
    elif status.reason and status.state in ENDED:
        state = f"{state}: {status.reason.value.replace('_', ' ')}"
    elif status.last_state:
        state = f"{state}, {_last_read(status)}"
    url = status.endpoint.base_url if status.endpoint else "-"
    return [status.name, state, since(status.since_s), status.model, url, status.engine or "-"]


def _last_read(status: Status) -> str:
    """How an unknown deployment was when it was last read."""
    return f"{status.last_state} {since(status.last_read_s or 0.0)} ago"


def fleet_rows(fleet: FleetStatus) -> list[list[str]]:
    """A fleet as `ps` shows it: one row, and below it a row for each member with its load."""
    counts = "" if fleet.state in (State.STOPPED, State.UNKNOWN) else f": {fleet.ready} of {fleet.wanted}"
    url = fleet.endpoint.base_url if fleet.endpoint else "-"
    load = f"{fleet.running} running, {fleet.waiting} waiting"
    row = [fleet.name, f"{fleet.state.value}{counts}", since(fleet.created_s), fleet.model, url, load]
    return [row, *map(_member_row, fleet.members)]


def _member_row(member: MemberStatus) -> list[str]:
    if member.status is None:
        return [f"  {member.name}", NOT_STARTED, "-", "-", "-", "-"]
    row = deployment_row(member.status)
    state = f"{row[1]}, leaving" if member.leaving else row[1]
    return [f"  {row[0]}", state, *row[2:5], _load_text(member) or row[5]]


def _load_text(one: MemberStatus) -> str:
    """The requests that gateways have sent to a member; empty where it is not known."""
    if one.load is None:
        return ""
    judged = "" if one.load.judged is Judgement.OK else f", {one.load.judged.value}"
    return f"{one.load.running} running{judged}"


def fleet_lines(fleet: FleetStatus) -> list[str]:
    """Everything about a fleet, one fact per line, then its members."""
    size = str(fleet.wanted) if fleet.least == fleet.most else f"{fleet.wanted}, of {fleet.least} to {fleet.most}"
    rows = [
        *([("warning", warning)] if (warning := fleet.warning) else []),
        ("fleet", fleet.name),
        ("state", f"{fleet.state.value}: {fleet.text}"),
        ("model", fleet.model),
        ("wanted", size),
        ("requests", f"{fleet.running} running, {fleet.waiting} waiting"),
        ("keeper", fleet.keeper),
        ("gateways", ", ".join(fleet.gateways) or "none is running"),
    ]
    if fleet.endpoint:
        rows += [("endpoint", fleet.endpoint.base_url), ("key", fleet.endpoint.key_file or "none")]
    if fleet.state is State.STOPPED:
        rows = [row for row in rows if row[0] not in ("keeper", "gateways")]
    width = max(len(name) for name, _ in rows)
    return [*(f"{name:<{width}}  {value}" for name, value in rows), *_member_lines(fleet.members),
            *_member_lines(fleet.at_urls, "at URLs")]  # fmt: skip


def _member_lines(members: Sequence[MemberStatus], heading: str = "members") -> list[str]:
    if not members:
        return []
    width = max(len(one.name) for one in members)
    lines = ["", heading]
    for one in members:
        parts = [str(one.state or one.text), "leaving" if one.leaving else "", _load_text(one)]
        if one.status and one.status.last_state:
            parts.insert(1, _last_read(one.status))
        if one.status and one.status.reason and one.state is not State.READY:
            parts.append(one.status.reason.value.replace("_", " "))
        lines.append(f"  {one.name:<{width}}  {', '.join(part for part in parts if part)}")
    return lines


def _node_rows(nodes: Sequence[RankMember]) -> list[tuple[str, str]]:
    """How many of the expected nodes have joined, and each node with its GPUs."""
    joined = [node for node in nodes if node.joined]
    gpus = f", {sum(n.gpus for n in joined)} of {sum(n.gpus for n in nodes)} GPUs" if nodes[0].gpus else ""
    rows = [("nodes", f"{len(joined)} of {len(nodes)} joined{gpus}")]
    for node in nodes:
        each = f", {node.gpus} GPU{'s' if node.gpus > 1 else ''}" if node.gpus else ""
        head = " (head)" if node.rank == 0 else ""
        rows.append(("", f"rank {node.rank} {node.node}{head}{each}{'' if node.joined else ', not there yet'}"))
    return rows


def _job_row(job: HeldJob, state: State) -> tuple[str, str]:
    left = f", {duration(max(0.0, job.drains_s - time.time()))} until it drains" if job.drains_s else ""
    return ("job", f"{job.id}{left if state not in ENDED else ''}")


def _phase_text(status: Status) -> str:
    """The current phase, its progress, since when it lasts and when it should end."""
    progress = f" {amount(status.done or 0, status.total)}" if status.total else ""
    left_s = status.phase_ends_s - time.time() if status.phase_ends_s else 0.0
    left = f", {duration(left_s)} left" if left_s > 0 else ""  # past it the pace did not hold
    usual = f" ({status.expected.text})" if status.expected else ""
    return f"{status.phase}{progress} for {since(status.phase_since_s)}{left}{usual}"


def status_facts(
    status: Status, answers: bool | None, nodes: Sequence[RankMember], job: HeldJob | None
) -> list[tuple[str, str]]:
    """A deployment's status as named facts."""
    rows = [("name", status.name), ("state", f"{status.state} for {since(status.since_s)}")]
    if answers is False:
        rows.append(("but", "its server does not answer at this moment"))
    if status.state in (State.STAGING, State.STARTING, State.LOADING) and status.phase != State.STAGING:
        rows.append(("phase", _phase_text(status)))
    if status.reason:
        rows.append(("reason", status.reason.value.replace("_", " ")))
    if status.last_state:
        rows.append(("last read", _last_read(status)))
    if status.text:
        rows.append(("because", status.text))
    if status.remedy and (status.state in ENDED or status.state in (State.QUEUED, State.UNKNOWN)):
        rows.append(("do", status.remedy))
    rows += [("model", status.model), *([("task", status.task)] if status.task != "generate" else [])]
    rows += [("engine", status.engine or "-"), ("target", status.target)]
    if job:
        rows.append(_job_row(job, status.state))
    if len(nodes) > 1 or (nodes and job):
        rows += _node_rows(nodes)
    if status.endpoint:
        rows += [("endpoint", status.endpoint.base_url), ("key", status.endpoint.key_file or "none")]
    if status.timings.ready_s is not None:
        rows.append(("ready after", duration(status.timings.ready_s)))
    if status.restarts:
        rows.append(("restarts", str(status.restarts)))
    return rows


def start_rows(took: Mapping[str, float], expected: Mapping[str, Expected]) -> list[tuple[str, str]]:
    """The phases of a start with what each took, beside what it usually takes where that was much less."""
    rows = []
    for phase, seconds in took.items():
        usual = expected.get(phase)
        slow = usual is not None and usual.remembered and usual.is_overdue(seconds)
        rows.append((f"  {phase}", f"{duration(seconds)}{f', slow: {usual.text}' if usual and slow else ''}"))
    return rows


PLANNED = {
    "weights_gib": "weights GiB per GPU",
    "activation_gib": "activations GiB",
    "graph_gib": "CUDA graphs GiB",
    "non_torch_gib": "outside torch GiB",
    "kv_tokens": "KV cache tokens",
    "load_s": "load seconds",
}


def status_lines(facts: Sequence[tuple[str, str]], compared: Differences | None, columns: int | None) -> list[str]:
    """The facts, and below them the plan compared with what the engine reported."""
    rows = [
        (PLANNED[row.name], f"{row.predicted:,g}", f"{row.observed:,g}", f"{row.percent:+.1f}%")
        for row in (compared.rows if compared else ())
        if row.name in PLANNED
    ]
    table = tables.table_lines(("", "planned", "engine says", "off by"), rows, 1, columns, tail=0)
    return [*tables.fact_lines(facts, columns), *(["", *table] if rows else [])]


def event_text(event: Event) -> str:
    """One event of a journal as a line."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time_s))
    details = dict(event.details)
    head = str(details.pop("state", None) or details.pop("phase", None) or "")
    pairs = " ".join(f"{name}={value}" for name, value in details.items() if value is not None)
    return f"{moment}  {event.elapsed_s:8.1f} s  rank {event.rank}  {event.kind:<9} {head} {pairs}".rstrip()

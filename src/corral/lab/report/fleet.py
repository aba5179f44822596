"""Fleets for people: a row of `ps` with its members below, and the lines of `status`."""

from __future__ import annotations

from collections.abc import Sequence

from corral.deploy.deployment.state import State
from corral.lab.report.screen import since
from corral.serve.fleet.record import Judgement
from corral.serve.fleet.status import FleetStatus, MemberStatus


def fleet_row(found: FleetStatus) -> list[str]:
    """The fleet as `ps` shows it."""
    state = (
        found.state.value if found.state is State.STOPPED else f"{found.state.value}: {found.ready} of {found.wanted}"
    )
    url = found.endpoint.base_url if found.endpoint else "-"
    load = f"{found.running} running, {found.waiting} waiting"
    return [found.name, state, since(found.created_s), found.model, url, load]


def load_words(one: MemberStatus) -> str:
    """What gateways have on a member; empty where nobody knows."""
    if one.load is None:
        return ""
    judged = "" if one.load.judged is Judgement.OK else f", {one.load.judged.value}"
    return f"{one.load.running} running{judged}"


def fleet_lines(found: FleetStatus) -> list[str]:
    """The whole of a fleet."""
    size = str(found.wanted) if found.least == found.most else f"{found.wanted}, of {found.least} to {found.most}"
    rows = [
        ("fleet", found.name),
        ("state", f"{found.state.value}: {found.text}"),
        ("model", found.model),
        ("wanted", size),
        ("requests", f"{found.running} running, {found.waiting} waiting"),
        ("keeper", "running" if found.kept else f"not running: `corral fleet keep {found.name}` starts it"),
        ("gateways", ", ".join(found.gateways) or "none is running"),
    ]
    if found.endpoint:
        rows += [("endpoint", found.endpoint.base_url), ("key", found.endpoint.key_file or "none")]
    if found.state is State.STOPPED:
        rows = [row for row in rows if row[0] not in ("keeper", "gateways")]
    width = max(len(name) for name, _ in rows)
    return [*(f"{name:<{width}}  {value}" for name, value in rows), *_member_lines(found.members)]


def _member_lines(members: Sequence[MemberStatus]) -> list[str]:
    if not members:
        return []
    width = max(len(one.name) for one in members)
    lines = ["", "members"]
    for one in members:
        words = [str(one.state or one.text), "leaving" if one.leaving else "", load_words(one)]
        if one.status and one.status.reason and one.state is not State.READY:
            words.append(one.status.reason.value.replace("_", " "))
        lines.append(f"  {one.name:<{width}}  {', '.join(word for word in words if word)}")
    return lines

"""What runs and belongs to no deployment: jobs, processes and containers with launch ids that nobody has.

Every job, process and container of a launch carries its id, which is in the deployment's record before anything is
started. Asked are this machine, hosts over ssh, and the scheduler of every target. What cannot be asked is said, and
never counts as empty. Nothing is ended.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import cast

from corral.base.errors import CorralError
from corral.base.ssh import Ssh
from corral.deploy.deployment.folder import DeploymentFolder, all_folders
from corral.deploy.doctor.finding import Finding, Report, ok, warning
from corral.deploy.lifecycle.status import Traces, traces_of
from corral.deploy.targets.base import Target, is_of_launch
from corral.deploy.targets.keys import TARGETS, target_class
from corral.plan.hardware.survey import Asked, Here, NodeFacts, survey

HERE = "this machine"


def find_orphans(hosts: Sequence[str], timeout_s: float) -> Report:
    """Look for what nobody owns on this machine, on `hosts` and those of this home's deployments, and in queues."""
    began = time.monotonic()
    traces = [(folder, traces_of(folder)) for folder in all_folders()]
    owned = {one.launch_id for _, one in traces}
    hosts = tuple(dict.fromkeys([*hosts, *(host for _, one in traces for host in _hosts_of(one))]))
    asked = Asked(launches=True)
    answers = {**survey(Here(), [HERE], asked, timeout_s), **survey(Ssh(), hosts, asked, timeout_s)}
    findings = [
        warning("orphans", f"the record of {folder.name} cannot be read: what is of it may be listed here", "")
        for folder, one in traces
        if not one.launch_id
    ]
    for host, answer in answers.items():
        if isinstance(answer, CorralError):
            findings.append(warning("orphans", f"{host}: {answer.message}", answer.remedy, host))
        else:
            findings += _on_node(host, answer, owned)
    for name in TARGETS:
        findings += cast("type[Target]", target_class(name)).orphans(owned)
    if not findings:
        findings = [ok("orphans", "every job, process and container with a launch id belongs to a deployment")]
    nodes = tuple(one for one in answers.values() if isinstance(one, NodeFacts))
    return Report((HERE, *hosts), tuple(findings), nodes, None, seconds=time.monotonic() - began)


def _hosts_of(traces: Traces) -> Sequence[str]:
    hosts = traces.target_options.get("hosts") or traces.hosts.get("hosts") or ()
    return [host for host in hosts if isinstance(host, str)]


def _on_node(host: str, facts: NodeFacts, owned: Collection[str]) -> Iterator[Finding]:
    far = [] if host == HERE else ["ssh", host]
    for launch in facts.launches:
        if launch.id not in owned and not _is_of_another_home(launch.folder, launch.id):
            pids = [str(pid) for pid in launch.pids]
            text = f"{host}: processes {', '.join(pids)} ({launch.command}) are of launch {launch.id}"
            yield _orphan(host, text, [*far, "kill", *pids])
    for container in facts.containers:
        if container.launch not in owned:
            id = container.id[:12]
            text = f"{host}: container {id} of {container.client} is of launch {container.launch}"
            yield _orphan(host, text, [*far, container.client, "rm", "-f", id])
    for part in ("launches", "containers"):
        if part in facts.errors:
            yield warning("orphans", f"{host}: its {part} are not known: {facts.errors[part]}", "", host)


def _orphan(host: str, text: str, end: Sequence[str]) -> Finding:
    remedy = f"If nobody needs it: {shlex.join(end)}"
    return warning("orphan", f"{text}, which no deployment of this home has", remedy, host)


def _is_of_another_home(folder: str, launch_id: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(folder) and is_of_launch(DeploymentFolder(Path(folder)), launch_id)
    return False

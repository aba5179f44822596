"""`corral status NAME`: one deployment in full."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import click

from corral.base.errors import CorralError
from corral.base.record import load_json, to_json
from corral.cli.options import deployment_argument
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import amount, duration
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle.deployments import Status, status
from corral.deploy.lifecycle.members import HeldJob, RankMember, held_job, members
from corral.deploy.lifecycle.watching import learn_from
from corral.lab.report import tables
from corral.lab.report.fleet import fleet_lines
from corral.lab.report.screen import print_json, say_waiting, since
from corral.plan.measured import Differences
from corral.serve.fleet.chain import choose_folder, read_chain, read_members
from corral.serve.fleet.status import chosen_fleet, fleet_status

CONNECT_S = 1.0  # a kernel answers, however busy its machine is; a node that is cut off does not
ANSWER_S = 3.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@deployment_argument
@click.option("--json", "as_json", is_flag=True, help="The whole status as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """Show one deployment: state, reason, endpoint, what the engine reported. Exit code 8 when it has failed.

    Of a fleet: its members, each with its state and load, its gateways and its address.
    """
    say_waiting()
    if fleet := chosen_fleet(name):
        whole = fleet_status(fleet)
        print_json(whole) if as_json else click.echo("\n".join(fleet_lines(whole)))
        return
    folder = choose_folder(name)
    found = status(folder)
    if found.state is State.READY:
        with contextlib.suppress(OSError, CorralError):  # its log may be on a node; the status is what was asked for
            learn_from(folder)  # nobody waited for it to be ready
    compared = load_json(Differences, folder.differences) if folder.differences.is_file() else None
    answers = _answers(found.endpoint) if found.state is State.READY and found.endpoint else None
    nodes, job = members(folder), held_job(folder)
    if as_json:
        more_json = {"plan_against_engine": compared, **_where(nodes, job), "followed_by": _following(folder)}
        print_json({**to_json(found), "answers": answers, **more_json})
    else:
        facts = [*status_facts(found, answers, nodes, job), *_followers(folder)]
        click.echo("\n".join(status_lines(facts, compared, tables.room())))
    if found.state is State.FAILED:
        raise SystemExit(8)


def _where(nodes: Sequence[RankMember], job: HeldJob | None) -> dict[str, object]:
    several = [node.node for node in nodes] if len(nodes) > 1 or job else []
    return {"nodes": several, "members": nodes, "job": job}


def _following(folder: DeploymentFolder) -> list[dict[str, str]]:
    """Its successors with their states."""
    return [{"name": one.folder.name, "state": one.state.value} for one in read_members(folder)[1:]]


def _followers(folder: DeploymentFolder) -> list[tuple[str, str]]:
    """The successors of a deployment that is renewed."""
    chain = read_chain(folder)
    if chain is None:
        return []
    successors = ", ".join(f"{one['name']} ({one['state']})" for one in _following(folder))
    return [("followed by", (successors or "nothing yet") + (f"; no more: {chain.closed}" if chain.closed else ""))]


def _answers(endpoint: Endpoint) -> bool:
    """Whether the server answers right now: the state is what its agent saw up to five seconds ago."""
    address = urlsplit(endpoint.base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=CONNECT_S)
    try:
        connection.connect()
        connection.sock.settimeout(ANSWER_S)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _node_rows(nodes: Sequence[RankMember]) -> list[tuple[str, str]]:
    """Who has joined of those expected, and each node with its GPUs."""
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


def _phase_words(found: Status) -> str:
    """What it is doing, how far that is, since when and until when."""
    far = f" {amount(found.done or 0, found.total)}" if found.total else ""
    left_s = found.phase_ends_s - time.time() if found.phase_ends_s else 0.0
    left = f", {duration(left_s)} left" if left_s > 0 else ""  # past it the pace did not hold, and nobody knows
    usual = f" ({found.expected.text})" if found.expected else ""
    return f"{found.phase}{far} for {since(found.phase_since_s)}{left}{usual}"


def status_facts(
    found: Status, answers: bool | None, nodes: Sequence[RankMember], job: HeldJob | None
) -> list[tuple[str, str]]:
    """What is known of it, each under its name."""
    rows = [("name", found.name), ("state", f"{found.state} for {since(found.since_s)}")]
    if answers is False:
        rows.append(("but", "its server does not answer at this moment"))
    if found.state in (State.STAGING, State.STARTING, State.LOADING) and found.phase != State.STAGING:
        rows.append(("phase", _phase_words(found)))
    if found.reason:
        rows.append(("reason", found.reason.value.replace("_", " ")))
    if found.text:
        rows.append(("because", found.text))
    if found.remedy and (found.state in ENDED or found.state in (State.QUEUED, State.UNKNOWN)):
        rows.append(("do", found.remedy))
    rows += [("model", found.model), ("engine", found.engine or "-"), ("target", found.target)]
    if job:
        rows.append(_job_row(job, found.state))
    if len(nodes) > 1 or (nodes and job):
        rows += _node_rows(nodes)
    if found.endpoint:
        rows += [("endpoint", found.endpoint.base_url), ("key", found.endpoint.key_file or "none")]
    if found.timings.ready_s is not None:
        rows.append(("ready after", duration(found.timings.ready_s)))
    if found.restarts:
        rows.append(("restarts", str(found.restarts)))
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
    """The facts, and the plan held against what the engine reported."""
    rows = [
        (PLANNED[row.name], f"{row.predicted:,g}", f"{row.observed:,g}", f"{row.percent:+.1f}%")
        for row in (compared.rows if compared else ())
        if row.name in PLANNED
    ]
    table = tables.table_lines(("", "planned", "engine says", "off by"), rows, 1, columns, tail=0)
    return [*tables.fact_lines(facts, columns), *(["", *table] if rows else [])]

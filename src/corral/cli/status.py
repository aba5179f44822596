"""`corral status NAME`: one deployment in full."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Sequence
from urllib.parse import urlsplit

import click

from corral.base.errors import CorralError
from corral.base.record import load_json, to_json
from corral.base.shell import answering_soon
from corral.cli.options import deployment_argument, json_option
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import durations, expected_of
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.deployments import HeldJob, RankMember, held_job, members, status
from corral.deploy.lifecycle.watching import learn_from
from corral.lab.report import tables
from corral.lab.report.screen import print_json, say_waiting
from corral.lab.report.status import fleet_lines, start_rows, status_facts, status_lines
from corral.plan.measured import Differences
from corral.serve.fleet.chain import choose_folder, read_chain, read_members
from corral.serve.fleet.status import chosen_fleet, fleet_status

CONNECT_S = 1.0  # a kernel answers, however busy its machine is; a node that is cut off does not
ANSWER_S = 3.0


@click.command()
@deployment_argument
@json_option("The whole status as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """Show one deployment: state, reason, endpoint, what the engine reported. Exit code 8 when it has failed.

    Of a fleet: its members, each with its state and load, its gateways and its address.
    """
    say_waiting()
    with answering_soon():
        _show(name, as_json)


def _show(name: str | None, as_json: bool) -> None:
    if fleet := chosen_fleet(name):
        fleet_now = fleet_status(fleet)
        print_json(fleet_now) if as_json else click.echo("\n".join(fleet_lines(fleet_now)))
        return
    folder = choose_folder(name)
    current = status(folder)
    if current.state is State.READY:
        with contextlib.suppress(OSError, CorralError):  # its log may be on a node; the status is what was asked for
            learn_from(folder)  # nobody waited for it to be ready
    compared = load_json(Differences, folder.differences) if folder.differences.is_file() else None
    answers = _answers(current.endpoint) if current.state is State.READY and current.endpoint else None
    nodes, job = members(folder), held_job(folder)
    if as_json:
        more_json = {"plan_against_engine": compared, **_where(nodes, job), "followed_by": _following(folder)}
        more_json["phases"] = _took(folder)
        print_json({**to_json(current), "answers": answers, **more_json})
    else:
        start = start_rows(_took(folder), expected_of(folder))
        facts = [*status_facts(current, answers, nodes, job), *start, *_followers(folder)]
        click.echo("\n".join(status_lines(facts, compared, tables.room())))
    if current.state is State.FAILED:
        raise SystemExit(8)


def _took(folder: DeploymentFolder) -> dict[str, float]:
    """Seconds of each phase of a start that became ready."""
    return durations(read_events(folder.rank(0).events))


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

"""Why a deployment does not answer now: what it is doing and for how long, or how it ended, in its own diagnosis."""

from __future__ import annotations

import shlex
import time

from corral.base.errors import CorralError, LaunchError, NotFoundError
from corral.base.wording import duration
from corral.client.endpoint import Absence
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.deploy.lifecycle.deployments import Status
from corral.deploy.lifecycle.successors import ChainMember, all_standings, read_chain


def describe(status: Status, now_s: float) -> str:
    """What a deployment is doing, for somebody who waits for it."""
    if status.state is State.READY:
        return f"{status.name} is ready, but its server does not answer"
    if status.state in (State.STARTING, State.LOADING):
        amount = f" {status.done}/{status.total}" if status.total else ""
        elapsed_s = max(0.0, now_s - (status.phase_since_s or status.since_s))
        usual = f" ({status.expected.text})" if status.expected else ""
        return f"{status.name} is {status.phase or status.state}{amount}, for {duration(elapsed_s)} now{usual}"
    return f"{status.name} is {status.state}" + (f": {status.text}" if status.text else "")


def ending_of(status: Status) -> CorralError:
    """The error that tells how a deployment ended; one that failed has its own diagnosis and remedy."""
    why = f": {status.text}" if status.text else ""
    again = f"Start it again with `corral up`; `corral logs {shlex.quote(status.name)}` shows its last words."
    reason = status.reason.value if status.reason else ""
    details = {"name": status.name, "state": status.state.value, "reason": reason}
    if status.state is State.FAILED:
        return LaunchError(f"{status.name!r} has failed{why}.", status.remedy or again, **details)
    return NotFoundError(f"{status.name!r} is stopped{why}.", status.remedy or again, **details)


def absence_of(folder: DeploymentFolder) -> Absence:
    """Why neither a deployment nor any of its successors answers."""
    standings = all_standings(folder)
    coming = [one for one in standings if one.state not in ENDED]
    if coming:
        return _coming(coming[-1])
    last = standings[-1].status
    if folder.successors.exists() and not read_chain(folder).closed:
        return Absence(f"{standings[-1].folder.name} has ended, and its successor is not submitted yet")
    assert last is not None  # one that could not be asked is of unknown state, which is no end
    error = ending_of(last)
    return Absence(error.message.rstrip("."), error.remedy, error, last.reason is Reason.REQUESTED)


def _coming(one: ChainMember) -> Absence:
    if one.status is None:
        return Absence(f"{one.folder.name} cannot be looked at: {one.text}")
    return Absence(describe(one.status, time.time()), one.status.remedy)

"""The state of a deployment, its reason and its remedy, from the end of its journal and what its target knows.

Pure: nothing is changed, and no node is asked. `traces_of` reads which launch it was, and where, when some files of a
deployment are empty, cut off or changed (a full disk, an editor). The launch id is in several of them, and every
process of the launch carries it: that is enough to end what runs.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from corral.base.errors import CorralError
from corral.base.files import is_gone
from corral.base.processes import Identity
from corral.base.untrusted import parse_json
from corral.deploy.deployment.diagnosis import Diagnosis, diagnose, explain_slow, last_lines
from corral.deploy.deployment.events import Event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.deploy.targets.base import AgentsStatus
from corral.deploy.targets.keys import target_class

SILENT_S = 60.0  # an agent writes a heartbeat every two seconds

WHOLE_LOG = "The whole log: `corral logs {name}`."
REMEDIES = {
    Reason.NOT_ADVANCING: "`corral logs {name}` shows what it did; if it was only slow, start it again with a longer"
    " --stall.",
    Reason.STALLED: "`corral logs {name}` shows its last lines; start again, with a longer --stall if it was slow.",
    Reason.ENGINE_HUNG: "Start it again (`--restart 3` does so by itself); the log may say what it waited for.",
    Reason.PORT_TAKEN: "Start it again: another free port is chosen; or name one with --port.",
    Reason.NOT_GUARDED: "The guard was not loaded; report this with `corral logs {name}`. The server was taken down.",
    Reason.AGENT_KILLED: "Start it again with `corral up`; on a shared machine, find out who killed it.",
    Reason.NODE_LOST: "`corral doctor` looks at the node; then start again (`--restart N` does so when it returns).",
    Reason.NETWORK: "`corral doctor` shows the interfaces all nodes share; name one with --interface.",
    Reason.WALLTIME: "Start it again with `corral up`, with a longer --time if it was too short.",
    Reason.ENGINE_BROKEN: "Run `corral engine check`; reinstall the engine if it fails.",
}


class StateVerdict(NamedTuple):
    """A state with its reason, a text, and the remedy."""

    state: State
    reason: Reason | None
    text: str
    remedy: str


_GIVEN_UP: set[str] = set()  # launches that this process did not start after all, although it lives on


def give_up(launch_id: str) -> None:
    """Note that no thread of this process stages a launch any more: its folder may be there still."""
    _GIVEN_UP.add(launch_id)


def verdict(
    folder: DeploymentFolder, called: str, launch_id: str, made_by: Identity, last: Event | None, agents: AgentsStatus
) -> StateVerdict:
    """The last state of the journal, unless the target knows better; `made_by` is the command that stages it."""
    name = shlex.quote(called)
    state = State(last.get("state")) if last else State.STARTING
    reason = Reason(last.get("reason")) if last and last.get("reason") else None
    text, remedy = str(last.get("text", "")) if last else "", ""
    if agents.state and (state not in ENDED or (agents.overrules and agents.reason is not reason)):
        state, reason = agents.state, agents.reason
        text, remedy = agents.text, agents.remedy
    elif is_gone(folder.rank(0).agent):
        state, reason, text, remedy = _staged(made_by, launch_id)
    elif state not in ENDED and agents.alive is False:
        state, reason, text, remedy = _lost(agents.machine_restarted, name)
    elif state not in ENDED and heartbeat_age_s(folder) > SILENT_S:
        state, text = State.UNKNOWN, f"its agent on {agents.where} has written nothing for {SILENT_S:.0f} s"
    if state is State.FAILED and reason is Reason.ENGINE_EXITED and last:
        diagnosis = _diagnosis(folder, last, name)
        reason, text, remedy = diagnosis.reason, diagnosis.cause, diagnosis.remedy
    elif state is State.FAILED and last and reason in (Reason.NOT_ADVANCING, Reason.STALLED):
        text, remedy = _why_slow(last, text, name)
    elif state is State.FAILED and not remedy:
        remedy = REMEDIES.get(reason or Reason.ENGINE_EXITED, WHOLE_LOG).format(name=name)
    return StateVerdict(state, reason, text, remedy)


def _staged(made_by: Identity, launch_id: str) -> StateVerdict:
    """A deployment without an agent yet ends with the command that stages it."""
    if not made_by.is_here():
        return StateVerdict(State.UNKNOWN, None, f"being made by a command on {made_by.host}; look from there", "")
    if not made_by.is_gone() and launch_id not in _GIVEN_UP:
        return StateVerdict(State.STAGING, None, "installing the engine or fetching the model", "")
    text = "the command that was making it ended before the engine started"
    remedy = "Run the same `corral up` again; finished downloads are kept."
    return StateVerdict(State.STOPPED, Reason.INTERRUPTED, text, remedy)


def _lost(machine_restarted: bool, name: str) -> StateVerdict:
    if machine_restarted:
        text = "the machine was restarted"
        return StateVerdict(State.STOPPED, Reason.MACHINE_RESTARTED, text, "Start it again with `corral up`.")
    text = "its agent disappeared without writing why: it was killed together with its supervisor"
    remedy = f"Run `corral down {name}` to clear what is left, then `corral up`."
    return StateVerdict(State.FAILED, Reason.AGENT_KILLED, text, remedy)


def heartbeat_age_s(folder: DeploymentFolder) -> float:
    head = folder.rank(0)
    for file in (head.heartbeat, head.agent):  # a new agent has written no heartbeat yet
        with contextlib.suppress(OSError):
            return time.time() - file.stat().st_mtime
    return 1e9


def _diagnosis(folder: DeploymentFolder, last: Event, name: str) -> Diagnosis:
    if last.get("explained"):
        return Diagnosis(Reason.ENGINE_EXITED, str(last.get("text")), WHOLE_LOG.format(name=name))
    failed = int(last.get("failed_rank", 0))
    lines = last_lines(folder.rank(failed).log, 200, int(last.get("log_from", 0)))
    diagnosis = diagnose(
        lines,
        last.get("exit_code"),
        last.get("signal"),
        bool(last.get("kernel_oom_kill")),
        bool(last.get("was_ready")),
        bool(last.get("container")),
        name,
    )
    node = last.get("node")  # where there are several
    return replace(diagnosis, cause=f"rank {failed} on {node}: {diagnosis.cause}") if node else diagnosis


def _why_slow(last: Event, text: str, name: str) -> tuple[str, str]:
    """Why a start did not advance, as far as the engine's lines show, and what to do."""
    line = str(last.get("line") or "")
    text = f"{text}; the engine's last line: {line.rstrip('.')}" if line else text
    why = explain_slow([*last.get("lines", ()), line], name)
    if why is None:
        return text, REMEDIES[Reason(last.get("reason"))].format(name=name)
    return f"{text}; likely {why.cause}", why.remedy


_LAUNCH_ID = re.compile(rb'"launch_id"\s*:\s*"([A-Za-z0-9_.-]{1,100})"')
_TARGET = re.compile(rb'"target"\s*:\s*"([A-Za-z0-9_-]{1,40})"')
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Traces:
    """What the files of a deployment still say; empty where none does."""

    launch_id: str = ""
    target: str = ""
    target_options: dict[str, Any] = field(default_factory=dict)  # what makes the target again
    nodes: tuple[str, ...] = ()

    @property
    def hosts(self) -> dict[str, Any]:
        """Options of a target that names its nodes, where only the launch has them."""
        known = self.target and self.nodes and "hosts" in target_class(self.target).REQUIRED
        return {"hosts": list(self.nodes)} if known else {}


def traces_of(folder: DeploymentFolder) -> Traces:
    """What the record, the launch and the ranks' files say together, each as far as it can be read."""
    files = [folder.record, folder.launch, *(rank.spec for rank in folder.ranks())]
    texts = [_bytes(path) for path in files]
    record, launch = _object(texts[0]), _object(texts[1])
    target_options, ranks = record.get("target_options"), launch.get("ranks")
    nodes = [rank.get("node") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    return Traces(
        _first(_LAUNCH_ID, texts),
        _first(_TARGET, texts[:2]),
        target_options if isinstance(target_options, dict) else {},
        tuple(node for node in nodes if isinstance(node, str)),
    )


def _bytes(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_MOST_BYTES)
    return b""


def _object(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(CorralError):
        body = parse_json(text, "x")
        return body if isinstance(body, dict) else {}
    return {}


def _first(wanted: re.Pattern[bytes], texts: list[bytes]) -> str:
    """The first match, read from text and not from JSON: half a file still has it."""
    return next((match[1].decode() for text in texts if (match := wanted.search(text))), "")

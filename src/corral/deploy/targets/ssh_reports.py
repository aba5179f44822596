"""What the agents on nodes elsewhere report: asked of all nodes at once, decoded, and mirrored into the folder here.

The mirror has the same names and the same offsets as the original, so that everything that reads a deployment's
folder works for remote nodes too. A long log is copied from its end; what was left out stays a hole.

A node may be in anybody's hands. Nothing in its answer may choose a path on this machine, a size without limit, or a
type that a reader does not expect; an impossible answer is one error that names the host, and nothing is written.

A deployment's state is what its head's journal says; where the head cannot be reached, the last state of another rank
counts. A node that does not answer is therefore no verdict: `gather` only stops waiting for it once its answer would
change nothing. The agents alone decide that a node is lost: they talk several times a second (`node/agent/gang.py`),
and a busy machine must not fail because an ssh connection took too long.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from corral.base.bundle import bundle
from corral.base.errors import CorralError, DataError, UnreachableError
from corral.base.files import make_private_dir, write_atomic
from corral.base.processes import Identity
from corral.base.record import dump_json, from_json
from corral.base.shell import CommandHandle, within_deadline
from corral.base.ssh import ANNOUNCE_AFTER_S, FAN_OUT, WAITING
from corral.base.untrusted import last_object
from corral.deploy.deployment.events import last_state
from corral.deploy.deployment.folder import DeploymentFolder, RankFolder
from corral.deploy.deployment.state import ENDED, Reason, State
from corral.deploy.launch.render import LaunchSpec
from corral.node.network import some_of

# The files of a rank that are brought here, and up to which length: an agent cuts its engine's log at 64 MiB
MIRRORED = {"events.jsonl": 64 << 20, "engine.log": 256 << 20, "load.jsonl": 8 << 20}
PIECE_BYTES = 4 << 20  # as in node/remote.py
OLDEST_S = 10 * 365 * 86400.0
REMEDY = "Something other than Corral's agent answers there: look at the node."


@dataclass(frozen=True)
class LogPiece:
    """A part of one of the mirrored files."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class Heartbeat:
    """The agent's last heartbeat."""

    t: float = 0.0
    state: str = ""
    phase: str = ""


@dataclass(frozen=True)
class NodeReport:
    """The state of a rank's node, and what its agent wrote since the last report."""

    missing: bool = False  # the node has no such folder
    boot_id: str = ""
    alive: bool | None = None  # None: no agent ever wrote who it is
    pieces: Mapping[str, LogPiece] | None = None
    agent: Identity | None = None
    agent_age_s: float = 0.0
    heartbeat: Heartbeat | None = None
    heartbeat_age_s: float = 0.0


@dataclass(frozen=True)
class Started:
    pid: int = 0
    error: str = ""


@dataclass(frozen=True)
class Stopped:
    """Processes and containers that could not be ended."""

    left: tuple[int | str, ...]
    containers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Removed:
    """Whether the deployment's folder is gone from the node."""

    removed: bool


def read_removed(text: str, host: str) -> Removed:
    return from_json(Removed, _answer(text, host), _what(host))


def read_started(text: str, host: str) -> Started:
    return from_json(Started, _answer(text, host), _what(host))


def read_stopped(text: str, host: str) -> Stopped:
    return from_json(Stopped, _answer(text, host), _what(host))


def read_report(text: str, host: str, held: Mapping[str, int]) -> NodeReport:
    """The report, whose pieces must continue what is `held` here, or start again."""
    body = _answer(text, host)
    files = body.pop("files", {})
    if not isinstance(files, dict):
        raise DataError(f"{_what(host)}: its files must be an object.", REMEDY)
    flat = {name.replace(".json", ""): value for name, value in body.items()}
    report = from_json(NodeReport, {**flat, "pieces": None}, _what(host))
    for age_s in (report.agent_age_s, report.heartbeat_age_s):
        if not 0.0 <= age_s <= OLDEST_S:
            raise DataError(f"{_what(host)} says that a file is {age_s:g} s old.", REMEDY)
    pieces = {name: _piece(name, part, held.get(name, 0), host) for name, part in files.items()}
    fitting = {name: piece for name, piece in pieces.items() if piece.offset + len(piece.data) <= MIRRORED[name]}
    return replace(report, pieces=fitting)


def _piece(name: str, part: Any, held: int, host: str) -> LogPiece:
    if name not in MIRRORED:
        raise DataError(f"{_what(host)} holds {name!r}, which was not asked for.", REMEDY)
    if not isinstance(part, dict) or type(part.get("offset")) is not int or not isinstance(part.get("data"), str):
        raise DataError(f"{_what(host)}: its {name} must have an offset and data.", REMEDY)
    try:
        data = base64.b64decode(part["data"], validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"{_what(host)}: the data of its {name} is not base64.", REMEDY) from None
    offset: int = part["offset"]
    ahead = offset > held and name == "engine.log"  # brought from its end
    if not (offset in (0, held) or ahead) or len(data) > PIECE_BYTES:
        raise DataError(
            f"{_what(host)}: {len(data):,} bytes at {offset:,} do not continue its {name}; {held:,} are here.",
            REMEDY,
        )
    return LogPiece(offset, data)


def _answer(text: str, host: str) -> dict[str, Any]:
    """The node's JSON object, without the name that it has for itself."""
    body = last_object(text, _what(host), remedy=REMEDY)
    body.pop("host", None)
    return body


def _what(host: str) -> str:
    return f"the answer of {host}"


def pack(spec: LaunchSpec, folder: DeploymentFolder, texts: Mapping[str, object]) -> bytes:
    """An archive of the files of one node: Corral's own, the key, the token, and those in `texts`."""
    files = {f"node/{file.name}": bundle(file.resource).encode() for file in spec.files}
    files |= {"key": folder.key.read_bytes(), "token": folder.token.read_bytes()}
    files |= {name: dump_json(body).encode() for name, body in texts.items()}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def mirrored_sizes(rank: RankFolder) -> dict[str, int]:
    """How much of each file is here already."""
    paths = {name: rank.path / name for name in MIRRORED}
    return {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}


def mirror(rank: RankFolder, report: NodeReport) -> None:
    """Write here what the agent wrote there; two writers at once write the same bytes."""
    if report.missing:
        return
    make_private_dir(rank.path)
    for name, piece in (report.pieces or {}).items():
        descriptor = os.open(rank.path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            if piece.offset == 0 and piece.data:
                file.truncate(0)
            file.seek(piece.offset)  # the part of a long log that was left out stays a hole, so that offsets agree
            file.write(piece.data)
    _mirror_record(rank.agent, report.agent, report.agent_age_s)
    _mirror_record(rank.heartbeat, report.heartbeat, report.heartbeat_age_s)


def _mirror_record(path: Path, record: Identity | Heartbeat | None, age_s: float) -> None:
    """A small file, as old here as it is there."""
    if record is not None:
        write_atomic(path, dump_json(record))
        moment = time.time() - age_s
        os.utime(path, (moment, moment))


def failure_of(rank: RankFolder) -> tuple[Reason, str] | None:
    """Why a rank has failed, by its own journal; None when it has not."""
    last = last_state(rank.events)
    if last is None or last.get("state") != State.FAILED:
        return None
    return Reason(last.get("reason") or Reason.NODE_LOST), str(last.get("text", ""))


REPORT_S = 4.0  # a node whose report takes longer counts as unreachable for the moment
USUAL_TIMES = 3.0  # of the longest recent answer: for so long a command that answers soon waits, if it has the time
AWAY_S = 15.0  # for which a rank that did not answer in time is not waited for
SOON_AGAIN_S = 60.0  # after which a command that answers soon waits once more for as long as any other
AGAIN_S = 1.0  # after which the others are asked again while the head is silent: they may learn that it is lost
Answers = dict[str, NodeReport | CorralError]
Ask = Callable[
    [str, RankFolder, float, CommandHandle], NodeReport
]  # a host, its rank, for how long, and what ends it


def gather(folder: DeploymentFolder, hosts: Sequence[str], ask: Ask) -> Answers:
    """The reports of the hosts, mirrored into the folder; returns once no further answer would change the state."""
    inquiry = _Inquiry(folder, hosts, ask)
    try:
        inquiry.follow()
    finally:
        inquiry.close()
    return inquiry.answers


def is_away(rank: RankFolder, within_s: float = AWAY_S) -> bool:
    """Whether the node of this rank did not answer a moment ago, this command or another one."""
    with contextlib.suppress(OSError):
        return 0.0 <= time.time() - _note(rank).stat().st_mtime < within_s
    return False


def _note(rank: RankFolder) -> Path:
    return rank.path / "away"


def _patience_s(rank: RankFolder) -> float:
    """How long its node may take to answer this command.

    A command that answers soon waits for three usual answers of the node, and at least while it has time. Where the
    usual time is not known it waits for as long as any other, because a first connection may take seconds; but not
    again within a minute.
    """
    soon_s = within_deadline(REPORT_S)
    return soon_s if is_away(rank, SOON_AGAIN_S) else max(soon_s, min(REPORT_S, USUAL_TIMES * _usual_s(rank)))


def _usual_s(rank: RankFolder) -> float:
    with contextlib.suppress(OSError, ValueError):
        return float(_time_note(rank).read_text(encoding="utf-8"))
    return REPORT_S


def _remember_time(rank: RankFolder, seconds: float) -> None:
    """Note a longer answer at once, and a shorter one little by little."""
    known_s = _usual_s(rank) if _time_note(rank).exists() else 0.0
    if seconds > known_s or seconds < known_s / 2:
        with contextlib.suppress(OSError):
            write_atomic(_time_note(rank), f"{max(seconds, 0.8 * known_s):.2f}")


def _time_note(rank: RankFolder) -> Path:
    return rank.path / "answer_s"


class _Inquiry:
    """One round of requests: a thread for every host, and one place that reads the answers."""

    def __init__(self, folder: DeploymentFolder, hosts: Sequence[str], ask: Ask) -> None:
        self.answers: Answers = {}
        self._hosts = hosts
        self._ranks = {host: folder.rank(number) for number, host in enumerate(hosts)}
        self._away = {host for host in hosts[1:] if is_away(self._ranks[host])}
        self._patience_s = {host: _patience_s(rank) for host, rank in self._ranks.items()}
        self._ask = ask
        self._came: Queue[tuple[str, NodeReport | Exception]] = Queue()
        self._over = threading.Event()
        self._leashes = {host: CommandHandle() for host in hosts}
        self._seats = threading.Semaphore(FAN_OUT)
        for host in hosts:
            threading.Thread(target=self._poll, args=(host,), daemon=True).start()

    def _poll(self, host: str) -> None:
        """Ask a host; all but the head again and again, until the round is over."""
        while not self._over.is_set():
            with self._seats:
                self._came.put((host, self._once(host)))
            if host == self._hosts[0] or self._over.wait(AGAIN_S):
                return

    def _once(self, host: str) -> NodeReport | Exception:
        rank, began_s = self._ranks[host], time.monotonic()
        try:
            report = self._ask(host, rank, self._patience_s[host], self._leashes[host])
            _remember_time(rank, time.monotonic() - began_s)
            return report
        except Exception as error:
            return error

    def follow(self) -> None:
        quiet_until: float | None = time.monotonic() + ANNOUNCE_AFTER_S  # None: the user has been told
        while late := self._needed():
            left_s = None if quiet_until is None else max(0.0, quiet_until - time.monotonic())
            try:
                self._handle(*self._came.get(timeout=left_s))
            except Empty:
                WAITING.get()(f"waiting for {some_of(late, 5)}")
                quiet_until = None

    def close(self) -> None:
        """Give up the requests that are still running; their answers come with the next round."""
        self._over.set()
        for leash in self._leashes.values():
            leash.kill()

    def _handle(self, host: str, answer: NodeReport | Exception) -> None:
        rank = self._ranks[host]
        if isinstance(answer, NodeReport):
            try:
                mirror(rank, answer)
                _note(rank).unlink(missing_ok=True)
            except OSError as error:  # a full disk, a folder that is read-only: nothing is known of the node
                text = f"what {host} reports cannot be kept here: {error.strerror}: {error.filename}."
                answer = UnreachableError(text, "Check the path, its permissions and free space.")
        elif isinstance(answer, UnreachableError) and not is_away(rank):
            with contextlib.suppress(OSError):  # a full disk here: the next command waits again
                write_atomic(_note(rank), answer.message)
                _time_note(rank).unlink(missing_ok=True)
        elif not isinstance(answer, CorralError):
            raise answer
        self.answers[host] = answer

    def _needed(self) -> list[str]:
        """The hosts whose answers the deployment's state still depends on."""
        head, *others = self._hosts
        if isinstance(self.answers.get(head), NodeReport):
            cause = _cause(self._ranks[head])
            if cause is not None:
                others = [self._hosts[cause]] if 0 < cause < len(self._hosts) else []
            return [host for host in others if host not in self.answers and host not in self._away]
        if any(_has_lost_its_head(self._ranks[host]) for host in others if host in self.answers):
            return []
        return [host for host in self._hosts if host not in self.answers and host not in self._away]


def _has_lost_its_head(rank: RankFolder) -> bool:
    """Whether a rank failed because of a lost node; for any other reason, the head itself told it to end."""
    failure = failure_of(rank)
    return failure is not None and failure[0] is Reason.NODE_LOST


def _cause(head: RankFolder) -> int | None:
    """Once the deployment has ended: the rank whose log says why, or the head; None while it runs.

    A lost node has no answer, and is not waited for. A node whose agent is gone may be alive: asking it deletes the
    secrets there, which are no longer needed.
    """
    last = last_state(head.events)
    if last is None or last.get("state") not in ENDED:
        return None
    failed = last.get("failed_rank")
    lost = last.get("reason") == Reason.NODE_LOST and not last.get("closed")
    return failed if isinstance(failed, int) and not lost else 0

"""A fleet: several servers of one model under one name, one address and one key. Files only.

    <name>/
      fleet.json            model, how many members are wanted, and who they are
      key                   the key of its clients (0600); each member keeps its own
      wish.json             how members are made
      events.jsonl          what was decided about it, each line with its reason
      keeper.lock           the process that keeps it; keeper.log is what that says
      gateway.log           what the gateways say that this process has started
      gateways/ID.json      where a gateway listens; gateways/ID.load.json is what it has to do, ID.sock what its
                            successor gets its listening socket from

A member is an ordinary deployment called `FLEET-1`, `FLEET-2`, …; its folder is a deployment's. A fleet and a
deployment never have the same name. Only who holds the fleet's lock writes `fleet.json`; gateways write their own.

A chain (`corral up --renew`) is a fleet of one whose jobs follow each other as `NAME`, `NAME~2`, `NAME~3`, …. It
keeps these files in the folder of the deployment `NAME`, whose key is that of all its jobs, and it has no gateway of
its own (see `serve.fleet.chain`).
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from corral.base.errors import ConflictError, CorralError, DataError, NotFoundError, UsageError
from corral.base.files import changed_s, is_gone, make_private_dir, records_in, write_atomic
from corral.base.home import fleets_dir
from corral.base.lock import FileLock, exclusive_lock, silence_s, wait_notice
from corral.base.processes import Identity
from corral.base.record import load_json, nearest, save_record
from corral.client.http1 import http_url
from corral.deploy.deployment.folder import DeploymentFolder, folder_name, set_aside
from corral.plan.hardware.inventory import NodeSlice

OLD_LOCK_S = 900.0  # a submission takes seconds
FRESH_S = 5.0  # a gateway writes its load every second
BEAT_S = 4.0  # a keeper touches its lock so often
SILENT_S = 20.0  # after which a keeper or a gateway of another machine counts as gone
LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class FleetMember:
    """One server of a fleet."""

    name: str  # of its deployment
    leaving: bool = False  # it gets no new requests, and is stopped once its running ones have ended
    leaving_s: float = 0.0  # wall-clock time since when
    share: NodeSlice = field(default_factory=NodeSlice)  # of the fleet's machines
    added_s: float = 0.0  # wall-clock time since when it belongs to the fleet: what ended before had only its name
    expiring: bool = False  # its job nears its end: another member takes its place, whatever is measured later
    ended: bool = False  # of a chain: its job is over, and nothing more is asked of it
    never_ready: bool = False  # of a chain: it ended without having been ready


@dataclass(frozen=True)
class FleetNode:
    """A machine that members are placed on, as it was when the fleet was made."""

    name: str
    gpus: int = 0
    cores: tuple[int, ...] = ()
    memory_bytes: int = 0  # that was free


@dataclass(frozen=True)
class Fleet:
    """What a fleet is to be, and who belongs to it."""

    name: str
    model: str  # the name that its members serve
    least: int
    most: int
    wanted: int
    created_s: float
    members: tuple[FleetMember, ...] = ()
    route: str = "prefix"
    host: str = "127.0.0.1"  # where its own gateway listens
    port: int | None = None  # None: one that follows from the name
    nodes: tuple[FleetNode, ...] = ()  # that members share; empty: whoever gives the nodes divides them
    keep: bool = False  # a member whose job reaches its time limit is replaced in time
    closed: str = ""  # why it has ended; empty while it is to run
    chain: bool = False  # its members are jobs that follow each other; its keeper runs inside them
    max_jobs: int | None = None  # of a chain, in all; None: without end
    allowed_origins: tuple[str, ...] = ()  # whose pages may use its gateway
    gateways: tuple[Identity, ...] = ()  # that its keepers started, one for each machine

    def serving(self) -> tuple[str, ...]:
        """The members that may get new requests."""
        return tuple(one.name for one in self.members if not one.leaving and not one.ended)

    def has_had_its_last_job(self) -> bool:
        return self.max_jobs is not None and len(self.members) >= self.max_jobs

    def member(self, name: str) -> FleetMember | None:
        return next((one for one in self.members if one.name == name), None)


class Judgement(enum.StrEnum):
    """What a gateway holds of a member, by its progress."""

    OK = "ok"
    SLOW = "slow"  # it advances, but far behind the others
    HUNG = "hung"  # it has work and does not advance
    GONE = "gone"  # it does not answer


@dataclass(frozen=True)
class MemberLoad:
    """A member as one gateway sees it."""

    running: int = 0
    outstanding_tokens: int = 0
    tokens_per_s: float = 0.0  # measured while it had work
    last_progress_s: float = 0.0  # wall-clock time at which it last completed a step or moved bytes
    judged: Judgement = Judgement.OK


@dataclass(frozen=True)
class GatewayLoad:
    """What one gateway has to do for one fleet."""

    time_s: float  # wall-clock time of writing
    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    arrivals: tuple[int, ...] = ()  # requests that came in each 5 s of the last 60, oldest first
    arrived_tokens: tuple[int, ...] = ()  # their tokens, prompt and expected output
    oldest_wait_s: float = 0.0
    members: dict[str, MemberLoad] = field(default_factory=dict)
    finished: int = 0  # requests, since the gateway began
    at_urls: dict[str, MemberLoad] = field(default_factory=dict)  # servers that it has beside the fleet's, by URL


@dataclass(frozen=True)
class GatewayAddress:
    """Where a gateway listens, as written in the folder of each fleet it serves."""

    host: str
    port: int
    holder: Identity | None = None  # None: it has ended; a new one comes back on the same port
    models: tuple[str, ...] = ()
    written_by: str = ""  # the version of the gateway; empty: one that did not write it

    @property
    def machine(self) -> str:
        """The machine that it runs on; empty: this one."""
        return "" if self.holder is None or self.holder.host == socket.gethostname() else self.holder.host

    @property
    def url(self) -> str:
        """Where this machine reaches it, if it can."""
        everywhere = self.host in ("0.0.0.0", "::", "")  # noqa: S104 - bound everywhere
        return http_url((self.machine or "127.0.0.1") if everywhere else self.host, self.port)

    @property
    def is_reachable(self) -> bool:
        """Whether it listens where this machine can connect."""
        return not (self.machine and self.host.startswith(LOOPBACK))


@dataclass(frozen=True)
class FleetFolder:
    """Paths of one fleet."""

    path: Path

    @classmethod
    def of(cls, name: str) -> FleetFolder:
        return cls(fleets_dir() / folder_name(name))

    @property
    def name(self) -> str:
        return unquote(self.path.name)

    @property
    def record(self) -> Path:
        return self.path / "fleet.json"

    @property
    def lock(self) -> Path:
        return self.path / "fleet.lock"

    @property
    def key(self) -> Path:
        return self.path / "key"

    @property
    def request(self) -> Path:
        return self.path / "wish.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def keeper(self) -> Path:
        """Held by the process that keeps the fleet."""
        return self.path / "keeper.lock"

    @property
    def keeper_log(self) -> Path:
        return self.path / "keeper.log"

    @property
    def own_gateway(self) -> Path:
        """The process of the gateway that the keeper of an earlier version has started."""
        return self.path / "gateway.json"

    @property
    def gateway_log(self) -> Path:
        """What the fleet's own gateway says."""
        return self.path / "gateway.log"

    @property
    def measured(self) -> Path:
        """What members can do, as their keeper has seen it."""
        return self.path / "measured.json"

    @property
    def gateways(self) -> Path:
        return self.path / "gateways"

    def gateway(self, id: str) -> Path:
        return self.gateways / f"{id}.json"

    def gateway_load(self, id: str) -> Path:
        return self.gateways / f"{id}.load.json"

    def gateway_socket(self, id: str) -> Path:
        """Where a gateway gives its listening socket to its successor."""
        return self.gateways / f"{id}.sock"

    def set_aside(self) -> None:
        set_aside(self.path)


# The record


def create_fleet(fleet: Fleet, key: str = "") -> FleetFolder:
    """Make a fleet's folder with this key or a new one; refuses a name that is in use."""
    folder = FleetFolder.of(fleet.name)
    refuse_fleet_name(fleet.name)
    if DeploymentFolder.of(fleet.name).record.is_file():
        raise ConflictError(
            f"a deployment is called {fleet.name!r}.", "Choose another --name: a fleet has a name of its own."
        )
    make_private_dir(fleets_dir())
    folder.set_aside()
    make_private_dir(folder.gateways)
    folder.path.chmod(0o700)
    write_atomic(folder.key, (key or secrets.token_urlsafe(32)) + "\n")
    write_fleet(folder, fleet)
    return folder


def refuse_fleet_name(name: str) -> None:
    """Raise where a fleet that has not ended goes by that name."""
    folder = find_fleet(name)
    if folder is not None and not read_fleet(folder).closed:
        raise ConflictError(
            f"a fleet is called {name!r}.",
            "Use it, change its size with `corral scale`, end it with `corral down`, or choose another --name.",
        )


def read_fleet(folder: FleetFolder) -> Fleet:
    return load_json(Fleet, folder.record)


def is_over(folder: FleetFolder) -> bool:
    """Whether a fleet is known to have ended, or its folder to be gone; what cannot be read has not."""
    try:
        return bool(read_fleet(folder).closed)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return folder.path.name not in os.listdir(folder.path.parent)  # noqa: PTH208 - names alone
    except (CorralError, OSError):
        pass
    return False


def write_fleet(folder: FleetFolder, fleet: Fleet) -> None:
    """Replace the record; the caller holds the fleet's lock, or has just made the folder."""
    save_record(folder.record, fleet)


def change_fleet(folder: FleetFolder, change: Callable[[Fleet], Fleet]) -> Fleet:
    """Read, change and write the record in one step that nobody else comes between."""
    with fleet_lock(folder):
        before = read_fleet(folder)
        after = change(before)
        if after != before:
            write_fleet(folder, after)
        return after


def fleet_lock(folder: FleetFolder, say: Callable[[str], None] | None = None) -> FileLock:
    """Only its holder changes a fleet's record."""
    return exclusive_lock(folder.lock, wait_notice(f"the fleet {folder.name}", say), silent_s=OLD_LOCK_S)


def all_fleets() -> list[FleetFolder]:
    """Every fleet of this home, oldest first."""
    records = records_in(fleets_dir(), "fleet.json")
    return [FleetFolder(path.parent) for path in sorted(records, key=lambda path: changed_s(path.parent / "key"))]


def read_fleets() -> tuple[list[Fleet], dict[str, str]]:
    """The records of all fleets that have not ended, and why others cannot be read, by their names."""
    fleets, unreadable = [], {}
    for folder in all_fleets():
        try:
            fleet = read_fleet(folder)
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (CorralError, OSError) as error:
            unreadable[folder.name] = str(error)
            continue
        if not fleet.closed:
            fleets.append(fleet)
    return fleets, unreadable


def living_fleets() -> list[Fleet]:
    """The records of all fleets that have not ended, for a choice of the only one: all must be known."""
    fleets, unreadable = read_fleets()
    for name, why in unreadable.items():
        raise DataError(f"the fleet {name!r} cannot be read: {why}", "Give the name of the one you mean.")
    return fleets


def find_fleet(name: str) -> FleetFolder | None:
    """The fleet of that name, if there is one, and no deployment was made under the name after it had ended."""
    try:
        folder = FleetFolder.of(name)
    except UsageError:  # nothing can have that name
        return None
    if is_gone(folder.record):
        return None
    later = not is_gone(DeploymentFolder.of(name).record) and bool(read_fleet(folder).closed)
    return None if later else folder


def open_fleet(name: str) -> FleetFolder:
    """The folder of an existing fleet."""
    folder = FleetFolder.of(name)
    if is_gone(folder.record):
        known = [other.name for other in all_fleets()]
        guesses = nearest(name, known) or known
        remedy = (
            f"Known: {', '.join(guesses)}." if guesses else "There is none yet: `corral up --replicas N` makes one."
        )
        raise NotFoundError(f"no fleet is called {name!r}.", remedy)
    return folder


# Gateways


def new_gateway_id() -> str:
    """A name for a gateway's files that no other gateway has, on whichever machine it runs."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def held_gateways(folder: FleetFolder) -> dict[str, GatewayAddress]:
    """The gateways that run, by their ids: those that can be reached first, then oldest first.

    One of another machine counts while it writes its load.
    """
    gateways: dict[str, GatewayAddress] = {}
    for path in sorted(_gateway_files(folder), key=changed_s):
        with contextlib.suppress(OSError, CorralError):
            id, saved = path.stem, load_json(GatewayAddress, path)
            if saved.holder is None or saved.holder.is_gone():
                continue
            load = folder.gateway_load(id)
            if saved.holder.is_here() or _is_written(load):
                gateways[id] = saved
    return dict(sorted(gateways.items(), key=lambda pair: (not pair[1].is_reachable, bool(pair[1].machine))))


def read_loads(folder: FleetFolder, fresh_s: float = FRESH_S) -> dict[str, GatewayLoad]:
    """What the running gateways have to do, by their ids; one that wrote nothing for a while is left out."""
    loads = {}
    for id, gateway in held_gateways(folder).items():
        with contextlib.suppress(OSError, CorralError):
            load = load_json(GatewayLoad, folder.gateway_load(id))
            if gateway.machine or abs(time.time() - load.time_s) <= fresh_s:  # clocks of machines differ, and are set
                loads[id] = load
    return loads


def _gateway_files(folder: FleetFolder) -> list[Path]:
    return [path for path in folder.gateways.glob("*.json") if not path.name.endswith(".load.json")]


def _is_written(load: Path) -> bool:
    """Whether a gateway of another machine still writes its load, by the file system's clock; if unknown, yes."""
    try:
        load.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return silence_s(load) <= SILENT_S

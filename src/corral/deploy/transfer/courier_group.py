"""The couriers of one transfer: one on each host and one at the source, started, heard and ended together."""

from __future__ import annotations

import errno
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.base.errors import CorralError, DataError, UnreachableError
from corral.base.ssh import Ssh, each
from corral.deploy.transfer.courier import HERE, MOST_WAITING, Courier, Event, changed_source
from corral.deploy.transfer.courier_events import CourierRow

SOURCE = "the source"
HOME_ON_HOSTS = "~/.local/share/corral/models"  # where a model lies unless the user names another folder


@dataclass(frozen=True)
class Origin:
    """Where a folder comes from: a folder here or on a host, or the hub, whose files are known beforehand."""

    path: str = ""
    host: str = HERE
    leave_out: tuple[str, ...] = ()
    links_out: str = "follow"  # links that lead out of the folder: follow (models), keep (environments)
    hub_url: str = ""
    hub_token: str | None = field(default=None, repr=False)
    files: tuple[CourierRow, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far one host is."""

    host: str
    what: str  # hashing, checking, receiving, done, failed, or a note
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of one host."""

    host: str
    state: str  # arrived, already (nothing was missing), shared (another host filled this storage), failed
    total_bytes: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    text: str = ""
    remedy: str = ""
    damaged: tuple[str, ...] = ()  # files that were there and wrong, and were fetched again
    exit_code: int = 0  # of the failure, as docs/exit-codes.md has them
    mb_per_s: float | None = None  # received
    read_mb_per_s: float | None = None  # measured on the storage afterwards
    load_s: float | None = None  # predicted: all bytes at that speed

    @property
    def ok(self) -> bool:
        return self.state != "failed"


Report = Callable[[Progress], None]


class CourierLostError(CorralError):
    """A courier failed before it sent what was expected."""


@dataclass
class CourierGroup:
    """Starts the couriers, keeps what each one said last, and records the hosts that failed."""

    ssh: Ssh
    hosts: tuple[str, ...]
    source: Origin
    destination: str
    addresses: Mapping[str, str]
    report: Report
    check: str
    stall_s: float
    uplink_bytes_per_s: float = 0
    inbox: queue.Queue[tuple[Courier, Event]] = field(default_factory=lambda: queue.Queue(MOST_WAITING))
    couriers: dict[str, Courier] = field(default_factory=dict)
    listening: dict[str, Event] = field(default_factory=dict)  # where each courier listens
    nonces: dict[str, str] = field(default_factory=dict)
    heard: dict[tuple[str, str], Event] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    files: tuple[CourierRow, ...] = ()
    doubted: set[int] = field(default_factory=set)  # files that came damaged from the source: it checks them again
    ended: bool = False

    def start(self) -> None:
        remote = [host for host in self.hosts if host != HERE]
        check = "import sys; sys.exit(sys.version_info < (3, 8))"
        for host, done in each(remote, lambda host: self.ssh.run(host, ["python3", "-I", "-c", check])).items():
            if isinstance(done, CorralError):
                self.fail(host, done.message, done.remedy, done.exit_code)
            elif done.code:
                self.fail(host, "it has no python3 of version 3.8 or later.", "Install python3 there.")
        if self.source.path:
            same = self.source.path == self.destination
            order: dict[str, Any] = {"folder": self.source.path, "leave_out": self.source.leave_out}
            order["links_out"] = self.source.links_out
            order["hash"] = "all" if self.check == "hash" else self.check
            self._courier(SOURCE, self.source.host, "serve", order, nonce=same)
        for host in self.hosts:
            if host not in self.lost:
                order = {"folder": self.destination, "stall_s": self.stall_s}
                order["beside"] = self.destination.startswith(f"{HOME_ON_HOSTS}/")
                if self.source.host == HERE:  # links that lead out are accepted from this machine only
                    order["links_out"] = self.source.links_out
                self._courier(host, host, "fetch", order, nonce=True)
        self.listening = self.wait_for_all([host for host in self.hosts if host in self.couriers], "listening")
        if self.source.path:
            self.listening[SOURCE] = self.wait_for(SOURCE, "listening")

    def _courier(self, name: str, host: str, command: str, order: dict[str, Any], nonce: bool) -> None:
        courier = Courier(self.ssh, host, command, self.inbox, token=secrets.token_hex(24))
        self.couriers[name] = courier
        if nonce:
            self.nonces[name] = order["nonce"] = secrets.token_hex(8)
        order["address"] = "127.0.0.1" if host == HERE else self.addresses.get(host, "")
        order["token"] = courier.token
        order["uplink_bytes_per_s"] = self.uplink_bytes_per_s
        courier.start(order)

    def close(self) -> None:
        self.ended = True
        for courier in self.couriers.values():
            courier.send({"do": "end"})
        threads = [threading.Thread(target=courier.close) for courier in self.couriers.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def next_event(self) -> tuple[str, Event]:
        courier, event = self.inbox.get()
        name = next(name for name, known in self.couriers.items() if known is courier)
        self._note(name, event)
        return name, event

    def _note(self, name: str, event: Event) -> None:
        kind = event["event"]
        if kind in ("hashing", "checking", "progress"):
            what = "receiving" if kind == "progress" else kind
            host = (self.source.host if name == SOURCE else name) or HERE
            self.report(Progress(host, what, event["done"], event["total"]))
        elif kind == "damaged":
            self.report(Progress(name, f"{event['path']} came damaged from {event['source']}; again"))
            self._doubt(event)
        elif kind == "changed":
            self._source_changed(event)
        elif kind == "failed":
            full = event.get("errno") in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
            self.fail(name, event["text"], exit_code=(DataError if full else CorralError).exit_code)
        elif kind == "gone":
            self.lost.add(name)
            self.fail(name, f"lost: {event['text']}", exit_code=UnreachableError.exit_code)
        else:
            self.heard[name, kind] = event

    def _doubt(self, event: Event) -> None:
        """Let the source check a file that came damaged from it: on its way, or because it was written to?"""
        if event["source"] in (self.source.host, HERE) and event["file"] not in self.doubted and self.source.path:
            self.doubted.add(event["file"])
            self.couriers[SOURCE].send({"do": "doubt", "file": event["file"]})

    def _source_changed(self, event: Event) -> None:
        """End the transfer for all hosts, which drop what they have of that file: it could not arrive whole."""
        numbers = [number for number, row in enumerate(self.files) if row.path == event["path"]]
        for host in self.receiving():
            self.couriers[host].send({"do": "drop", "files": numbers})
        where = self.source.path if self.source.host == HERE else f"{self.source.host}:{self.source.path}"
        raise changed_source(where, event)

    def fail(self, name: str, text: str, remedy: str = "", exit_code: int = CorralError.exit_code) -> None:
        self.lost.add(name)
        if name == SOURCE:
            self.heard.setdefault((SOURCE, "failed"), {"event": "failed", "text": text, "exit_code": exit_code})
        elif name not in self.outcomes:
            self.outcomes[name] = Outcome(name, "failed", text=text, remedy=remedy, exit_code=exit_code)
            self.report(Progress(name, f"failed: {text}"))

    def wait_for(self, name: str, kind: str) -> Event:
        """Wait until a courier sends an event of this kind."""
        while (name, kind) not in self.heard:
            if name in self.lost:
                where = self.source.host if name == SOURCE else name
                text = self.heard.get((name, "failed"), {}).get("text", "lost")
                raise CourierLostError(f"{where}: {text}", "Check the folder and the host.", host=where)
            self.next_event()
        return self.heard.pop((name, kind))

    def wait_for_all(self, names: Iterable[str], kind: str) -> dict[str, Event]:
        """Wait for an event of every courier; one that fails is left out."""
        events = {}
        for name in names:
            if name not in self.lost:
                try:
                    events[name] = self.wait_for(name, kind)
                except CourierLostError:
                    continue
        return events

    def receiving(self) -> Sequence[str]:
        """The hosts that are getting files now."""
        return ()

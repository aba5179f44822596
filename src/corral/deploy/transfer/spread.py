"""One folder onto many nodes in about the time of one copy, whatever happens to one of them.

The nodes form a chain: each takes from the one before it and hands on what it has *while it still arrives*. A node's
uplink and downlink each carry the folder once, so 16 nodes take the time of one copy plus 16 times the first quarter
of a megabyte. (A tree that waits for whole copies needs log2(16) = 4; one that pipelines with two children per node
needs 2, because its uplinks carry everything twice.) A slow node delays those behind it, but the slowest node decides
when a deployment can start in any case. When a node is lost, those behind it go to the one before it and continue
where they were; whom each may ask, and in which order, is decided before anything moves
(`deploy/transfer/in_place.py`).

A source that is written to meanwhile ends everything at once (`deploy/transfer/courier.py`): it would not arrive
whole.

Nodes that see the same storage are found by a file that one writes and the others look for; it is filled once. Files
on this machine go to the first node over the ssh connection itself, so nodes need not reach this machine.
"""

from __future__ import annotations

import errno
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.base.errors import ConflictError, CorralError, DataError, UnreachableError, UsageError
from corral.base.record import to_json
from corral.base.ssh import Ssh, each
from corral.deploy.transfer.courier import HERE, MOST_WAITING, Courier, Event, changed_source
from corral.deploy.transfer.courier_events import CourierRow
from corral.deploy.transfer.in_place import plan_sources, same_storage
from corral.deploy.transfer.outcome import Origin, Outcome, Progress
from corral.deploy.transfer.push import Push

__all__ = ["HOME_ON_HOSTS", "Origin", "Outcome", "Progress", "ensure_folder", "spread"]

GIVER = "the source"
HUB = "the hub"
HOME_ON_HOSTS = "~/.local/share/corral/models"  # where a model lies unless the user says otherwise
LOOKS = 10  # network file systems may show a new file late


Report = Callable[[Progress], None]


def ensure_folder(
    ssh: Ssh,
    hosts: Sequence[str],
    path: Path,
    destination: str,
    addresses: Mapping[str, str],
    progress: Callable[[str, int, int], None],
    leave_out: Sequence[str] = (),
) -> str:
    """Make a folder of this machine visible on every host under `destination`; nothing moves where it is already.

    "Already" means the same names and sizes, and the same hashes where they are known without reading the files.
    """
    environment = (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists()
    origin = Origin(str(path), leave_out=tuple(leave_out), links_out="keep" if environment else "follow")
    far: dict[str, Progress] = {}

    def report(step: Progress) -> None:
        done, total = step.done_bytes, step.total_bytes
        if total and step.what not in ("hashing", "checking"):  # what moves is told for all hosts together
            far[step.host] = step
            done = sum(item.done_bytes for item in far.values())
            total = sum(item.total_bytes for item in far.values())
        progress(f"{path.name}: {step.what} on {step.host}", done, total)

    elsewhere = "Or name another folder of the nodes as home in [storage] of a profile"
    outcomes = spread(ssh, hosts, origin, destination, addresses, report, check="known", elsewhere=elsewhere)
    if failed := [outcome for outcome in outcomes.values() if not outcome.ok]:
        told = "; ".join(f"{outcome.host}: {outcome.text}" for outcome in failed)
        raise CorralError(
            f"{path.name} did not reach {len(failed)} of {len(outcomes)} hosts: {told}",
            failed[0].remedy or "Run it again: what has arrived is kept.",
            hosts=[outcome.host for outcome in failed],
        )
    return destination


def spread(
    ssh: Ssh,
    hosts: Sequence[str],
    source: Origin,
    destination: str,
    addresses: Mapping[str, str],
    report: Report,
    check: str = "hash",
    stall_s: float = 120,
    uplink_bytes_per_s: float = 0,
    storage: str = "any",
    elsewhere: str = "Or name another folder with --to",
) -> dict[str, Outcome]:
    """Bring a folder to `destination` on every host. A host that fails is named in its outcome; the others complete.

    `check` says how what is already there is judged: `known` by size and known hashes, `hash` by hash (computed where
    it is not known), `again` by hash in any case. `storage` may insist: `shared` by all hosts, or each its `own`.
    `elsewhere` says how the user names another folder.
    """
    run = _Run(ssh, tuple(dict.fromkeys(hosts)), source, destination, addresses, report, check, stall_s)
    run.uplink_bytes_per_s, run.storage, run.elsewhere = uplink_bytes_per_s, storage, elsewhere
    try:
        return run.go()
    finally:
        run.close()


class CourierLostError(CorralError):
    """A courier that failed before it said what was asked."""


@dataclass
class _Run:
    ssh: Ssh
    hosts: tuple[str, ...]
    source: Origin
    destination: str
    addresses: Mapping[str, str]
    report: Report
    check: str
    stall_s: float
    uplink_bytes_per_s: float = 0
    storage: str = "any"
    elsewhere: str = ""
    inbox: queue.Queue[tuple[Courier, Event]] = field(default_factory=lambda: queue.Queue(MOST_WAITING))
    couriers: dict[str, Courier] = field(default_factory=dict)
    listening: dict[str, Event] = field(default_factory=dict)  # where each courier listens
    nonces: dict[str, str] = field(default_factory=dict)
    heard: dict[tuple[str, str], Event] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    damaged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    at_source: set[str] = field(default_factory=set)
    pushed: str = ""  # the host that gets its files from this machine, over ssh
    files: tuple[CourierRow, ...] = ()
    doubted: set[int] = field(default_factory=set)  # files that came damaged from the source: it looks at them again
    ended: bool = False

    # -- the course of things
    def go(self) -> dict[str, Outcome]:
        self._start()
        groups = self._groups()
        self._insist(groups)
        self.files = self.source.files or self._said(GIVER, "manifest")["files"]
        if not self.files:
            raise DataError(f"{self.source.path or HUB} holds no files.", "Check the name of the folder.")
        writers = {group[0]: group for group in groups}
        needs = self._compare(list(writers))
        self._refuse_full_disks(needs)
        self._transfer(needs)
        for writer, group in writers.items():
            self._look_on_others(writer, group)
        return {host: self.outcomes[host] for host in self.hosts}

    def close(self) -> None:
        self.ended = True
        for courier in self.couriers.values():
            courier.send({"do": "end"})
        threads = [threading.Thread(target=courier.close) for courier in self.couriers.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # -- listening
    def _next(self) -> tuple[str, Event]:
        courier, event = self.inbox.get()
        name = next(name for name, known in self.couriers.items() if known is courier)
        self._note(name, event)
        return name, event

    def _note(self, name: str, event: Event) -> None:
        kind = event["event"]
        if kind in ("hashing", "checking", "progress"):
            what = "receiving" if kind == "progress" else kind
            host = (self.source.host if name == GIVER else name) or HERE
            self.report(Progress(host, what, event["done"], event["total"]))
        elif kind == "damaged":
            self.report(Progress(name, f"{event['path']} came damaged from {event['source']}; again"))
            self._doubt(event)
        elif kind == "changed":
            self._source_changed(event)
        elif kind == "failed":
            full = event.get("errno") in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
            self._failed(name, event["text"], exit_code=(DataError if full else CorralError).exit_code)
        elif kind == "gone":
            self.lost.add(name)
            self._failed(name, f"lost: {event['text']}", exit_code=UnreachableError.exit_code)
        else:
            self.heard[name, kind] = event

    def _doubt(self, event: Event) -> None:
        """A file that came wrong from the source itself: damaged on its way, or written to without a trace?"""
        if event["source"] in (self.source.host, HERE) and event["file"] not in self.doubted and self.source.path:
            self.doubted.add(event["file"])
            self.couriers[GIVER].send({"do": "doubt", "file": event["file"]})

    def _source_changed(self, event: Event) -> None:
        """Nothing that is under way could arrive whole: it ends for all, once, and leaves no part of that file."""
        numbers = [number for number, row in enumerate(self.files) if row.path == event["path"]]
        for host, courier in self.couriers.items():
            if host != GIVER and host not in self.lost and host in self.sources:
                courier.send({"do": "drop", "files": numbers})
        where = self.source.path if self.source.host == HERE else f"{self.source.host}:{self.source.path}"
        raise changed_source(where, event)

    def _failed(self, name: str, text: str, remedy: str = "", exit_code: int = CorralError.exit_code) -> None:
        self.lost.add(name)
        if name == GIVER:
            self.heard.setdefault((GIVER, "failed"), {"event": "failed", "text": text, "exit_code": exit_code})
        elif name not in self.outcomes:
            self.outcomes[name] = Outcome(name, "failed", text=text, remedy=remedy, exit_code=exit_code)
            self.report(Progress(name, f"failed: {text}"))

    def _said(self, name: str, kind: str) -> Event:
        """Wait for one courier's word."""
        while (name, kind) not in self.heard:
            if name in self.lost:
                where = self.source.host if name == GIVER else name
                text = self.heard.get((name, "failed"), {}).get("text", "lost")
                raise CourierLostError(f"{where}: {text}", "Check the folder and the host.", host=where)
            self._next()
        return self.heard.pop((name, kind))

    def _all_said(self, names: Iterable[str], kind: str) -> dict[str, Event]:
        """Wait for all of them; who fails is left out."""
        found = {}
        for name in names:
            if name not in self.lost:
                try:
                    found[name] = self._said(name, kind)
                except CourierLostError:
                    continue
        return found

    # -- starting
    def _start(self) -> None:
        remote = [host for host in self.hosts if host != HERE]
        check = "import sys; sys.exit(sys.version_info < (3, 8))"
        for host, done in each(remote, lambda host: self.ssh.run(host, ["python3", "-c", check])).items():
            if isinstance(done, CorralError):
                self._failed(host, done.message, done.remedy, done.exit_code)
            elif done.code:
                self._failed(host, "it has no python3 of version 3.8 or later.", "Install python3 there.")
        if self.source.path:
            same = self.source.path == self.destination
            order: dict[str, Any] = {"folder": self.source.path, "leave_out": self.source.leave_out}
            order["links_out"] = self.source.links_out
            order["hash"] = "all" if self.check == "hash" else self.check
            self._courier(GIVER, self.source.host, "serve", order, nonce=same)
        for host in self.hosts:
            if host not in self.lost:
                order = {"folder": self.destination, "stall_s": self.stall_s}
                order["beside"] = self.destination.startswith(f"{HOME_ON_HOSTS}/")
                if self.source.host == HERE:  # links that lead out are taken from this machine only
                    order["links_out"] = self.source.links_out
                self._courier(host, host, "fetch", order, nonce=True)
        self.listening = self._all_said([host for host in self.hosts if host in self.couriers], "listening")
        if self.source.path:
            self.listening[GIVER] = self._said(GIVER, "listening")

    def _courier(self, name: str, host: str, command: str, order: dict[str, Any], nonce: bool) -> None:
        courier = Courier(self.ssh, host, command, self.inbox, token=secrets.token_hex(24))
        self.couriers[name] = courier
        if nonce:
            self.nonces[name] = order["nonce"] = secrets.token_hex(8)
        order["address"] = "127.0.0.1" if host == HERE else self.addresses.get(host, "")
        order["token"] = courier.token
        order["uplink_bytes_per_s"] = self.uplink_bytes_per_s
        courier.start(order)

    def _groups(self) -> list[tuple[str, ...]]:
        names = [name for name in self.nonces if name not in self.lost]
        for name in names:
            self.couriers[name].send({"do": "look", "names": list(self.nonces.values())})
        whose = {nonce: name for name, nonce in self.nonces.items()}
        replies = self._all_said(names, "seen")
        seen = {name: [whose[nonce] for nonce in reply["names"] if nonce in whose] for name, reply in replies.items()}
        groups = same_storage(seen)
        alone = [group for group in groups if GIVER not in group]
        for group in groups:
            if GIVER in group:  # these see the source itself: one look at names and sizes is enough
                self.at_source |= {host for host in group if host != GIVER}
                alone += [(host,) for host in group if host != GIVER]
        return alone

    def _insist(self, groups: Sequence[tuple[str, ...]]) -> None:
        shared = next((group for group in groups if len(group) > 1), None)
        if self.storage == "shared" and len(groups) > 1:
            one, other = groups[0][0], groups[1][0]
            raise UsageError(
                f"{self.destination} on {one} is not the storage that {other} sees under that name.",
                "Name a folder on shared storage with --to, or use --local-disk.",
            )
        if self.storage == "own" and shared:
            raise UsageError(
                f"{self.destination} is the same storage on {', '.join(shared)}, not a local disk.",
                "Name a folder on the nodes' own disks with --to, or use --shared.",
            )

    # -- what is missing where
    def _compare(self, hosts: Sequence[str]) -> dict[str, Event]:
        for host in hosts:
            check = "sizes" if host in self.at_source else self.check
            self.couriers[host].send({"do": "compare", "files": to_json(self.files), "check": check})
        needs = self._all_said(hosts, "need")
        for host, need in needs.items():
            self.damaged[host] = need["damaged"]
            if need["foreign"]:
                raise ConflictError(
                    f"{self.destination} on {host} holds another model: its config.json differs.",
                    f"Delete that one, if nobody needs it. {self.elsewhere}. Nothing was moved.",
                    host=host,
                )
            if need["freed_bytes"]:
                freed = f"{need['freed_bytes'] / 1e6:.2f} MB"
                self.report(Progress(host, f"deleted {freed} that earlier pulls had left unfinished"))
            if need["damaged"]:
                self.report(Progress(host, f"{len(need['damaged'])} damaged, first {need['damaged'][0]}"))
        return needs

    @property
    def total_bytes(self) -> int:
        return sum(row.size for row in self.files)

    def _refuse_full_disks(self, needs: Mapping[str, Event]) -> None:
        full = {host: need for host, need in needs.items() if need["bytes"] > need["free_bytes"]}
        if full:
            told = "; ".join(
                f"{host} needs {need['bytes'] / 1e9:.2f} GB and has {need['free_bytes'] / 1e9:.2f} GB free"
                for host, need in full.items()
            )
            raise DataError(
                f"{self.destination} is too small: {told}.",
                f"Free space there. {self.elsewhere}. Nothing was moved.",
                hosts=list(full),
            )

    # -- moving
    def _transfer(self, needs: Mapping[str, Event]) -> None:
        receivers = [host for host, need in needs.items() if need["files"]]
        for host in needs:
            if host not in receivers:
                self.outcomes[host] = Outcome(host, "already", self.total_bytes)
                self.report(Progress(host, "already there", self.total_bytes, self.total_bytes))
        if not receivers:
            return
        hashes = self._hashes(needs)
        heads = [host for host in needs if host not in receivers]
        if self.source.path and (self.source.host != HERE or HERE in receivers):
            heads.insert(0, GIVER)
        have = {host: int(need["have_bytes"]) for host, need in needs.items()}
        self.sources = plan_sources(receivers, have, heads or ([HUB] if self.source.hub_url else []))
        if self.source.hub_url and heads:  # whoever has it is nearer than the hub, which remains as a last resort
            self.sources = {host: (*asked, HUB) for host, asked in self.sources.items()}
        if self.source.path:
            wanted = sorted({number for host in receivers for number, _ in needs[host]["held"]})
            self.couriers[GIVER].send({"do": "watch", "files": [n for n in wanted if n < len(self.files)]})
        for host in receivers:
            self.couriers[host].send({"do": "go", "hashes": hashes, "sources": self._rows(host)})
        self._follow(receivers)
        if self.source.path and any(self.outcomes[host].ok for host in receivers):
            self.couriers[GIVER].send({"do": "still"})
            self._all_said([GIVER], "unchanged")  # or that it changed, which raises

    def _hashes(self, needs: Mapping[str, Event]) -> dict[str, str]:
        """Files that somebody lacks and whose hash nobody knew so far."""
        unknown = sorted({n for need in needs.values() for n in need["unknown"] if n < len(self.files)})
        if not unknown:
            return {}
        self.couriers[GIVER].send({"do": "hash", "files": unknown})
        found: dict[str, str] = self._said(GIVER, "hashes")["hashes"]
        return {number: sha256 for number, sha256 in found.items() if int(number) in unknown}

    def _rows(self, host: str) -> list[dict[str, Any]]:
        rows = []
        for name in self.sources[host]:
            if name == HUB:
                rows.append({"name": HUB, "kind": "hub", "url": self.source.hub_url, "token": self.source.hub_token})
            elif name not in self.lost and not (name == GIVER and self.source.host == HERE and host != HERE):
                courier = self.couriers[name]
                where = self.listening[name]
                address = f"[{where['address']}]" if ":" in where["address"] else where["address"]
                shown = self.source.host if name == GIVER else name
                rows.append({"name": shown, "url": f"http://{address}:{where['port']}", "token": courier.token})
        return rows

    def _follow(self, receivers: Sequence[str]) -> None:
        """Until every receiver is done or lost; those behind a lost one are told to pass it by."""
        self._push_where_needed(receivers)
        while waiting := [host for host in receivers if host not in self.outcomes]:
            name, event = self._next()
            kind = event["event"]
            if kind == "done" and name in waiting:
                self.outcomes[name] = Outcome(
                    name, "arrived", self.total_bytes, event["bytes"], event["seconds"], damaged=self.damaged[name]
                )
                self.report(Progress(name, "done", self.total_bytes, self.total_bytes))
            elif kind in ("failed", "gone"):
                for host in waiting:
                    if name in self.sources[host] and host in self.couriers and host not in self.lost:
                        self.couriers[host].send({"do": "sources", "sources": self._rows(host)})
                self._push_where_needed(receivers)

    def _push_where_needed(self, receivers: Sequence[str]) -> None:
        """The first receiver that has nobody to ask gets its files from here; nobody does when they are not here."""
        if self.pushed and self.pushed not in self.lost and self.pushed not in self.outcomes:
            return
        while orphans := [host for host in receivers if host not in self.outcomes and not self._rows(host)]:
            if self.source.host == HERE and self.source.path:
                self.pushed = orphans[0]
                self._push(self.pushed)
                return
            said = self.heard.get((GIVER, "failed"), {"text": "no source is left"})
            code = said.get("exit_code", UnreachableError.exit_code)
            for host in orphans:  # and then those who had only these to ask
                text = f"{self.source.host}: {said['text']}"
                self._failed(host, text, "Run it again: what has arrived is kept.", code)

    def _push(self, host: str) -> None:
        courier = self.couriers[host]

        def is_over() -> bool:
            return self.ended or host in self.outcomes or host in self.lost

        def asked() -> Event | None:
            while (host, "held") not in self.heard:
                if is_over():
                    return None
                time.sleep(0.02)
            return self.heard.pop((host, "held"))

        folder = Path(self.source.path).expanduser()
        Push(courier, folder, self.files, asked, is_over, lambda event: self.inbox.put((courier, event)),
             self.uplink_bytes_per_s).start()  # fmt: skip

    # -- storage that several hosts see
    def _look_on_others(self, writer: str, group: Sequence[str]) -> None:
        outcome = self.outcomes[writer]
        for host in group[1:]:
            if host in self.outcomes:
                continue
            if not outcome.ok:
                self._failed(host, f"{writer}, which fills the same storage, failed: {outcome.text}", outcome.remedy,
                             outcome.exit_code)  # fmt: skip
            elif self._sees_all(host):
                self.outcomes[host] = replace(outcome, host=host, state="shared", moved_bytes=0, seconds=0.0)
                self.report(Progress(host, f"sees what {writer} has", self.total_bytes, self.total_bytes))
            else:
                self._failed(host, f"it does not see what {writer} wrote into {self.destination}.", "Is it mounted?")

    def _sees_all(self, host: str) -> bool:
        for _ in range(LOOKS):
            self.couriers[host].send({"do": "compare", "files": to_json(self.files), "check": "sizes"})
            need = self._all_said([host], "need").get(host)
            if need is None or not need["files"]:
                return need is not None
            time.sleep(1)
        return False

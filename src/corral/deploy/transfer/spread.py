"""One folder onto many nodes in about the time of one copy, whatever happens to one of them.

The nodes form a chain: each takes from the one before it and serves what it has *while the rest still arrives*. A
node's uplink and downlink each carry the folder once, so 16 nodes take the time of one copy plus 16 times the first
quarter of a megabyte. (A tree that waits for whole copies needs log2(16) = 4; one that pipelines with two children
per node needs 2, because its uplinks carry everything twice.) A slow node delays those behind it, but the slowest
node decides when a deployment can start in any case. When a node is lost, those behind it go to the one before it and
continue where they were; whom each may ask, and in which order, is decided before anything moves (`plan_sources`).

A source that is written to meanwhile ends the transfer at once: it would not arrive whole.

Nodes that share storage are found by a file that one writes and the others see; the storage is filled once. Files of
this machine go to the first node over the ssh connection itself, so nodes need not reach this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.base.errors import ConflictError, CorralError, DataError, UnreachableError, UsageError
from corral.base.record import to_json
from corral.base.ssh import Ssh
from corral.deploy.transfer.courier import HERE, Event, Push
from corral.deploy.transfer.courier_group import SOURCE, CourierGroup, Origin, Outcome, Progress, Report

HUB = "the hub"
LOOKS = 10  # network file systems may show a new file late


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
        if total and step.what not in ("hashing", "checking"):  # what moves is reported for all hosts together
            far[step.host] = step
            done = sum(item.done_bytes for item in far.values())
            total = sum(item.total_bytes for item in far.values())
        progress(f"{path.name}: {step.what} on {step.host}", done, total)

    elsewhere = "Or name another folder of the nodes as home in [storage] of a profile"
    outcomes = spread(ssh, hosts, origin, destination, addresses, report, check="known", elsewhere=elsewhere)
    if failed := [outcome for outcome in outcomes.values() if not outcome.ok]:
        causes = "; ".join(f"{outcome.host}: {outcome.text}" for outcome in failed)
        raise CorralError(
            f"{path.name} did not reach {len(failed)} of {len(outcomes)} hosts: {causes}",
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
    transfer = _Transfer(
        ssh, tuple(dict.fromkeys(hosts)), source, destination, addresses, report, check, stall_s, uplink_bytes_per_s
    )
    transfer.storage, transfer.elsewhere = storage, elsewhere
    try:
        return transfer.run()
    finally:
        transfer.close()


@dataclass
class _Transfer(CourierGroup):
    """One folder on its way to many hosts."""

    storage: str = "any"
    elsewhere: str = ""
    damaged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    at_source: set[str] = field(default_factory=set)
    pushed: str = ""  # the host that gets its files from this machine, over ssh

    def run(self) -> dict[str, Outcome]:
        self.start()
        groups = self._groups()
        self._refuse_other_storage(groups)
        self.files = self.source.files or self.wait_for(SOURCE, "manifest")["files"]
        if not self.files:
            raise DataError(f"{self.source.path or HUB} holds no files.", "Check the name of the folder.")
        writers = {group[0]: group for group in groups}
        needs = self._compare(list(writers))
        self._refuse_full_disks(needs)
        self._transfer(needs)
        for writer, group in writers.items():
            self._check_others(writer, group)
        return {host: self.outcomes[host] for host in self.hosts}

    def receiving(self) -> list[str]:
        return [host for host in self.couriers if host != SOURCE and host not in self.lost and host in self.sources]

    def _groups(self) -> list[tuple[str, ...]]:
        names = [name for name in self.nonces if name not in self.lost]
        for name in names:
            self.couriers[name].send({"do": "look", "names": list(self.nonces.values())})
        whose = {nonce: name for name, nonce in self.nonces.items()}
        replies = self.wait_for_all(names, "seen")
        seen = {name: [whose[nonce] for nonce in reply["names"] if nonce in whose] for name, reply in replies.items()}
        groups = same_storage(seen)
        alone = [group for group in groups if SOURCE not in group]
        for group in groups:
            if SOURCE in group:  # these see the source itself: comparing names and sizes is enough
                self.at_source |= {host for host in group if host != SOURCE}
                alone += [(host,) for host in group if host != SOURCE]
        return alone

    def _refuse_other_storage(self, groups: Sequence[tuple[str, ...]]) -> None:
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
        needs = self.wait_for_all(hosts, "need")
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
            sizes = "; ".join(
                f"{host} needs {need['bytes'] / 1e9:.2f} GB and has {need['free_bytes'] / 1e9:.2f} GB free"
                for host, need in full.items()
            )
            raise DataError(
                f"{self.destination} is too small: {sizes}.",
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
            heads.insert(0, SOURCE)
        held_bytes = {host: int(need["have_bytes"]) for host, need in needs.items()}
        self.sources = plan_sources(receivers, held_bytes, heads or ([HUB] if self.source.hub_url else []))
        if self.source.hub_url and heads:  # a host that has it is nearer than the hub, which stays the last resort
            self.sources = {host: (*others, HUB) for host, others in self.sources.items()}
        if self.source.path:
            wanted = sorted({number for host in receivers for number, _ in needs[host]["held"]})
            self.couriers[SOURCE].send({"do": "watch", "files": [n for n in wanted if n < len(self.files)]})
        for host in receivers:
            self.couriers[host].send({"do": "go", "hashes": hashes, "sources": self._rows(host)})
        self._follow(receivers)
        if self.source.path and any(self.outcomes[host].ok for host in receivers):
            self.couriers[SOURCE].send({"do": "still"})
            self.wait_for_all([SOURCE], "unchanged")  # or it changed, which raises

    def _hashes(self, needs: Mapping[str, Event]) -> dict[str, str]:
        """The hashes of files that some host lacks and whose hash is not known yet."""
        unknown = sorted({n for need in needs.values() for n in need["unknown"] if n < len(self.files)})
        if not unknown:
            return {}
        self.couriers[SOURCE].send({"do": "hash", "files": unknown})
        hashes: dict[str, str] = self.wait_for(SOURCE, "hashes")["hashes"]
        return {number: sha256 for number, sha256 in hashes.items() if int(number) in unknown}

    def _rows(self, host: str) -> list[dict[str, Any]]:
        rows = []
        for name in self.sources[host]:
            if name == HUB:
                rows.append({"name": HUB, "kind": "hub", "url": self.source.hub_url, "token": self.source.hub_token})
            elif name not in self.lost and not (name == SOURCE and self.source.host == HERE and host != HERE):
                courier = self.couriers[name]
                where = self.listening[name]
                address = f"[{where['address']}]" if ":" in where["address"] else where["address"]
                shown = self.source.host if name == SOURCE else name
                rows.append({"name": shown, "url": f"http://{address}:{where['port']}", "token": courier.token})
        return rows

    def _follow(self, receivers: Sequence[str]) -> None:
        """Wait until every receiver is done or lost; those behind a lost one get new sources."""
        self._push_where_needed(receivers)
        while waiting := [host for host in receivers if host not in self.outcomes]:
            name, event = self.next_event()
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
        """Send files from here to the first receiver without a source; where they are not here, it fails."""
        if self.pushed and self.pushed not in self.lost and self.pushed not in self.outcomes:
            return
        while orphans := [host for host in receivers if host not in self.outcomes and not self._rows(host)]:
            if self.source.host == HERE and self.source.path:
                self.pushed = orphans[0]
                self._push(self.pushed)
                return
            failure = self.heard.get((SOURCE, "failed"), {"text": "no source is left"})
            code = failure.get("exit_code", UnreachableError.exit_code)
            for host in orphans:  # and then those who had only these to ask
                text = f"{self.source.host}: {failure['text']}"
                self.fail(host, text, "Run it again: what has arrived is kept.", code)

    def _push(self, host: str) -> None:
        courier = self.couriers[host]

        def is_over() -> bool:
            return self.ended or host in self.outcomes or host in self.lost

        def held() -> Event | None:
            while (host, "held") not in self.heard:
                if is_over():
                    return None
                time.sleep(0.02)
            return self.heard.pop((host, "held"))

        folder = Path(self.source.path).expanduser()
        Push(courier, folder, self.files, held, is_over, lambda event: self.inbox.put((courier, event)),
             self.uplink_bytes_per_s).start()  # fmt: skip

    # -- storage that several hosts see
    def _check_others(self, writer: str, group: Sequence[str]) -> None:
        outcome = self.outcomes[writer]
        for host in group[1:]:
            if host in self.outcomes:
                continue
            if not outcome.ok:
                self.fail(host, f"{writer}, which fills the same storage, failed: {outcome.text}", outcome.remedy,
                             outcome.exit_code)  # fmt: skip
            elif self._sees_all(host):
                self.outcomes[host] = replace(outcome, host=host, state="shared", moved_bytes=0, seconds=0.0)
                self.report(Progress(host, f"sees what {writer} has", self.total_bytes, self.total_bytes))
            else:
                self.fail(host, f"it does not see what {writer} wrote into {self.destination}.", "Is it mounted?")

    def _sees_all(self, host: str) -> bool:
        for _ in range(LOOKS):
            self.couriers[host].send({"do": "compare", "files": to_json(self.files), "check": "sizes"})
            need = self.wait_for_all([host], "need").get(host)
            if need is None or not need["files"]:
                return need is not None
            time.sleep(1)
        return False


def plan_sources(
    receivers: Sequence[str], have_bytes: Mapping[str, int], heads: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Whom each receiver asks, best first: the one before it in its chain, then those before that, then other heads.

    One chain per head (somebody who has everything). Nobody is the first choice of two, and nobody is ever asked
    by somebody before it in the chain, so no two can wait for each other. Who has most goes first, to be ahead of
    those behind it. Without a head the first receiver asks nobody: its bytes are pushed.
    """
    order = sorted(receivers, key=lambda host: -have_bytes.get(host, 0))
    if not heads:
        return {host: tuple(reversed(order[:number])) for number, host in enumerate(order)}
    chains: list[list[str]] = [[head] for head in heads]
    plan = {}
    for number, host in enumerate(order):
        chain = chains[number % len(chains)]
        others = [head for head in heads if head != chain[0]]
        plan[host] = (*reversed(chain), *others)
        chain.append(host)
    return plan


def same_storage(seen: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Groups of hosts that see one storage, from who saw whose file; in the order given."""
    groups: list[set[str]] = []
    for host, others in seen.items():
        joined = {host, *others}
        for group in [group for group in groups if group & joined]:
            joined |= group
            groups.remove(group)
        groups.append(joined)
    order = list(seen)
    ranked = [tuple(sorted((host for host in group if host in seen), key=order.index)) for group in groups]
    return sorted((group for group in ranked if group), key=lambda group: order.index(group[0]))

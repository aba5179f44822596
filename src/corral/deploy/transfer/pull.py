"""Weights where they are needed: on this machine, on storage that nodes share, or on every node's own disk.

The order is chosen so that what can be refused is refused first: an unknown or gated model, a host that cannot be
reached, a folder that holds another model, a disk that is too small. Then the bytes move once: from the hub to one
node and along the chain of `deploy.transfer.spread`, from a folder here through ssh, or from a host that has the
model. Every file is judged by its hash; a damaged or partial one is fetched again, and only that one.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, DataError, LaunchError, NotFoundError, UnreachableError, UsageError
from corral.base.record import to_json
from corral.base.ssh import Ssh, UnknownHostError, check_host, each
from corral.base.wording import counted
from corral.deploy.transfer.courier import HERE, ask_courier
from corral.deploy.transfer.courier_group import HOME_ON_HOSTS, Origin, Outcome, Progress, Report
from corral.deploy.transfer.spread import spread
from corral.plan.hardware.survey import Asked, NodeFacts, survey
from corral.plan.models import store as model_store
from corral.plan.models.hub import gated_error, token_origin
from corral.plan.models.store import LEFT_OUT, FetchProgress, ModelSource
from corral.plan.places import OnNodes, Storage, find_folder, find_on_nodes, folders, least_bytes, located, remember

NOT_THE_MODEL = ("original/*", ".cache/*", ".git/*")  # in a folder the user named, everything else is meant
STORAGE = {"auto": "any", "shared": "shared", "local-disk": "own"}


@dataclass(frozen=True)
class PullOrder:
    """A pull as the user requests it; empty means: Corral chooses."""

    model: str
    hosts: tuple[str, ...] = ()
    to: str = ""
    storage: str = "auto"
    source: str = ""  # hub, a host, or empty
    addresses: Mapping[str, str] = field(default_factory=dict)  # where the hosts reach each other
    lies: Storage = field(default_factory=Storage)  # where a profile says that models lie on the hosts
    check_again: bool = False


@dataclass(frozen=True)
class Pull:
    """The result of a pull."""

    model: str
    folder: str
    source: str
    why: str
    total_bytes: int
    seconds: float
    hosts: tuple[Outcome, ...]

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.hosts if not outcome.ok)


def pull(order: PullOrder, report: Report, ssh: Ssh | None = None) -> Pull:
    """Bring a model where it is needed; hosts that failed are in the result, every other failure raises."""
    ssh = ssh or Ssh()
    hosts = tuple(check_host(host) for host in dict.fromkeys(order.hosts))
    if order.storage != "auto" and not hosts:
        raise UsageError(f"--{order.storage} applies to nodes.", "Name them with --hosts a,b,c.")
    began_s = time.monotonic()
    if not hosts and not order.to:
        return _pull_here(order, report, ssh, began_s)
    if order.source in ("", "hub") or not order.model.startswith(("/", "~")):
        model_store.locate(order.model)  # refuses an unknown one before a host is asked
    _refuse_unreachable(hosts, ssh)
    if found := _already_there(order, hosts, ssh):
        name, total = model_store.locate(order.model).name, found.size_bytes
        outcomes = {host: Outcome(host, "already", total) for host in hosts}
        return _result(name, found.folder, Origin(found.folder), "every host has it", outcomes, ssh, began_s)
    name, origin, why = _origin(order, hosts or (HERE,), report, ssh)
    folder = _of_hosts(order.to, hosts, ssh) or f"{_home(order)}/{name}"
    if not hosts:
        folder = str(Path(folder).expanduser().absolute())
    outcomes = spread(
        ssh,
        hosts or (HERE,),
        origin,
        folder,
        order.addresses,
        report,
        check="again" if order.check_again else "hash",
        storage=STORAGE[order.storage],
    )
    if origin.hub_url or not order.model.startswith(("/", "~", ".")):
        total = max(outcome.total_bytes for outcome in outcomes.values())
        arrived = [host for host in hosts if outcomes[host].ok]
        if arrived or not hosts:
            remember(model_store.locate(order.model), folder, arrived, total)
    return _result(name, folder, origin, why, outcomes, ssh, began_s)


def _home(order: PullOrder) -> str:
    return f"{order.lies.home.rstrip('/')}/models" if order.lies.home else HOME_ON_HOSTS


def _already_there(order: PullOrder, hosts: Sequence[str], ssh: Ssh) -> OnNodes | None:
    """Where all hosts have the model already, outside the folder that a pull fills; that one is compared by hash."""
    if not hosts or order.to or order.source or order.check_again or order.storage != "auto":
        return None
    source = model_store.locate(order.model)
    found = None
    if source.kind == "hub":
        with contextlib.suppress(UnreachableError):  # the others get it; who did not answer is named then
            found = find_on_nodes(ssh, hosts, source, order.lies, least_bytes(source))
    own = f"{_home(order)}/{source.name}".lstrip("~")
    return None if found is None or found.folder.endswith(own) else found


def _of_hosts(folder: str, hosts: Sequence[str], ssh: Ssh) -> str:
    """The folder as the hosts know it: a shell writes this machine's home for `~`, which the hosts may not have."""
    here = str(Path.home())
    if not hosts or not folder.startswith(f"{here}/"):
        return folder
    told = survey(ssh, hosts, Asked(paths=(here,))).values()
    lacking = [
        node for node in told if isinstance(node, NodeFacts) and here in node.paths and not node.paths[here].exists
    ]
    return f"~{folder.removeprefix(here)}" if lacking else folder


def pull_onto_nodes(order: PullOrder, progress: FetchProgress, ssh: Ssh) -> str:
    """Pull onto every host of the order; the model's folder there, or the error of the first host that failed."""
    result = pull(order, lambda far: progress(f"{far.host}: {far.what}", far.done_bytes, far.total_bytes), ssh)
    if result.failed:
        first = result.failed[0]
        raise LaunchError(f"the model did not reach {first.host}: {first.text}", first.remedy, host=first.host)
    return result.folder


def _refuse_unreachable(hosts: Sequence[str], ssh: Ssh) -> None:
    """Refuse unknown host names before anything is fetched; hosts that are down only where no other answers."""
    failed = [error for error in each(hosts, lambda host: ssh.run(host, ["true"])).values()
              if isinstance(error, CorralError)]  # fmt: skip
    refused = failed if len(failed) == len(hosts) else [e for e in failed if isinstance(e, UnknownHostError)]
    if refused:
        raise type(refused[0])(" ".join(error.message for error in refused), refused[0].remedy)


# ------------------------------------------------------------------------------------------------ where from
def _origin(order: PullOrder, hosts: Sequence[str], report: Report, ssh: Ssh) -> tuple[str, Origin, str]:
    """The model's name, where its files come from, and why from there."""
    if order.source not in ("", "hub"):
        return _on_host(order, check_host(order.source), ssh)
    source = model_store.locate(order.model)
    if source.kind == "folder":
        if order.source == "hub":
            raise UsageError(f"{order.model} is a folder here, not a model of the hub.", "Leave --from out.")
        return source.name, Origin(source.path, leave_out=NOT_THE_MODEL), "a folder of this machine"
    if source.kind == "hub" or order.source == "hub":
        try:
            return source.name, _from_hub(source, hosts[0], ssh), f"{hosts[0]} reaches the hub"
        except UnreachableError as error:
            if order.source == "hub":
                raise
            why = f"{hosts[0]} does not reach the hub" if hosts[0] != HERE else error.message
    else:
        why = "the embedded model is made here"
    here = model_store.fetch(source, lambda text, done, total: report(Progress(HERE, text, done, total)))
    return source.name, Origin(str(here), leave_out=LEFT_OUT), why


def _from_hub(source: ModelSource, host: str, ssh: Ssh) -> Origin:
    """The repository's files as the host sees them; a gated or missing one is refused before anything moves."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UnreachableError(
            f"HF_HUB_OFFLINE is set, so the hub is not asked for {source.repo}.", "Unset HF_HUB_OFFLINE."
        )
    if model_store.already_here(source) is None:
        with contextlib.suppress(UnreachableError):  # the nodes may reach what this machine does not
            model_store.check_access(source)
    token = get_token()
    order = {"url": constants.ENDPOINT, "repo": source.repo, "token": token, "leave_out": LEFT_OUT}
    try:
        manifest = ask_courier(ssh, host, "hub", order, ["manifest"])
    except CorralError as error:
        raise _hub_error(source.repo, host, error) from error
    if not re.fullmatch(r"[0-9A-Za-z._-]{1,100}", manifest["commit"]):
        raise DataError(
            f"{host} says that {source.repo} is at {manifest['commit']!r}, which is not a commit.", "Look there."
        )
    url = (
        f"{constants.ENDPOINT.rstrip('/')}/{source.repo}/resolve/{manifest['commit']}"  # the token goes nowhere else
    )
    return Origin(host="", hub_url=url, hub_token=token, files=manifest["files"])


def _hub_error(repo: str, host: str, error: CorralError) -> CorralError:
    status = error.details.get("status")
    if status in (401, 403):
        return gated_error(repo, token_origin())
    if status == 404:
        return NotFoundError(f"the hub has no repository {repo}, or it is private.", "Check the name; set HF_TOKEN.")
    if status is not None:
        return UnreachableError(error.message, "Check the network of that host, or leave --from out.", host=host)
    return error


def _on_host(order: PullOrder, host: str, ssh: Ssh) -> tuple[str, Origin, str]:
    """The model as a host has it: a path there, the folder named with --to, Corral's own, or the hub's cache."""
    if order.model.startswith(("/", "~")):
        name, looked = order.model.rstrip("/").rpartition("/")[2], [order.model]
        found = find_folder(ssh, [host], looked, 1)
    else:
        source = model_store.locate(order.model)
        name, looked = source.name, [*([order.to] if order.to else []), *folders(source, order.lies, [host])]
        found = find_folder(ssh, [host], looked, 1) or find_on_nodes(ssh, [host], source, order.lies, 1)
    if not found:
        raise NotFoundError(f"{host} has no {order.model}.", f"Looked for {', '.join(looked)}.")
    return name, Origin(found.folder, host=host, leave_out=LEFT_OUT), f"{host} has it in {found.folder}"


# ------------------------------------------------------------------------------------------------ this machine
def _pull_here(order: PullOrder, report: Report, ssh: Ssh, began_s: float) -> Pull:
    """Fetch as `corral up` would, and check the hashes that the hub promised."""
    if order.source not in ("", "hub"):
        raise UsageError("--from HOST needs a destination.", "Name it with --to FOLDER or --hosts.")
    source = located(order.model, order.lies)

    def progress(text: str, done: int, total: int) -> None:
        report(Progress(HERE, text, done, total))

    model_store.check_access(source)
    before = model_store.already_here(source)
    folder = model_store.fetch(source, progress)
    damaged = _damaged_in_cache(folder, order.check_again, report, ssh)
    if damaged:
        if source.kind == "folder":
            raise DataError(
                f"{folder} has {counted(len(damaged), 'damaged file')}, first {damaged[0]}.", "Download them again."
            )
        report(Progress(HERE, f"fetching again: {counted(len(damaged), 'file')} damaged, first {damaged[0]}"))
        for name in damaged:
            (folder / name).resolve().unlink()
            (folder / name).unlink(missing_ok=True)
        folder = model_store.fetch(replace(source, path=""), progress)
    rows = ask_courier(ssh, HERE, "manifest", {"folder": str(folder), "hash": "known", "leave_out": LEFT_OUT},
                       ["manifest"])["files"]  # fmt: skip
    total = sum(row.size for row in rows)
    state = "already" if before and not damaged else "converted" if source.kind == "embedded" else "arrived"
    moved = total if state == "arrived" else 0
    outcome = Outcome(HERE, state, total, moved, time.monotonic() - began_s, damaged=damaged)
    origin = {"folder": "a folder", "embedded": model_store.EMBEDDED_WHEEL}.get(source.kind, source.repo)
    where = "this machine" if before and source.kind != "folder" else origin
    return _result(source.name, str(folder), Origin(where), "", {HERE: outcome}, ssh, began_s)


def _damaged_in_cache(folder: Path, again: bool, report: Report, ssh: Ssh) -> tuple[str, ...]:
    """Large files of the hub's cache whose content is not what their name promises."""
    listing = {"folder": str(folder), "hash": "known", "leave_out": LEFT_OUT}
    rows = ask_courier(ssh, HERE, "manifest", listing, ["manifest"])["files"]
    promised = [replace(row, sha256=_promised_hash(folder / row.path)) for row in rows]
    promised = [row for row in promised if row.sha256]
    if not promised:
        return ()
    report(Progress(HERE, "checking hashes"))
    order = {"folder": str(folder), "files": to_json(promised), "check": "again" if again else "hash", "own": False}
    damaged: tuple[str, ...] = ask_courier(ssh, HERE, "verify", order, ["need"])["damaged"]
    return damaged


def _promised_hash(path: Path) -> str | None:
    """A hub cache names large files by their hash."""
    real = path.resolve()
    return real.name if real.parent.name == "blobs" and len(real.name) == 64 else None


# ------------------------------------------------------------------------------------------------ what became of it
def _result(
    name: str, folder: str, origin: Origin, why: str, outcomes: Mapping[str, Outcome], ssh: Ssh, began_s: float
) -> Pull:
    seconds = time.monotonic() - began_s
    good = [host for host, outcome in outcomes.items() if outcome.ok]
    speeds = each(good, lambda host: _read_speed(ssh, host, folder))
    source = origin.hub_url.partition("/resolve/")[0] or (
        origin.path if origin.host == HERE else f"{origin.host}:{origin.path}"
    )
    measured = tuple(_with_speeds(outcome, speeds.get(outcome.host)) for outcome in outcomes.values())
    total = max((outcome.total_bytes for outcome in outcomes.values()), default=0)
    return Pull(name, folder, source, why, total, seconds, measured)


def _read_speed(ssh: Ssh, host: str, folder: str) -> float:
    order = {"folder": folder, "leave_out": LEFT_OUT}
    return float(ask_courier(ssh, host, "read-speed", order, ["read-speed"])["bytes_per_s"])


def _with_speeds(outcome: Outcome, read: Any) -> Outcome:
    """The outcome with its speeds; `read` is what the storage measured afterwards, or why it could not."""
    known = isinstance(read, float) and read > 0
    return replace(
        outcome,
        seconds=round(outcome.seconds, 3),
        mb_per_s=round(outcome.moved_bytes / 1e6 / outcome.seconds, 1) if outcome.moved_bytes else None,
        read_mb_per_s=round(read / 1e6, 1) if known else None,
        load_s=round(outcome.total_bytes / read, 1) if known else None,
    )

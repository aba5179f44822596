"""What the nodes already see, so that nothing is copied that need not be: one file under one path on every node.

A model on shared storage lies under the same path for this machine and for the nodes; or each node has a copy of its
own there. Either way it is used where it is. A node that has something else under that path, or cannot read it,
is named, and the model is brought to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from corral.base.ssh import Ssh
from corral.base.untrusted import plain
from corral.plan.hardware.survey import Asked, FolderFacts, Here, NodeFacts, all_or_error, survey

LIMIT_S = 110.0  # for looking at hundreds of files on a slow file system; a copy takes hours


def lacking(ssh: Ssh, hosts: Sequence[str], folder: Path) -> dict[str, str]:
    """Hosts that do not see this folder of this machine under its own path, and why; empty: all of them do."""
    there, here = _survey(ssh, hosts, folder, samples=False), _here(folder, samples=False)
    reasons = {host: why for host, facts in there.items() if (why := _difference(facts, here))}
    others = [host for host in hosts if host not in reasons and _folder(there[host]).identities != here.identities]
    if not others:
        return reasons
    there, here = _survey(ssh, others, folder, samples=True), _here(folder, samples=True)
    for host, facts in there.items():
        if why := _difference(facts, here):
            reasons[host] = why
        elif _folder(facts).contents != here.contents:
            reasons[host] = "has files of the same names and sizes there that hold something else"
    return reasons


def _here(folder: Path, samples: bool) -> FolderFacts:
    return _folder(_survey(Here(), ["this machine"], folder, samples)["this machine"])


def _survey(ssh: Ssh | Here, hosts: Sequence[str], folder: Path, samples: bool) -> dict[str, NodeFacts]:
    asked = Asked(fingerprints=(str(folder),), samples=samples, limit_s=LIMIT_S)
    return all_or_error(survey(ssh, hosts, asked, timeout_s=LIMIT_S + 10))


def _folder(facts: NodeFacts) -> FolderFacts:
    """The one folder that was surveyed."""
    return next(iter(facts.fingerprints.values()), FolderFacts())


def _difference(facts: NodeFacts, here: FolderFacts) -> str:
    """Why a node's folder cannot be the one here, as far as names and sizes tell."""
    there = _folder(facts)
    if why := facts.errors.get("fingerprints"):
        return f"could not look at it ({plain(why, 200)})"
    if not there.files:
        return "does not have it there"
    if there.unreadable:
        return f"cannot read {plain(there.unreadable, 100)} there"
    return "" if there.listed == here.listed else "has other files there"

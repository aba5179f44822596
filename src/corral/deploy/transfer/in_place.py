"""What the nodes already see, so that nothing is copied that need not be: one file under one path on every node.

A model on shared storage lies under the same path for this machine and for the nodes; or each node has a copy of its
own there. Either way it is used where it is. A node that has something else under that path, or cannot read it,
is named, and the model is brought to it.

Who gets a folder from whom, and who sees the same storage: decided, purely, before anything moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from corral.base.ssh import Ssh
from corral.base.untrusted import plain
from corral.plan.hardware.survey import Asked, FolderFacts, Here, NodeFacts, all_or_error, survey


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


LIMIT_S = 110.0  # for looking at hundreds of files on a slow file system; a copy takes hours
COMMIT = re.compile(r"[0-9A-Za-z._-]{1,100}")


def lacking(ssh: Ssh, hosts: Sequence[str], folder: Path) -> dict[str, str]:
    """Hosts that do not see this folder of this machine under its own path, and why; empty: all of them do."""
    found, here = _ask(ssh, hosts, folder, samples=False), _here(folder, samples=False)
    reasons = {host: why for host, facts in found.items() if (why := _difference(facts, here))}
    others = [host for host in hosts if host not in reasons and _folder(found[host]).identities != here.identities]
    if not others:
        return reasons
    found, here = _ask(ssh, others, folder, samples=True), _here(folder, samples=True)
    for host, facts in found.items():
        if why := _difference(facts, here):
            reasons[host] = why
        elif _folder(facts).contents != here.contents:
            reasons[host] = "has files of the same names and sizes there that hold something else"
    return reasons


def _here(folder: Path, samples: bool) -> FolderFacts:
    return _folder(_ask(Here(), ["this machine"], folder, samples)["this machine"])


def _ask(ssh: Ssh | Here, hosts: Sequence[str], folder: Path, samples: bool) -> dict[str, NodeFacts]:
    asked = Asked(fingerprints=(str(folder),), samples=samples, limit_s=LIMIT_S)
    return all_or_error(survey(ssh, hosts, asked, timeout_s=LIMIT_S + 10))


def _folder(facts: NodeFacts) -> FolderFacts:
    """The one folder that was asked for."""
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


def find_on_nodes(
    ssh: Ssh, hosts: Sequence[str], folders: Iterable[str], hub: str, repo: str, at_least_bytes: int
) -> str | None:
    """The first folder in which every node has a whole model of that size: one of the folders, or the hub's cache.

    `hub` is a Hugging Face home on the nodes, where `repo` would lie in the snapshot that its `main` stands for.
    """
    candidates = list(folders)
    if hub:
        repository = f"{hub.rstrip('/')}/hub/models--{repo.replace('/', '--')}"
        commits = _said(ssh, hosts, f"{repository}/refs/main")
        if len(commits) == 1 and COMMIT.fullmatch(commit := commits.pop()):
            candidates.append(f"{repository}/snapshots/{commit}")
    found = all_or_error(survey(ssh, hosts, Asked(paths=tuple(candidates))))
    for folder in candidates:
        seen = [facts.paths.get(folder) for facts in found.values()]
        sizes = {one.size_bytes if one and one.exists and one.readable and one.whole else 0 for one in seen}
        if len(sizes) == 1 and min(sizes) >= at_least_bytes > 0:
            return folder
    return None


def _said(ssh: Ssh, hosts: Sequence[str], path: str) -> set[str]:
    return {facts.nonces.get(path, "") for facts in all_or_error(survey(ssh, hosts, Asked(nonces=(path,)))).values()}

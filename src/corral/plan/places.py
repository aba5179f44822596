"""Where a model's files are: one answer for `pull`, `up`, `doctor`, `plan` and `batch`.

A model may lie in a profile's folder of models under any of its names, in a Hugging Face cache under the name that
its repository has or had, in Corral's home, or where an earlier `corral pull` brought it, which is remembered
(`<home>/pulled.jsonl`). A remembered folder is only a candidate: the files are looked for again, and must be whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from corral.base.errors import CorralError, DataError
from corral.base.home import home_dir
from corral.base.record import from_json, to_json
from corral.base.untrusted import plain
from corral.plan.models import catalogue
from corral.plan.models import store as model_store
from corral.plan.models.facts import read_facts
from corral.plan.models.store import ModelSource

if TYPE_CHECKING:  # imported where nodes are asked: a plan asks none, and is to answer at once
    from corral.base.ssh import Ssh
    from corral.plan.hardware.survey import Asked, Here, NodeFacts, PathFacts

DEFAULT_HOME = "~/.local/share/corral"  # on nodes that do not share this machine's home
DEFAULT_HUB = "~/.cache/huggingface"
COMMIT = re.compile(r"[0-9A-Za-z._-]{1,100}")
MOST_REMEMBERED = 64


@dataclass(frozen=True)
class Storage:
    """Where a profile says that models lie; empty: it does not say."""

    home: str = ""  # Corral's home on the nodes
    models: str = ""  # a folder of models
    hf_home: str = ""  # a Hugging Face home


@dataclass(frozen=True)
class Pulled:
    """A folder that `corral pull` filled."""

    repo: str
    folder: str
    hosts: tuple[str, ...] = ()  # none: this machine
    size_bytes: int = 0
    at_s: float = 0.0


# ---------------------------------------------------------------------------------------------- names and candidates
def repositories(source: ModelSource) -> tuple[str, ...]:
    """The repository, and what it was called before."""
    return catalogue.repositories(source.repo) if source.repo else ()


def _names(source: ModelSource) -> Iterable[str]:
    """The names under which its folder may lie."""
    whole = repositories(source)
    return dict.fromkeys([*whole, *(repo.rpartition("/")[2] for repo in whole), source.name])


def folders(source: ModelSource, storage: Storage, hosts: Sequence[str]) -> list[str]:
    """Folders in which nodes may have the model, the likeliest first; `~` is the nodes' own."""
    found = [f"{storage.models.rstrip('/')}/{name}" for name in _names(source) if storage.models]
    found += [f"{home.rstrip('/')}/models/{source.name}" for home in (storage.home, DEFAULT_HOME) if home]
    return list(dict.fromkeys([*found, *(one.folder for one in remembered(source, hosts))]))


def caches(source: ModelSource, storage: Storage) -> list[str]:
    """The repository's folders in caches of the hub on nodes."""
    hubs = [home.rstrip("/") for home in (storage.hf_home, DEFAULT_HUB) if home]
    return [f"{hub}/hub/models--{repo.replace('/', '--')}" for hub in hubs for repo in repositories(source)]


def candidates(source: ModelSource, storage: Storage, hosts: Sequence[str]) -> list[str]:
    """All of these, to look at: a cache is not yet known to have a whole snapshot."""
    return [*folders(source, storage, hosts), *(f"{cache}/snapshots" for cache in caches(source, storage))]


# --------------------------------------------------------------------------------------------------- what was pulled
def _memory() -> Path:
    return home_dir() / "pulled.jsonl"


def remember(source: ModelSource, folder: str, hosts: Sequence[str], size_bytes: int) -> None:
    """Remember where a pull brought a model; a home that cannot be written to remembers nothing."""
    row = Pulled(source.repo, folder, tuple(hosts), size_bytes, round(time.time(), 3))
    if not source.repo or any(replace(one, at_s=row.at_s) == row for one in pulled()):
        return
    with contextlib.suppress(OSError):
        _memory().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(_memory(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, json.dumps(to_json(row)).encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)


def remembered(source: ModelSource, hosts: Sequence[str]) -> list[Pulled]:
    """Folders that pulls onto some of these hosts filled, the latest first."""
    known, wanted = repositories(source), set(map(_bare, hosts))
    rows = [row for row in reversed(pulled()) if row.repo in known]
    near = [row for row in rows if wanted.intersection(map(_bare, row.hosts)) or not (wanted or row.hosts)]
    return near[:MOST_REMEMBERED]


def _bare(host: str) -> str:
    return host.rpartition("@")[2]


def pulled() -> list[Pulled]:
    """Every pull that is remembered; lines that cannot be read are left out."""
    rows = []
    with contextlib.suppress(OSError):
        for line in _memory().read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, CorralError):
                rows.append(from_json(Pulled, json.loads(line), "a remembered pull"))
    return rows


# ------------------------------------------------------------------------------------------------------ this machine
def located(reference: str, storage: Storage | None = None) -> ModelSource:
    """Which model is meant, with its folder where this machine sees one; asks no network."""
    storage = storage or Storage()
    plain_name = not reference.startswith(("/", ".", "~")) and ".." not in reference
    if plain_name and storage.models and catalogue.find(reference) is None:
        for name in (reference, reference.rpartition("/")[2]):  # by its whole name, or without its owner
            if _is_model(folder := _path(storage.models) / name):
                return ModelSource(folder.name, "folder", path=str(folder))
    source = model_store.locate(reference)
    if source.kind == "folder":
        return source
    found = _here(source, storage)
    return replace(source, path=str(found)) if found else source


def _here(source: ModelSource, storage: Storage) -> Path | None:
    if storage.models:
        copies = (_path(storage.models) / name for name in _names(source))
        if copy := next(filter(_is_model, copies), None):
            return copy
    hub = _path(storage.hf_home) / "hub" if storage.hf_home else None
    if found := model_store.already_here(source) or (hub and model_store.cached_snapshot(source.repo, hub)):
        return found
    for one in remembered(source, ()):
        with contextlib.suppress(CorralError, OSError):
            if _is_model(folder := Path(one.folder).expanduser()):
                model_store.verify_folder(folder)
                return folder
    return None


def _path(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _is_model(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return (folder / "config.json").is_file()
    return False


def least_bytes(source: ModelSource) -> int:
    """What the whole model weighs at least, as the catalogue or an earlier pull knows it; 0 where neither does."""
    if catalogue.find(source.name):
        return read_facts(source.name, offline=True).weights_bytes * 9 // 10
    return max((row.size_bytes for row in pulled() if row.repo == source.repo), default=0)


# --------------------------------------------------------------------------------------------------------- the nodes
@dataclass(frozen=True)
class OnNodes:
    """A model as every node has it, under one path."""

    folder: str
    size_bytes: int


def find_on_nodes(
    ssh: Ssh | Here, hosts: Sequence[str], source: ModelSource, storage: Storage, at_least_bytes: int
) -> OnNodes | None:
    """The first place in which every node has the whole model, of that size."""
    from corral.plan.hardware.survey import Asked

    heads = {cache: f"{cache}/refs/main" for cache in caches(source, storage)}
    facts = _asked(ssh, hosts, Asked(nonces=tuple(heads.values())), "nonces")
    found, entry = folders(source, storage, hosts), catalogue.find(source.repo)
    for cache, head in heads.items():
        commits = {node.nonces.get(head, "").strip() for node in facts.values()}
        commit = commits.pop() if len(commits) == 1 else ""
        if COMMIT.fullmatch(commit) and not (entry and commit in entry.other_revisions):
            found.append(f"{cache}/snapshots/{commit}")
    return find_folder(ssh, hosts, found, at_least_bytes)


def find_folder(ssh: Ssh | Here, hosts: Sequence[str], paths: Iterable[str], at_least_bytes: int) -> OnNodes | None:
    """The first of these folders that is of that size on every node; a node that cannot be asked raises."""
    from corral.plan.hardware.survey import Asked

    asked = tuple(dict.fromkeys(paths))
    facts = _asked(ssh, hosts, Asked(paths=asked), "paths")
    homes = {node.home for node in facts.values()}
    for folder in asked:
        sizes = {_size(host, folder, node.paths.get(folder), at_least_bytes) for host, node in facts.items()}
        there = folder.replace("~", min(homes), 1) if folder.startswith("~") and len(homes) == 1 else folder
        if there.startswith("/") and len(sizes) == 1 and min(sizes) >= at_least_bytes > 0:
            return OnNodes(there, min(sizes))
    return None


def _asked(ssh: Ssh | Here, hosts: Sequence[str], asked: Asked, part: str) -> dict[str, NodeFacts]:
    from corral.plan.hardware.survey import all_or_error, survey

    facts = all_or_error(survey(ssh, hosts, asked))
    for host, node in facts.items():
        if why := node.errors.get(part):
            raise DataError(f"{host} could not say which models it has: {plain(why, 200)}", "Run it again.")
    return facts


def _size(host: str, folder: str, seen: PathFacts | None, least: int) -> int:
    if seen is None or not seen.exists or not seen.readable:
        return 0
    if not seen.whole and seen.size_bytes < least:  # not the same as a folder that lacks files
        raise DataError(
            f"{host} could not list {folder} in time.", "Run it again, or name that folder in place of the model."
        )
    return seen.size_bytes

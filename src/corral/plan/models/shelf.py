"""The models on this machine's disk, in Corral's own folder and in the hub's cache: their sizes, and removing one.

A model that the hub's cache holds may be used by other programs too, so it is removed only when asked by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import NotFoundError
from corral.base.files import remove_tree
from corral.base.home import models_dir
from corral.base.record import nearest
from corral.plan.models import catalogue


@dataclass(frozen=True)
class ShelvedModel:
    """One model on disk; `in_hub_cache` when other programs may share it."""

    name: str  # the catalogue's name, the repository, or the folder's name
    path: str
    stored_bytes: int
    in_hub_cache: bool


def on_disk() -> list[ShelvedModel]:
    """Every model that can be served without fetching anything, by name."""
    return sorted([*_own(), *_cached()], key=lambda model: model.name)


def _own() -> list[ShelvedModel]:
    folders = models_dir().iterdir() if models_dir().is_dir() else ()
    return [
        ShelvedModel(folder.name, str(folder), _size(folder), False)
        for folder in folders
        if (folder / "config.json").is_file() and not folder.name.startswith(".")
    ]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _cached() -> list[ShelvedModel]:
    from huggingface_hub import constants, scan_cache_dir

    cache = Path(constants.HF_HUB_CACHE)
    if not cache.is_dir():
        return []
    repositories = [repo for repo in scan_cache_dir(cache).repos if repo.repo_type == "model"]
    return [
        ShelvedModel(known_name(repo.repo_id), str(repo.repo_path), repo.size_on_disk, True)
        for repo in repositories
        if any(file.file_name == "config.json" for revision in repo.revisions for file in revision.files)
    ]


def known_name(repo: str) -> str:
    """The catalogue's name of a repository, or the name itself where the catalogue has none."""
    entry = catalogue.find(repo)
    return entry.name if entry else repo


def remove(name: str) -> list[ShelvedModel]:
    """Delete a model's files wherever they lie; each folder stops being a model before its files go."""
    known = on_disk()
    wanted = [model for model in known if model.name == known_name(name)]
    if not wanted:
        near = nearest(name, [model.name for model in known])
        raise NotFoundError(
            f"there is no model {name!r} on this machine's disk.",
            f"Closest: {', '.join(near)}." if near else "`corral models` lists what there is.",
        )
    for model in wanted:
        remove_tree(Path(model.path))
    return wanted

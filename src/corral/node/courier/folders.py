"""What a folder holds, and paths that must not lead out of it."""

from __future__ import annotations

import fnmatch
import functools
import os
from typing import List, Sequence

from .talk import Json, TroubleError

OWN_FILES = (".corral-*", ".*.corral-part")


def listing(folder: str, leave_out: Sequence[str], links_out: str) -> List[Json]:
    """Files, links and empty folders below `folder`, by name. Links that stay inside are kept as links; those that
    lead out are followed (a hub cache's) or kept (an environment's), as `links_out` says."""
    root = os.path.realpath(folder)
    rows: List[Json] = []

    def visit(here: str, below: str, depth: int) -> None:
        if depth > 64:
            raise TroubleError(f"{here} is nested too deeply: do its links form a circle?")
        entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        if not entries and below:
            rows.append({"path": below, "kind": "folder", "size": 0, "mode": os.stat(here).st_mode & 0o777})
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            patterns = (*OWN_FILES, *leave_out)
            if any(fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(entry.name, pattern) for pattern in patterns):
                continue
            if entry.is_symlink() and (links_out == "keep" or stays_inside(root, entry.path)):
                rows.append({"path": path, "kind": "link", "size": 0, "target": os.readlink(entry.path)})
            elif entry.is_dir():
                visit(entry.path, path, depth + 1)
            elif entry.is_file():
                found = entry.stat()
                rows.append({"path": path, "kind": "file", "size": found.st_size, "mode": found.st_mode & 0o777,
                             "mtime_ns": found.st_mtime_ns})  # fmt: skip
            elif entry.is_symlink():
                raise TroubleError(f"{entry.path} is a link to nothing.")

    visit(root, "", 0)
    return rows


def stays_inside(root: str, link: str) -> bool:
    if os.path.isabs(os.readlink(link)):
        return False
    return (os.path.realpath(link) + "/").startswith(root + "/")


def inside(folder: str, path: str) -> str:
    """Where a manifest's path lies in the folder; refuses one that would lead out of it."""
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise TroubleError(f"{path!r} is not a path inside a folder.")
    place = os.path.join(folder, path)
    if not is_within(folder, os.path.dirname(place)):
        raise TroubleError(f"{path!r} leads out of {folder} by a link.")
    return place


@functools.lru_cache(maxsize=None)
def is_within(folder: str, parent: str) -> bool:
    """Whether no link leads from one to the other; remembered, for environments of tens of thousands of files."""
    return (os.path.realpath(parent) + "/").startswith(os.path.realpath(folder) + "/")

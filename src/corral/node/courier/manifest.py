"""A manifest: the files, links and empty folders that belong into a folder, checked before anything is written.

It comes from whoever has the files, and may be hostile. No row leads out of the folder, by its path or by a link;
nothing lies below a link or a file of the same list; no name is one that the courier uses itself; no mode lets other
users write, or lets a file run with its owner's rights.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any, Dict, List, Optional, Sequence, Set

from .protocol import CourierError, Json

KINDS = ("file", "link", "folder")
OWN_FILES = (".corral-*", ".*.corral-part")
MOST_ROWS = 2000000
LONGEST_PATH = 4000  # bytes
LONGEST_NAME = 255
LARGEST_BYTES = 1 << 60
LATEST_NS = 1 << 62  # as a file system can keep it
MODES = 0o755
HASHES = {"sha256": re.compile("[0-9a-f]{64}"), "git_sha1": re.compile("[0-9a-f]{40}")}
CONTROL = re.compile("[\x00-\x1f\x7f]")


def checked(rows: Any, links_out: bool) -> List[Json]:
    """The rows with known keys only; refuses the whole list for one invalid row.

    `links_out`: links may lead anywhere (an environment that comes from the user's own machine); nothing is ever
    written through them.
    """
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        raise CourierError(f"a manifest is a list of at most {MOST_ROWS} files.")
    found = [_row(row) for row in rows]
    kinds: Dict[str, str] = {}
    for row in found:
        if row["path"] in kinds:
            raise CourierError(f"{row['path']!r} is listed twice.")
        kinds[row["path"]] = row["kind"]
    leaves = {path for path, kind in kinds.items() if kind != "folder"}
    links = {path for path in leaves if kinds[path] == "link"}
    for row in found:
        above = _first_above(row["path"], leaves)
        if above is not None:
            raise CourierError(
                f"{row['path']!r} leads through {above!r}, which is a {kinds[above]} of the same list."
            )
        if row["kind"] == "link" and not links_out:
            _refuse_leading_out(row["path"], row["target"], links)
    return found


def split(path: Any) -> List[str]:
    """The names of a path inside a folder; refuses every other path."""
    parts = path.split("/") if isinstance(path, str) else []
    if not parts or any(part in ("", ".", "..") or CONTROL.search(part) for part in parts):
        raise CourierError(f"{path!r} is not a path inside a folder.")
    encoded = [part.encode("utf-8", "surrogateescape") for part in parts] if _encodable(path) else [b"x" * 999]
    if max(map(len, encoded)) > LONGEST_NAME or sum(map(len, encoded)) + len(parts) > LONGEST_PATH:
        raise CourierError(f"{path[:100]!r} … is too long for a path.")
    if any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in OWN_FILES):
        raise CourierError(f"{path!r} is a name that Corral uses itself.")
    return parts


def inner_target(path: str, target: str) -> Optional[List[str]]:
    """Where a link leads, as names below the folder; None when it leads out, or may do so through other links.

    The target may go up only at its beginning: `a/..` is the folder above whatever `a` is a link to.
    """
    parts = target.split("/")
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    here = path.split("/")[:-1]
    if target.startswith("/") or ups > len(here) or any(part in ("", ".", "..") for part in parts[ups:]):
        return None
    return here[: len(here) - ups] + parts[ups:]


def _row(row: Any) -> Json:
    if not isinstance(row, dict) or row.get("kind") not in KINDS:
        raise CourierError(f"{str(row)[:100]!r} is not a row of a manifest.")
    split(row.get("path"))
    found = {"path": row["path"], "kind": row["kind"], "size": _number(row, "size", LARGEST_BYTES)}
    if row["kind"] != "file" and found["size"]:
        raise CourierError(f"{row['path']!r} is a {row['kind']} and has no size.")
    found["mode"] = _number(row, "mode", 0o7777, 0o644) & MODES | 0o600
    if row.get("mtime_ns") is not None:
        found["mtime_ns"] = _number(row, "mtime_ns", LATEST_NS)
    for name, pattern in HASHES.items():
        if row.get(name) is not None:
            if not isinstance(row[name], str) or not pattern.fullmatch(row[name]):
                raise CourierError(f"{row['path']!r} has an invalid {name}.")
            found[name] = row[name]
    if row["kind"] == "link":
        found["target"] = _target(row)
    return found


def _number(row: Json, name: str, most: int, default: Optional[int] = None) -> int:
    value = row.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise CourierError(f"{str(row['path'])!r} cannot have the {name} {str(value)[:40]}.")
    return value


def _target(row: Json) -> str:
    target = row.get("target")
    if not isinstance(target, str) or not target or CONTROL.search(target) or not _encodable(target):
        raise CourierError(f"{row['path']!r} is a link to nothing.")
    if len(target.encode("utf-8", "surrogateescape")) > LONGEST_PATH:
        raise CourierError(f"{row['path']!r} is a link to a path that is too long.")
    return target


def _encodable(text: str) -> bool:
    """Whether a file system can have this name: names that are not UTF-8 are sent as lone surrogates."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _first_above(path: str, known: Set[str]) -> Optional[str]:
    end = path.find("/")
    while end >= 0:
        if path[:end] in known:
            return path[:end]
        end = path.find("/", end + 1)
    return None


def _refuse_leading_out(path: str, target: str, links: Set[str]) -> None:
    parts = inner_target(path, target)
    if parts is None:
        raise CourierError(f"{path!r} is a link to {target!r}, which may lead out of the folder.")
    through = _first_above("/".join(parts), links)
    if through is not None:
        raise CourierError(f"{path!r} is a link to {target!r}, which leads through the link {through!r}.")


def without(rows: Sequence[Json], patterns: Sequence[str]) -> List[Json]:
    """The rows whose paths match none of the patterns."""
    return [row for row in rows if not any(fnmatch.fnmatch(row["path"], pattern) for pattern in patterns)]

"""What a folder holds, in three short digests: names and sizes, the files themselves, and samples of their content.

Two machines that see one file under one path see the same inode number and time of change, also over NFS and Lustre.
Copies have other inodes; equal samples (the first bytes, where safetensors keep their header, and pieces of the rest)
tell them apart from another model of the same shape, whose names, sizes and headers are the same.
"""

import hashlib
import os
from typing import Any, Dict, Iterator, Tuple

Json = Dict[str, Any]
MOST_FILES = 20000
HEAD_BYTES = 1 << 20
PIECES, PIECE_BYTES = 8, 4096


def files_in(folder: str) -> Iterator[Tuple[str, str]]:
    """Every file as (name in the folder, path), sorted; what begins with a dot is somebody's bookkeeping."""
    for here, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = os.path.join(here, name)
                yield os.path.relpath(path, folder), path


def sample(path: str, size: int) -> bytes:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        found.update(file.read(HEAD_BYTES))
        for piece in range(1, PIECES + 1):
            file.seek(max(0, size * piece // PIECES - PIECE_BYTES))
            found.update(file.read(PIECE_BYTES))
    return found.digest()


def fingerprint(folder: str, samples: bool) -> Json:
    """The digests of a folder; `unreadable` names the first file that this user cannot read."""
    listed, identities, contents = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    count, unreadable = 0, ""
    for name, path in files_in(folder):
        count += 1
        if count > MOST_FILES:
            raise OSError("%s holds more than %d files" % (folder, MOST_FILES))
        if not os.access(path, os.R_OK):
            unreadable = unreadable or name
            continue
        facts = os.stat(path)
        row = os.fsencode(name) + b"\0%d\0" % facts.st_size
        listed.update(row)
        identities.update(row + b"%d\0%d\0" % (facts.st_ino, facts.st_mtime_ns))
        if samples:
            contents.update(sample(path, facts.st_size))
    return {
        "files": count,
        "unreadable": unreadable[:200],
        "listed": listed.hexdigest(),
        "identities": identities.hexdigest(),
        "contents": contents.hexdigest() if samples else "",
    }


def fingerprints(asked: Json) -> Json:
    samples = bool(asked.get("samples"))
    return {"fingerprints": {path: fingerprint(path, samples) for path in asked.get("fingerprints", [])}}

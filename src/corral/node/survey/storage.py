"""Disks and files: free space, sizes, whether storage is shared, how fast it reads, and fingerprints of folders.

A fingerprint is three digests: names and sizes, the files themselves, and samples of their content. Two machines that
see one file under one path see the same inode number and change time, also over NFS and Lustre. A copy has other
inodes; its samples (the first bytes, where safetensors keep their header, and pieces of the rest) are equal, and
differ from those of another model of the same shape, whose names, sizes and headers are the same.
"""

import contextlib
import hashlib
import os
import time
from typing import Any, Dict, Iterator, List, Tuple

from ..files import read_text as read

Json = Dict[str, Any]
FOLDERS = ("deployments", "nodes", "engines", "models")  # of a Corral home
TRIED_BYTES = 64 << 10
MOST_FILES = 20000
HEAD_BYTES = 1 << 20
PIECES, PIECE_BYTES = 8, 4096


def space(path: str) -> Json:
    """Total and free bytes of the file system that holds the path, or will hold it once it is made."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    stat = os.statvfs(path)
    return {"total_bytes": stat.f_blocks * stat.f_frsize, "free_bytes": stat.f_bavail * stat.f_frsize}


def disks(request: Json) -> Json:
    return {"disks": {path: space(path) for path in request.get("disks", [])}}


def written(request: Json) -> Json:
    """By path, why a deployment cannot write to this folder; empty where it can."""
    return {"written": {path: try_writing(os.path.expanduser(path)) for path in request.get("write", [])}}


def try_writing(place: str) -> str:
    """Make the folder, write into it and into Corral's folders below it, and clean up; the error, or empty."""
    made: List[str] = []
    try:
        missing = place
        while not os.path.lexists(missing):
            made.insert(0, missing)
            missing = os.path.dirname(missing)
        for folder in made:
            os.mkdir(folder, 0o700)
        below = [os.path.join(place, name) for name in FOLDERS]
        for folder in [place] + [folder for folder in below if os.path.lexists(folder)]:
            write_and_remove(folder)
    except OSError as error:
        return "%s: %s" % (error.filename or place, error.strerror or error)
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    return ""


def write_and_remove(folder: str) -> None:
    """Write a small file, synced: a full disk, a quota or the wrong owner refuses that."""
    path = os.path.join(folder, ".corral-tried-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    try:
        with open(path, "xb", buffering=0) as file:
            file.write(b"0" * TRIED_BYTES)
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, folder) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def shm(_: Json) -> Json:
    return {"shm": space("/dev/shm")}  # noqa: S108


def measure(path: str, limit_s: float) -> Json:
    """Whether a path exists, its size, and whether the time sufficed to count everything."""
    full, until = os.path.expanduser(path), time.monotonic() + limit_s
    if not os.path.exists(full):
        return {"exists": False, "readable": False, "size_bytes": 0, "files": 0, "whole": True}
    readable = os.access(full, os.R_OK)
    if not os.path.isdir(full):
        return {"exists": True, "readable": readable, "size_bytes": os.path.getsize(full), "files": 1, "whole": True}
    size = files = 0
    whole = True
    for folder, _, names in os.walk(full):
        for name in names:
            try:
                size += os.stat(os.path.join(folder, name)).st_size
                files += 1
            except OSError:
                continue
        if time.monotonic() > until:
            whole = False
            break
    return {"exists": True, "readable": readable, "size_bytes": size, "files": files, "whole": whole}


def paths(request: Json) -> Json:
    return {"paths": {path: measure(path, 5.0) for path in request.get("paths", [])}}


def nonces(request: Json) -> Json:
    """The content of files that Corral wrote: one that another node wrote shows shared storage."""
    return {"nonces": {path: read(os.path.expanduser(path))[:200] for path in request.get("nonces", [])}}


def largest_file(root: str) -> str:
    if os.path.isfile(root):
        return root
    found = []
    for folder, _, names in os.walk(root):
        found += [os.path.join(folder, name) for name in names]
        if len(found) > 5000:
            break
    return max(found, key=lambda path: os.path.getsize(path) if os.path.exists(path) else 0, default="")


def read_speed(request: Json) -> Json:
    """How fast the storage of a path reads: at most 1 GiB or 3 s. Caches are not dropped."""
    there = [path for path in map(os.path.expanduser, request.get("read", [])) if os.path.exists(path)]
    path = largest_file(there[0]) if there else ""
    if not path:
        return {"read_speed": None}
    done, began, piece = 0, time.monotonic(), bytearray(8 << 20)
    with open(path, "rb", buffering=0) as file:
        while done < (1 << 30) and time.monotonic() - began < 3.0:
            got = file.readinto(piece)
            if not got:
                break
            done += got
    took = max(time.monotonic() - began, 1e-6)
    return {"read_speed": {"file": path, "read_bytes": done, "seconds": took}}


def files_in(folder: str) -> Iterator[Tuple[str, str]]:
    """Every file as (name in the folder, path), sorted; names that begin with a dot are left out."""
    for here, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = os.path.join(here, name)
                yield os.path.relpath(path, folder), path


def sample(path: str, size: int) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for piece in range(1, PIECES + 1):
            file.seek(max(0, size * piece // PIECES - PIECE_BYTES))
            digest.update(file.read(PIECE_BYTES))
    return digest.digest()


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


def fingerprints(request: Json) -> Json:
    samples = bool(request.get("samples"))
    return {"fingerprints": {path: fingerprint(path, samples) for path in request.get("fingerprints", [])}}

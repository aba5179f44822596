"""A folder: its listing, writing into it without following links, and its storage (free space, read speed)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import fnmatch
import os
import time
from typing import IO, Iterator, List, Sequence, Tuple

from .manifest import OWN_FILES, inner_target, split
from .protocol import CourierError, Json, send_event

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NOT_A_FOLDER = (
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EMLINK,
)  # the errors of systems for a link where a folder was expected


def listing(folder: str, leave_out: Sequence[str], links_out: str) -> List[Json]:
    """Files, links and empty folders below `folder`, sorted by name.

    Links that stay inside are listed as links; those that lead out are followed (a hub cache's) or kept (an
    environment's), as `links_out` says.
    """
    root = os.path.realpath(folder)
    rows: List[Json] = []

    def visit(here: str, below: str, depth: int) -> None:
        if depth > 64:
            raise CourierError(f"{here} is nested too deeply: do its links form a circle?")
        entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        if not entries and below:
            rows.append({"path": below, "kind": "folder", "size": 0, "mode": os.stat(here).st_mode & 0o777})
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            patterns = (*OWN_FILES, *leave_out)
            if any(fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(entry.name, pattern) for pattern in patterns):
                continue
            if entry.is_symlink() and (links_out == "keep" or stays_inside(root, path)):
                rows.append({"path": path, "kind": "link", "size": 0, "target": os.readlink(entry.path)})
            elif entry.is_dir():
                visit(entry.path, path, depth + 1)
            elif entry.is_file():
                status = entry.stat()
                rows.append({"path": path, "kind": "file", "size": status.st_size, "mode": status.st_mode & 0o777,
                             "mtime_ns": status.st_mtime_ns})  # fmt: skip
            elif entry.is_symlink():
                raise CourierError(f"{entry.path} is a link to nothing.")

    visit(root, "", 0)
    return rows


def stays_inside(root: str, path: str) -> bool:
    """Whether a link leads to something inside, and through no other link: only such a link may be in a manifest."""
    link = os.path.join(root, path)
    parts = inner_target(path, os.readlink(link))
    if parts is None or not os.path.exists(link):
        return False
    above = os.path.join(root, *parts[:-1])
    return os.path.realpath(above) == above


class Tree:
    """A folder that is written into, by descriptor: every part of a path must be a folder, not a link, when it is
    used.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder  # the user named it: it may be a link

    def resolve(self, path: str) -> str:
        return os.path.join(self.folder, *split(path))

    @contextlib.contextmanager
    def parent(self, path: str, make: bool = False) -> Iterator[Tuple[int, str]]:
        """The folder of a path as a descriptor, and the path's last name; `make` makes missing folders."""
        *above, name = split(path)
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in above:
                handle, before = self._enter(handle, part, path, make), handle
                os.close(before)
            yield handle, name
        finally:
            os.close(handle)

    def _enter(self, handle: int, part: str, path: str, make: bool) -> int:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=handle)
            return os.open(part, OPEN_FOLDER, dir_fd=handle)
        except OSError as error:
            if error.errno not in NOT_A_FOLDER:
                raise
            text = f"{path!r} leads out of {self.folder} by a link, or through a file: {part!r} is not a folder."
            raise CourierError(text) from None

    def check(self, path: str) -> None:
        """Refuse a path that leads through a link."""
        with contextlib.suppress(FileNotFoundError), self.parent(path):
            pass

    def open(self, path: str, name: str, flags: int) -> int:
        """Open a file beside `path`, made with its folders where the flags say so; never through a link."""
        with self.parent(path, make=bool(flags & os.O_CREAT)) as (handle, _):
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=handle)

    def rename(self, path: str, name: str) -> None:
        """Rename a file beside `path` to that path; a link of that name is replaced, not followed."""
        with self.parent(path) as (handle, last):
            os.replace(name, last, src_dir_fd=handle, dst_dir_fd=handle)

    def unlink(self, path: str, name: str) -> None:
        with self.parent(path) as (handle, _), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=handle)

    def link(self, path: str, target: str) -> None:
        with self.parent(path, make=True) as (handle, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=handle)
            os.symlink(target, name, dir_fd=handle)

    def make(self, path: str) -> None:
        """Make an empty folder."""
        with self.parent(path, make=True) as (handle, name):
            os.close(self._enter(handle, name, path, make=True))


@contextlib.contextmanager
def open_folder(folder: str) -> Iterator[int]:
    """A folder as a descriptor."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


class Nonce:
    """A file by which other nodes can tell whether they see the same storage."""

    def __init__(self, folder: str, name: str) -> None:
        self.path = nonce_path(folder, name)
        self.written = False
        with contextlib.suppress(OSError):
            for old in os.scandir(folder):  # of a courier that was killed
                if old.name.startswith(".corral-nonce-") and time.time() - old.stat().st_mtime > 86400:
                    os.unlink(old.path)
        with contextlib.suppress(OSError):
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            self.written = True

    def remove(self) -> None:
        if self.written:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def visible_nonces(folder: str, names: Sequence[str]) -> List[str]:
    # each name by itself, not a listing: network file systems cache listings
    return [name for name in names if os.path.exists(nonce_path(folder, name))]


def nonce_path(folder: str, name: str) -> str:
    return os.path.join(folder, f".corral-nonce-{name}")


def free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def sync_file_system(folder: str) -> None:
    """Sync thousands of small files with one call."""
    with open_folder(folder) as handle:
        try:
            ctypes.CDLL(None).syncfs(handle)
        except (OSError, AttributeError):
            os.sync()


def read_speed(request: Json, _: IO[bytes]) -> None:
    """Read the largest files for a few seconds, without the page cache where the system allows that."""
    folder, limit_s = os.path.expanduser(request["folder"]), float(request.get("seconds", 2))
    rows = [row for row in listing(folder, request.get("leave_out", ()), "follow") if row["kind"] == "file"]
    largest = sorted(rows, key=lambda row: -row["size"])[:4]
    began_s = time.monotonic()

    def read(row: Json) -> int:
        count, buffer = 0, bytearray(4 << 20)
        with open(os.path.join(folder, row["path"]), "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while time.monotonic() - began_s < limit_s:
                got = file.readinto(buffer)
                if not got:
                    break
                count += got
        return count

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        total = sum(pool.map(read, largest))
    took_s = max(1e-6, time.monotonic() - began_s)
    send_event("read-speed", bytes=total, seconds=took_s, bytes_per_s=total / took_s)

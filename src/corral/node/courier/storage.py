"""The storage below a folder: whether others see the same, what is free, how fast it reads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import time
from typing import IO, List, Sequence

from .folders import listing
from .protocol import Json, tell


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


def seen(folder: str, names: Sequence[str]) -> List[str]:
    # one look per fresh name, not a listing: network file systems remember listings
    return [name for name in names if os.path.exists(nonce_path(folder, name))]


def nonce_path(folder: str, name: str) -> str:
    return os.path.join(folder, f".corral-nonce-{name}")


def free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def sync_file_system(folder: str) -> None:
    """One call for thousands of small files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(handle)
    except (OSError, AttributeError):
        os.sync()
    finally:
        os.close(handle)


def read_speed(order: Json, _: IO[bytes]) -> None:
    """Reads the largest files, past the page cache where the system lets us, for a few seconds."""
    folder, limit_s = os.path.expanduser(order["folder"]), float(order.get("seconds", 2))
    rows = [row for row in listing(folder, order.get("leave_out", ()), "follow") if row["kind"] == "file"]
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
    tell("read-speed", bytes=total, seconds=took_s, bytes_per_s=total / took_s)

"""Writing files so that a crash leaves the old content or the new, and only the owner can read them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from corral.node.files import write_atomic

__all__ = ["create_private", "make_private_dir", "remove_tree", "write_atomic"]


def create_private(path: Path, like: Path | None = None) -> int:
    """Make a file anew and open it; only the owner can read it, or whoever can read the file it is `like`."""
    path.unlink(missing_ok=True)  # nobody has the new one open, also not who still writes an older one
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    if like is not None:
        about = like.stat()
        mode = about.st_mode & 0o777
        try:
            os.fchown(descriptor, -1, about.st_gid)
        except OSError:  # not a group of ours: what was meant for that group is for no other
            mode &= ~0o070
        os.fchmod(descriptor, mode)
    return descriptor


def make_private_dir(path: Path) -> None:
    """Make a folder, and its missing parents, that only the owner may enter."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)


def remove_tree(path: Path, mark: str = "") -> None:
    """Delete a folder: it loses its name at once and its files after that, so that nobody finds half of it."""
    aside = path.with_name(f".{path.name}{mark}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)

"""Writing files so that a crash leaves the old content or the new, and only the owner can read them."""

from __future__ import annotations

import os
from pathlib import Path

from corral.node.files import write_atomic

__all__ = ["create_private", "make_private_dir", "write_atomic"]


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

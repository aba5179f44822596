"""Writing files so that a crash leaves the old content or the new, and only the owner can read them."""

from __future__ import annotations

from pathlib import Path

from corral.node.files import write_atomic

__all__ = ["make_private_dir", "write_atomic"]


def make_private_dir(path: Path) -> None:
    """Make a folder, and its missing parents, that only the owner may enter."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)

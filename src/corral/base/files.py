"""Reading files that users name, and writing files so that a crash leaves the old content or the new.

Every input file of a command follows one rule: a missing file is exit code 3; one that cannot be read, or is not
UTF-8, is exit code 10.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from pathlib import Path

from corral.base.errors import AccessError, DataError, NotFoundError
from corral.base.record import nearest
from corral.node.files import write_atomic

__all__ = [
    "changed_s",
    "create_private",
    "existing_file",
    "is_gone",
    "is_key",
    "make_dir",
    "make_private_dir",
    "read_key",
    "read_text",
    "records_in",
    "remove_tree",
    "write_atomic",
]


def existing_file(given: str | Path, hint: str = "Check the path.") -> Path:
    """The path of a file that the user named; the error for a missing one suggests a similar name."""
    path = Path(given).expanduser()
    if path.is_dir():
        raise DataError(f"{str(given)!r} is a folder.", "Name a file.")
    if not path.exists():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [], 1)
        raise NotFoundError(
            f"there is no file {str(given)!r}.", f"Did you mean {path.parent / near[0]}?" if near else hint
        )
    return path


def is_gone(path: Path) -> bool:
    """Whether nothing is certainly there; what cannot be asked now (a stale handle, an I/O error) may be there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def records_in(parent: Path, name: str) -> list[Path]:
    """The files called `name` in the folders of `parent` that are not hidden, also those that cannot be read now."""
    try:
        folders = os.listdir(parent)  # noqa: PTH208 - a glob hides errors
    except FileNotFoundError:
        return []
    records = (parent / folder / name for folder in sorted(folders) if not folder.startswith("."))
    return [record for record in records if not is_gone(record)]


def changed_s(path: Path) -> float:
    """The wall-clock time at which a file last changed; 0 where that cannot be read."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_text(given: str | Path) -> str:
    """The text of a file that the user named."""
    path = existing_file(given)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{given} cannot be read: {error.strerror}.", "Check its permissions.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{given} is not UTF-8 (byte {error.start}).", "Save it as UTF-8.") from None


SHORTEST_KEY, LONGEST_KEY = 16, 1024  # characters


def read_key(given: str | Path, shortest: int = SHORTEST_KEY) -> str:
    """The key in a file that only its owner may read; those of other programs' servers may be shorter than ours."""
    try:
        path = existing_file(given)
        mode, key = path.stat().st_mode, read_text(path).strip()
    except OSError as error:
        raise DataError(f"{given} cannot be read: {error.strerror}.", "Check its permissions.") from None
    if mode & 0o077:
        raise AccessError(f"others may read the key in {given}.", f"Run chmod 600 {shlex.quote(str(path))}")
    if not shortest <= len(key) <= LONGEST_KEY or not is_key(key):
        raise DataError(
            f"{given} holds no usable key.",
            f"Write one line of {shortest} to {LONGEST_KEY:,} visible ASCII characters, no spaces.",
        )
    return key


def is_key(text: str) -> bool:
    """Whether a text can stand in a header as a key."""
    return re.fullmatch(r"[!-~]+", text) is not None


def create_private(path: Path, like: Path | None = None) -> int:
    """Make a new file and open it; readable by its owner only, or by whoever can read the file `like`."""
    path.unlink(missing_ok=True)  # a process that still writes an older file does not write into the new one
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    if like is not None:
        status = like.stat()
        mode = status.st_mode & 0o777
        try:
            os.fchown(descriptor, -1, status.st_gid)
        except OSError:  # not a group of this user: then no group may read it
            mode &= ~0o070
        os.fchmod(descriptor, mode)
    return descriptor


def make_dir(path: Path) -> None:
    """Make a folder and its missing parents; only the owner may enter what is made here."""
    if not path.parent.exists():
        make_dir(path.parent)  # `mode` of mkdir does not apply to parents
    path.mkdir(exist_ok=True, mode=0o700)


def make_private_dir(path: Path) -> None:
    """Make a folder, and its missing parents, that only the owner may enter, also where it is there already."""
    make_dir(path)
    path.chmod(0o700)


def remove_tree(path: Path, mark: str = "") -> None:
    """Delete a folder: it is renamed first, so that nobody finds half of it."""
    aside = path.with_name(f".{path.name}{mark}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)

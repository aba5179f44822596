"""A file of this machine whose content a request sends: a regular one, of bounded size."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import DataError


@dataclass(frozen=True)
class LocalFileKind:
    """What a request may send of its files."""

    name: str
    most_bytes: int
    too_large: str  # the remedy

    def path(self, given: str, folder: Path | None) -> Path:
        """The path that a request names; a relative one lies in the folder of the input."""
        if folder is None and not given.startswith("/"):
            raise DataError(
                f"the path of the {self.name} {given} is relative, and the input is not a file.", "Give whole paths."
            )
        return (folder or Path("/")) / given

    def read(self, path: Path, first: int | None = None) -> tuple[bytes, int]:
        """What the file holds (or only its first bytes), and its size."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not wait for its writer
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                os.close(descriptor)
                raise DataError(f"{path} is not a file.", f"Name a {self.name}.")
            with os.fdopen(descriptor, "rb") as file:
                content = file.read(self.most_bytes + 1 if first is None else first)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(
                f"the {self.name} {path} cannot be read: {why}.", "Check the path and the permissions."
            ) from None
        if (size := max(len(content), about.st_size)) > self.most_bytes:
            has = f"{size / (1 << 20):,.1f} MiB; at most {self.most_bytes >> 20} MiB are sent"
            raise DataError(f"the {self.name} {path} has {has}.", self.too_large)
        return content, size

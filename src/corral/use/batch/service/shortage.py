"""What the machine lacks just now (room on the disk, descriptors, memory), and whether it has it again.

A shortage is nobody's fault who sent a batch: it pauses one, and the batch goes on by itself. Texts name no path of
the server.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import tempfile
from pathlib import Path

from corral.base.errors import CorralError

PROBE_BYTES = 1 << 20
PROBE_FILES = 24


class Shortage(enum.Enum):
    """What is short; the value is the code that clients see."""

    DISK = "server_disk_full"
    FILES = "server_out_of_file_descriptors"
    MEMORY = "server_out_of_memory"

    @property
    def text(self) -> str:
        return f"Paused: {_WORDS[self]}. The batch continues by itself when there is some again; nothing is lost."


_WORDS = {
    Shortage.DISK: "the server has no room on its disk",
    Shortage.FILES: "the server has no free file descriptors",
    Shortage.MEMORY: "the server has no free memory",
}
_NUMBERS = {
    errno.ENOSPC: Shortage.DISK,
    errno.EDQUOT: Shortage.DISK,
    errno.EMFILE: Shortage.FILES,
    errno.ENFILE: Shortage.FILES,
    errno.ENOMEM: Shortage.MEMORY,
    errno.ENOBUFS: Shortage.MEMORY,
    errno.EAGAIN: Shortage.MEMORY,  # no further process or thread
}


def shortage_of(error: BaseException) -> Shortage | None:
    """The shortage that an error, or what it came from, is about."""
    seen: BaseException | None = error
    while seen is not None:
        number = seen.errno if isinstance(seen, OSError) else None
        if isinstance(seen, CorralError):
            number = seen.details.get("errno")
        if number in _NUMBERS:
            return _NUMBERS[number]
        if isinstance(seen, MemoryError) or (isinstance(seen, RuntimeError) and "start new thread" in str(seen)):
            return Shortage.MEMORY
        seen = seen.__cause__ or seen.__context__
    return None


def has_room(folder: Path) -> bool:
    """Whether files can be opened and a little can be written there: tried, because quotas are told nowhere else."""
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(PROBE_FILES):
                stack.callback(os.close, os.open(folder, os.O_RDONLY))
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                written = file.write(bytes(PROBE_BYTES))
                os.fsync(file.fileno())
                return written == PROBE_BYTES
        except (OSError, MemoryError):
            return False

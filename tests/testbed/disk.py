"""File systems of their own, that can be filled or left hanging without harm; hosts that come later share them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.hosts import wait_for


@contextmanager
def small_disk(path: Path, size_bytes: int, mode: int = 0o1777) -> Iterator[None]:
    """Mounted at `path`, which is made; gone afterwards, also where something still has files open there."""
    path.mkdir()
    options = f"size={size_bytes},mode={mode:o}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)


@dataclass
class Served:
    """A folder whose file system is a process, as that of a network file system is another machine."""

    pid: int

    def hang(self) -> None:
        """Whoever reads or writes there waits."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def served_folder(path: Path, behind: Path) -> Iterator[Served]:
    """`behind` seen at `path`, both made, through a server that can hang; gone afterwards."""
    for folder in (path, behind):
        folder.mkdir(exist_ok=True)
    with subprocess.Popen(["bindfs", "-f", str(behind), str(path)]) as server:
        try:
            wait_for(path.is_mount, 10, f"a file system at {path}")
            yield Served(server.pid)
        finally:
            os.kill(server.pid, signal.SIGCONT)
            subprocess.run(["umount", "--lazy", str(path)], check=False)
            server.terminate()

"""Files of this machine, down the ssh connection of one host: what it lacks, and again what went wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.deploy.transfer.courier import Courier, Event
from corral.deploy.transfer.courier_events import CourierRow

SMALL_BYTES = 1 << 20  # as in node/courier/fetch.py: smaller files travel whole
FRAME_BYTES = 1 << 20


@dataclass(frozen=True)
class Push:
    """One host that gets its files from here. `asked` waits for what it says it holds; None: it is over."""

    courier: Courier
    folder: Path
    files: Sequence[CourierRow]
    asked: Callable[[], Event | None]
    is_over: Callable[[], bool]
    trouble: Callable[[Event], None]
    uplink_bytes_per_s: float = 0

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.is_over() and self.courier.send({"do": "held"}):
            said = self.asked()
            if said is None:
                return
            held = [row for row in said["held"] if row[0] < len(self.files)]
            for number, have in sorted(held, key=lambda row: self.files[row[0]].size >= SMALL_BYTES):
                if not self._file(number, have):
                    return

    def _file(self, number: int, offset: int) -> bool:
        path = self.folder / self.files[number].path
        try:
            with path.open("rb") as file:
                file.seek(offset)
                while self._is_same(number, os.fstat(file.fileno())):
                    block = file.read(FRAME_BYTES)
                    if not block:
                        return True
                    if self.uplink_bytes_per_s:
                        time.sleep(len(block) / self.uplink_bytes_per_s)
                    order = {"do": "data", "file": number, "offset": offset, "length": len(block)}
                    if self.is_over() or not self.courier.send(order, block):
                        return False
                    offset += len(block)
        except FileNotFoundError:
            self._is_same(number, None)
        except OSError as error:
            self.trouble({"event": "failed", "text": f"{path} cannot be read here: {error.strerror}."})
        return False

    def _is_same(self, number: int, found: os.stat_result | None) -> bool:
        """Whether a file is still the one that was listed; if not, that is said, and nothing more is sent."""
        row = self.files[number]
        if found and (found.st_size, found.st_mtime_ns) == (row.size, row.mtime_ns):
            return True
        how, now = ("rewritten", found.st_size) if found else ("gone", 0)
        self.trouble({"event": "changed", "path": row.path, "how": how, "was_bytes": row.size, "now_bytes": now,
                      "more": 0})  # fmt: skip
        return False

"""How a courier is spoken to: one JSON object per line, in and out."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import IO, Any, Callable, Dict, Optional

Json = Dict[str, Any]


class TroubleError(Exception):
    """One sentence for the user."""


_out_lock = threading.Lock()


def tell(event: str, **fields: Any) -> None:
    with _out_lock:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def read_line(stream: IO[bytes]) -> Optional[Json]:
    line = stream.readline()
    return json.loads(line) if line.endswith(b"\n") else None


class Pace:
    """Calls `say` with the numbers at most twice a second, from whichever thread."""

    def __init__(self, say: Callable[[int, int], None], total: int) -> None:
        self.say, self.total, self.done, self.told_s = say, total, 0, 0.0
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if time.monotonic() - self.told_s < 0.5:
                return
            self.told_s = time.monotonic()
        self.say(self.done, self.total)

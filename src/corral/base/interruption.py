"""Being told to end: SIGTERM, from a scheduler or `timeout`, as Ctrl-C is."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in here; in other threads than the main one, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""Waiting for what must happen: long enough for a busy machine, and never passed over in silence."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT_S = 120.0


def until(condition: Callable[[], T | None], what: str = "what was waited for", limit_s: float = LIMIT_S) -> T:
    """What `condition` gives once that is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never came: {what}")
        time.sleep(0.02)
    return found


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody uses, below those that the kernel gives to connections going out."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port

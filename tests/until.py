"""Waiting for what must happen: long enough for a busy machine, and never passed over in silence."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT_S = 120.0
OFTEN_S, SELDOM_S = 0.02, 0.5


def until(condition: Callable[[], T | None], what: str = "what was waited for", limit_s: float = LIMIT_S) -> T:
    """What `condition` gives once that is true."""
    if found := polled(condition, limit_s):
        return found
    raise AssertionError(f"never came: {what}")


def polled(condition: Callable[[], T | None], limit_s: float) -> T | None:
    """What `condition` gives once that is true, or None when the time is up.

    Between two looks it sleeps twice as long as a look takes: one that runs a command would take a core for itself,
    and what is waited for needs it.
    """
    deadline = time.monotonic() + limit_s
    while True:
        began = time.monotonic()
        if found := condition():
            return found
        if (now := time.monotonic()) > deadline:
            return None
        time.sleep(min(SELDOM_S, max(OFTEN_S, 2 * (now - began))))


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

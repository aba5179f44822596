"""A timer good to about 0.1 ms: timerfd where Linux offers it, because event loops round to a millisecond."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable

_SECOND = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = (("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long),
                ("s", ctypes.c_long), ("ns", ctypes.c_long))  # fmt: skip


class PreciseTimer:
    """Calls a function at a monotonic time: by timerfd (about 0.1 ms late) or by the loop's timer (about 1 ms)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop, self._call = loop, call
        self._armed = 0
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                self._libc = ctypes.CDLL(None, use_errno=True)
                self._fd = self._libc.timerfd_create(1, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._spec = _TimeSpec()
            self._pointer = ctypes.byref(self._spec)
            loop.add_reader(self._fd, self._fire)

    def set(self, due_ns: int) -> None:
        """Call at `due_ns`, unless an earlier call is already due."""
        if self._armed and self._armed <= due_ns:
            return
        self._armed = due_ns
        if self._fd >= 0:
            self._spec.s, self._spec.ns = divmod(max(due_ns, 1), _SECOND)
            self._libc.timerfd_settime(self._fd, 1, self._pointer, None)
            return
        if self._handle:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0, due_ns - time.monotonic_ns()) / _SECOND, self._fire)

    def close(self) -> None:
        if self._handle:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fire(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)
        self._armed = 0
        self._call()

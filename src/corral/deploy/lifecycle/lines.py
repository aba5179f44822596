"""A start as lines on stderr, for programs that start a model from Python."""

from __future__ import annotations

import sys
import time

from corral.deploy.deployment.expectation import Expected


class Lines:
    """Tells on stderr what `up` is doing, a line for each phase."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._began, self._phase = quiet, time.monotonic(), ""

    def phase(self, name: str, expected: Expected | None = None) -> None:
        if name != self._phase:
            self._phase = name
            self._write(f"{name} ({expected.text})" if expected else name)

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None:
        if news:
            self._write(text)

    def note(self, text: str) -> None:
        self._write(f"note: {text}")

    def _write(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"[{time.monotonic() - self._began:6.1f} s] {text}\n")

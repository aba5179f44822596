"""A home on a file system that hangs: the command that waits says for what."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from corral.base.home import watch_home


def test_a_home_that_does_not_answer_is_named(clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, told = threading.Event(), threading.Event()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        told.set()

    monkeypatch.setattr(os, "statvfs", lambda path: goes_on.wait(60))
    watch_home(say, 0.01)
    assert told.wait(60)
    goes_on.set()
    assert "waiting for the file system of" in said[0]
    assert "corral" in said[0]


def test_one_that_answers_or_is_not_there_yet_is_no_news(clean_home: Path) -> None:
    said: list[str] = []
    waiting = watch_home(said.append, 60)
    waiting.join(30)
    assert not waiting.is_alive()
    assert not said

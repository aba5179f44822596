"""`corral console` as a process, and pages of it in the tier's browser."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

__all__ = ["Console", "beating", "drawing", "picture", "running_console", "watched_page"]

PICTURES = ROOT / "docs" / "pictures"
WAIT_MS = 120_000  # of every wait in this tier


class Console:
    """A running console; every link that it prints is good for one page."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        said = self._read()
        self.url, self._link = said["url"], said["link"]

    def _read(self) -> dict[str, str]:
        assert self._process.stdout is not None
        found: dict[str, str] = json.loads(self._process.stdout.readline())
        return found

    def open(self, page: Any, where: str = "") -> None:
        page.goto(self._link)
        self._link = self._read()["link"]
        if where:
            page.goto(f"{self.url}/#/{where}")


@contextlib.contextmanager
def running_console(env: Mapping[str, str], *options: str) -> Iterator[Console]:
    command = [sys.executable, "-m", "corral", "console", "--port", "0", "--no-open", "--json", *options]
    with subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Console(process)
        finally:
            process.terminate()


@contextlib.contextmanager
def watched_page(browser: Any, console: Console, width: int = 1000, scheme: str = "light") -> Iterator[Any]:
    """A page that must not complain, run a foreign script, or ask another host."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    shown = context.new_page()
    shown.set_default_timeout(WAIT_MS)
    complaints: list[str] = []
    foreign: list[str] = []
    shown.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("dialog", lambda dialog: complaints.append(f"a script ran: {dialog.message}"))
    shown.on("request", lambda one: foreign.append(one.url) if not one.url.startswith(console.url) else None)
    console.open(shown)
    yield shown
    assert complaints == [], complaints
    assert [url for url in foreign if not url.startswith("data:")] == []
    context.close()


@contextlib.contextmanager
def beating(home: Path) -> Iterator[None]:
    """Agents made by hand live: they write a heartbeat, however long the tests take."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(5):
            for heart in home.rglob("heartbeat*"):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(heart)

    hearts = threading.Thread(target=beat)
    hearts.start()
    try:
        yield
    finally:
        over.set()
        hearts.join()


def drawing() -> bool:
    """Whether the pictures of docs/ are being made."""
    return os.environ.get("CORRAL_GOLDEN") == "write"


def picture(page: Any, name: str) -> None:
    """Kept in docs/ when asked for (CORRAL_GOLDEN=write), without the name of the machine that made it."""
    if drawing():
        from PIL import Image

        path = PICTURES / f"console-{name}.png"
        page.evaluate("document.getElementById('host').textContent = ''")
        page.screenshot(path=path)
        with Image.open(path) as image:
            image.convert("RGB").quantize(256, kmeans=1).save(path, optimize=True)

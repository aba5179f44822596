"""One real browser for the pages of this tier."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.e2e.console_page import WAIT_MS
from tests.skips import NO_BROWSER

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
expect.set_options(timeout=WAIT_MS)  # five seconds are Playwright's own, and little on a busy machine


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(NO_BROWSER)
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()

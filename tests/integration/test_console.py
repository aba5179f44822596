"""The console and a real deployment: started from the form, asked in the playground, branched from a token."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.integration.conftest import Corral
from tests.skips import NO_BROWSER

START_MS, ANSWER_MS = 600_000, 120_000
PROFILE = "[defaults]\nset = {eager = true}\n"  # nothing is compiled


def answered(page: Any) -> Any:
    """The tokens of the answer that is shown, once it is whole."""
    expect(page.locator(".answered p", has_text="ended by")).to_have_count(1, timeout=ANSWER_MS)
    tokens = page.locator(".answer .token[role=button]")
    expect(tokens.nth(5)).to_be_visible(timeout=ANSWER_MS)
    return tokens


def test_from_the_form_to_a_branched_answer(corral: Corral, tiny_model: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip(NO_BROWSER)
    profiles = Path(corral.env["HOME"]) / ".config" / "corral" / "profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    (profiles / "quick.toml").write_text(PROFILE)
    console = corral.start("console", "--no-open", "--json", "--port", "0")
    try:
        assert console.stdout is not None
        link = json.loads(console.stdout.readline())["link"]
        with sync_playwright() as play:
            running = play.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-dev-shm-usage"])
            page = running.new_page()
            page.goto(link)
            started_from_the_form(page, tiny_model)
            branched_in_the_playground(page)
            running.close()
    finally:
        console.terminate()
        console.communicate(timeout=60)
        corral.run("down", "from-the-form", check=False)


def started_from_the_form(page: Any, model: Path) -> None:
    page.goto(page.url.partition("#")[0] + "#/fleet/start")
    page.get_by_label("Model", exact=True).fill(str(model))
    page.get_by_label("Name", exact=True).fill("from-the-form")
    page.get_by_label(re.compile("^Profile")).select_option("quick")  # its choices are part of the label
    page.get_by_label("Context", exact=True).fill("512")
    expect(page.locator(".command code").first).to_contain_text("--name from-the-form --on quick --context 512")
    start = page.get_by_role("button", name="Start")
    expect(start).to_be_enabled(timeout=START_MS)
    start.click()
    expect(page.locator(".tag.good", has_text="done")).to_be_visible(timeout=START_MS)


def branched_in_the_playground(page: Any) -> None:
    page.goto(page.url.partition("#")[0] + "#/play")
    page.get_by_label("Kind of request").select_option("completion")
    page.get_by_label("Probabilities").select_option("5")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("max_tokens").fill("12")
    page.get_by_label("temperature").fill("0")
    page.get_by_label("Prompt", exact=True).fill("The quick brown fox")
    page.get_by_role("button", name="Send").click()
    tokens = answered(page)
    before = tokens.evaluate_all("all => all.slice(0, 3).map(one => one.textContent)")
    tokens.nth(3).click()
    page.locator(".alternatives tr:not(.own) button").first.click()
    expect(page.locator(".answered")).to_contain_text("2 of 2")
    tokens = answered(page)
    assert tokens.evaluate_all("all => all.slice(0, 3).map(one => one.textContent)") == before

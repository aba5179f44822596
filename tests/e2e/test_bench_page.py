"""The HTML report in a real browser, at the widths of a desk and of a phone, light and dark.

`tools/install_testbed.sh browser` installs chromium, as root; a page that nobody opened is unchecked.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a run and of a sweep, made by the commands a user types."""
    folder = tmp_path_factory.mktemp("pages")
    env = {"CORRAL_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin"}

    def bench(*words: str) -> None:
        command = [sys.executable, "-m", "corral", "bench", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 1), done.stderr

    lengths = ("--input-len", "32", "--output-len", "16")
    with FakeServer(FakeOptions(pace=Pace(ttft_s=0.02, itl_s=0.002, jitter=0.4, tokens_per_s=4000))) as server:
        url = ("--url", server.url)
        bench("run", *url, "--concurrency", "8", "--num-prompts", "120", "--name", "run", *lengths)
        bench("sweep", *url, "--concurrency", "1,4,16,64", "--num-prompts", "64", "--name", "sweep", *lengths)
    for name in ("run", "sweep"):
        bench("report", name, "-o", str(folder / f"{name}.html"))
    return {name: folder / f"{name}.html" for name in ("run", "sweep")}


@pytest.mark.parametrize("width", [1280, 390, 320])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_report_reads_on_a_desk_and_on_a_phone(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    fetched: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(pages[name].as_uri())
    assert complaints == []
    assert [url for url in fetched if not url.startswith("file:")] == []  # one file, nothing from elsewhere
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing to scroll sideways
    drawings = page.locator("figure svg")
    assert drawings.count() >= 4
    for at in range(drawings.count()):
        box = drawings.nth(at).bounding_box()
        assert box["width"] > 200
        assert box["height"] > 100
    # every label lies inside its drawing
    outside = page.evaluate("""() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => {
            const box = text.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
        }).map(text => svg.getAttribute('aria-label') + ': ' + text.textContent);
    })""")
    assert outside == []
    assert page.evaluate("getComputedStyle(document.body).color") != page.evaluate(
        "getComputedStyle(document.body).backgroundColor"
    )
    smallest = page.evaluate("""() => Math.min(...[...document.querySelectorAll('figure svg')].map(svg =>
        svg.getBoundingClientRect().width / svg.viewBox.baseVal.width * 12.5))""")
    assert smallest >= 8  # px: still readable at 320
    context.close()

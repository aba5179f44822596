"""The Live view with fifty servers, a fleet and GPUs: found, sorted, turned by pages, and drawn.

Servers are folders made by hand before two fake servers under load; `nvidia-smi` is a stand-in whose figures change.
"""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from tests.console_home import fake_program, make, make_fleet
from tests.e2e.console_page import Console, beating, drawing, picture, running_console, watched_page
from tests.until import until

GPUS = """now=$(date +%s)
for gpu in 0 1 2 3; do
  watts=$((380 + (now + 7 * gpu) % 240))
  echo "$gpu, NVIDIA H100 80GB HBM3, $watts.50, $((61000 + 900 * gpu)), 81559, $((90 + gpu))"
done"""
ALONE, MEMBERS = 47, ("herd-1", "herd-2", "herd-3")


def asked(url: str, over: threading.Event) -> None:
    """One client that never rests."""
    body = {"model": "fake", "prompt": "Tell me of horses. " * 40, "max_tokens": 64, "ignore_eos": True}
    while not over.is_set():
        given = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                       {"content-type": "application/json"})  # fmt: skip
        with urllib.request.urlopen(given, timeout=60) as answer:
            answer.read()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Fifty servers that are ready, three of them a fleet."""
    place = tmp_path_factory.mktemp("live")
    pace, over = Pace(ttft_s=0.05, itl_s=0.01), threading.Event()
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeServer(FakeOptions(pace=pace)) as one,
        FakeServer(FakeOptions(pace=pace)) as other,
    ):
        patch.setenv("CORRAL_HOME", str(place / "home"))
        fake_program(place / "bin", "nvidia-smi", GPUS)
        for number, name in enumerate([*MEMBERS, *(f"server-{number:02}" for number in range(ALONE))]):
            made = make(name, 600, "llama-3.1-8b-instruct").agent()
            made.course(("starting", 0.5), ("ready", 30)).serves(f"{(one if number % 2 else other).url}/v1")
        make_fleet("herd", "llama-3.1-8b-instruct", MEMBERS, one.url, 6)
        clients = [threading.Thread(target=asked, args=(server.url, over)) for server in (one, one, other)]
        for client in clients:
            client.start()
        with beating(place / "home"):
            yield place
        over.set()
        for client in clients:
            client.join()


@pytest.fixture(scope="module")
def console(home: Path) -> Iterator[Console]:
    env = {**os.environ, "CORRAL_HOME": str(home / "home"), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    with running_console(env) as running:
        yield running


@pytest.fixture
def page(browser: Any, console: Console) -> Iterator[Any]:
    with watched_page(browser, console, 1280) as shown:
        shown.goto(f"{console.url}/#/live")
        expect(shown.locator("tr[data-name='server-00']")).to_be_visible()
        yield shown


def names(page: Any) -> list[str]:
    found: list[str] = page.locator(".view-live tr[data-name]").evaluate_all(
        "all => all.filter(one => one.closest('table').id !== 'jobs').map(one => one.dataset.name)"
    )
    return found


def test_fifty_servers_are_turned_by_pages_found_and_sorted(page: Any) -> None:
    servers = page.get_by_role("region", name="Servers")
    expect(servers).to_contain_text("1 to 25 of 51")
    assert names(page)[:5] == ["all servers", "herd", *MEMBERS]
    assert len(names(page)) == 1 + 25
    servers.get_by_role("button", name="Next").click()
    expect(servers).to_contain_text("26 to 50 of 51")
    page.get_by_label("Find servers").fill("server-1")
    until(lambda: names(page) == [f"server-1{number}" for number in range(10)], "those that are looked for")
    page.get_by_label("Find servers").fill("nothing of the kind")
    expect(servers).to_contain_text("No server is called that.")
    page.get_by_label("Find servers").fill("")
    page.get_by_label("Sort by").select_option("tokens/s")
    expect(servers).to_contain_text("1 to 25 of 51")
    page.set_viewport_size({"width": 1000, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000


def test_a_row_keeps_its_focus_while_its_figures_change(page: Any) -> None:
    row = page.locator("tr[data-name='herd-2']")
    figure = row.locator("td").nth(1)
    expect(figure).to_have_text(re.compile(r"\d"))
    before = figure.text_content()
    row.get_by_role("button").focus()
    expect(figure).not_to_have_text(before or "")
    assert page.evaluate("document.activeElement.textContent") == "herd-2"


def test_a_fleet_is_shown_whole_and_by_member(page: Any) -> None:
    fleet = page.locator("tr[data-name='herd']")
    expect(fleet).to_contain_text("fleet of 3")
    for name in MEMBERS:
        expect(page.locator(f"tr.member[data-name='{name}']")).to_be_visible()
    fleet.get_by_role("button").click()
    expect(fleet.locator("td").nth(7)).to_have_text(re.compile(r"\d.* / .*\d"))  # TPOT: its slowest member's
    hour = page.get_by_role("region", name="The last hour")
    expect(hour.locator(".latest").first).to_have_text(re.compile(r"generated \d.*prompt \d"))
    page.get_by_label("Time range").select_option("5 minutes")
    expect(hour.locator("h2")).to_have_text("herd")
    expect(hour.locator("canvas")).to_have_count(5)
    expect(hour.get_by_role("img", name="Tokens per second of herd over the last hour")).to_be_visible()


def test_power_and_memory_of_gpus_are_drawn_over_the_hour(page: Any) -> None:
    gpus = page.get_by_role("region", name="GPUs")
    expect(gpus.locator("canvas")).to_have_count(2)
    expect(gpus.locator("tbody tr", has_text="NVIDIA H100").first).to_contain_text(re.compile(r"\d+ W.*of 80 GiB"))
    expect(gpus.locator(".u-legend").first).to_contain_text("GPU 3")
    points = "async () => (await (await import('/static/net.js')).get('/api/live/gpus')).figures['power 1'].length"
    least = page.evaluate(points) + (9 if drawing() else 1)  # a chart of some seconds is no picture
    until(lambda: page.evaluate(points) >= least, "points of an hour")
    page.get_by_label("Find servers").fill("herd")
    picture(page, "live")
    gpus.scroll_into_view_if_needed()
    picture(page, "gpus")


def test_a_fleet_has_a_page_and_is_scaled(page: Any, console: Console) -> None:
    page.goto(f"{console.url}/#/fleet/f/herd")
    expect(page.get_by_role("region", name="Fleet").locator("tbody tr")).to_have_count(3)
    page.get_by_label("Members").fill("2..6")
    page.get_by_role("button", name="Scale").click()
    expect(page.locator("dialog code")).to_have_text("corral scale herd 2..6")
    page.keyboard.press("Escape")
    expect(page.get_by_label("The keeper's log")).to_have_text("Nothing has been written yet.")


@pytest.mark.parametrize("width", [390, 2500])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_at_every_width_and_colour(browser: Any, console: Console, width: int, scheme: str) -> None:
    with watched_page(browser, console, width, scheme) as page:
        page.goto(f"{console.url}/#/live")
        expect(page.locator(".chart canvas")).to_have_count(7)
        assert page.evaluate("document.documentElement.scrollWidth") <= width

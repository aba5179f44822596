"""Models, Keys and Nodes in a real browser: a download from a hub, a key and its use, GPUs of a stand-in."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from corral.base.files import write_atomic
from corral.base.record import dump_json
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.plan.choose import make_plan
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import read_facts
from corral.serve.gateway.keys import add_key, read_keys
from tests.console_home import Made, fake_program, make, submitted
from tests.e2e.console_page import Console, beating, picture, running_console, watched_page
from tests.fake_hub import FakeHub
from tests.tiny_llama import make_tiny_llama
from tests.unit.test_models_cli import cached
from tests.until import until

HOSTILE = "<img src=x onerror=alert(1)>"
GPUS = """echo "0, NVIDIA H100 80GB HBM3, 412.50, 71000, 81559, 93"
echo "1, NVIDIA H100 80GB HBM3, [N/A], 512, 81559, 0" """


def planned(made: Made, model: str, gpus: str, weights_gib: float, kv_gib: float) -> Made:
    facts, inventory = read_facts(model, offline=True), parse_gpus(gpus, None, "ib-ndr")
    write_atomic(made.folder.plan, dump_json(make_plan(facts, inventory, Goal())))
    return made.event("observed", 12, weights_gib=weights_gib, kv_gib=kv_gib)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("machines")
    with pytest.MonkeyPatch.context() as patch, FakeServer(FakeOptions()) as server:
        patch.setenv("CORRAL_HOME", str(place / "home"))
        fake_program(place / "bin", "nvidia-smi", GPUS)
        one = make("llama-3.1-8b-instruct", 400).agent().course(("starting", 0.5), ("loading", 12), ("ready", 40))
        planned(one, "llama-3.1-8b", "1xH100", 14.99, 54.2).serves(f"{server.url}/v1")
        fake_program(place / "bin", "squeue", "echo '4821|RUNNING|None|N/A|N/A|1:00:00|n1|0|0:0|'")
        fake_program(place / "bin", "sacct", "exit 1")
        two = submitted(make("llama-3.1-405b-instruct", 400, target="slurm", nodes=("rank0", "rank1")), "4821", 3)
        write_atomic(two.folder.path / "rendezvous.json", json.dumps({"names": ["node-a", HOSTILE]}))
        write_atomic(two.folder.rank(0).address, json.dumps({"attempt": "4821.0"}))
        write_atomic(two.folder.rank(1).agent, "{}")
        planned(two.agent().course(("starting", 5), ("loading", 12)), "llama-3.1-405b-fp8", "8xH100x2", 47.3, 11.8)
        cached(place / "hf", "meta-llama/Llama-3.1-8B-Instruct")
        add_key("alice", 60, 100_000, ("llama-3.1-8b-instruct",))
        add_key(HOSTILE)
        with beating(place / "home"):
            yield place


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("hub") / "tiny")
    with FakeHub({"somebody/tiny-llama": folder}) as running:
        yield running


def environment(place: Path, hub: FakeHub) -> dict[str, str]:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    own = {"CORRAL_HOME": str(place / "home"), "HF_HOME": str(place / "hf"), "HF_ENDPOINT": hub.url, "PATH": path}
    return {**os.environ, **own}


@pytest.fixture(scope="module")
def console(home: Path, hub: FakeHub) -> Iterator[Console]:
    with running_console(environment(home, hub)) as running:
        yield running


@pytest.fixture
def page(browser: Any, console: Console) -> Iterator[Any]:
    with watched_page(browser, console, 1280) as shown:
        yield shown


def item(page: Any, name: str) -> Any:
    return page.locator(f".item[data-name={json.dumps(name)}]")


def test_models_are_found_and_started(page: Any, console: Console) -> None:
    page.goto(f"{console.url}/#/models")
    expect(item(page, "smollm2")).to_contain_text("fits")
    expect(item(page, "llama-3.1-8b-instruct")).to_contain_text("on disk")
    expect(item(page, "llama-3.1-405b")).to_have_count(0)
    picture(page, "models")
    page.get_by_label("Find models").fill("qwen3-vl 8b")
    expect(page.locator(".item")).to_have_count(1)
    expect(item(page, "qwen3-vl-8b-instruct")).to_contain_text("reads images")
    page.reload()
    expect(page.locator(".item")).to_have_count(1)  # what was searched is in the address
    page.get_by_label("Find models").fill("smollm2")
    item(page, "smollm2").get_by_role("link", name="Start…").click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("smollm2")
    expect(page.locator("form .command code")).to_have_text("corral up smollm2")
    page.goto(f"{console.url}/#/models?find={HOSTILE}")
    expect(page.get_by_label("Find models")).to_have_value(HOSTILE)
    expect(page.locator(".empty")).to_contain_text("No model of that name.")


def test_a_repository_is_downloaded(page: Any, console: Console, home: Path) -> None:
    page.goto(f"{console.url}/#/models")
    page.get_by_label("Find models").fill("somebody/tiny-llama")
    item(page, "somebody/tiny-llama").get_by_role("button", name="Download").click()
    dialog = page.get_by_role("dialog", name="Download somebody/tiny-llama")
    expect(dialog.locator("code").first).to_have_text("corral pull somebody/tiny-llama")
    assert not (home / "hf" / "hub" / "models--somebody--tiny-llama").exists()
    dialog.get_by_role("button", name="Run").click()
    expect(dialog.get_by_role("status")).to_have_text("done")
    dialog.get_by_role("button", name="Close").click()
    page.get_by_label("Find models").fill("tiny")
    expect(item(page, "somebody/tiny-llama")).to_contain_text("on disk")
    expect(page.get_by_role("region", name="Downloads")).to_contain_text("done")
    page.reload()
    expect(page.get_by_role("region", name="Downloads")).to_contain_text("somebody/tiny-llama")


def test_a_download_shows_how_far_it_is(page: Any, console: Console) -> None:
    one = {"id": "c1", "name": "llama-3.1-8b", "line": "corral pull llama-3.1-8b", "exit_code": None}
    now = {**one, "text": f"downloading {HOSTILE}", "bytes": 4_015_000_000, "total": 16_060_000_000}
    page.route("**/api/models/downloads", lambda route: route.fulfill(json={"downloads": [now]}))
    page.goto(f"{console.url}/#/models")
    shown = page.locator(".download")
    expect(shown).to_contain_text("25%")
    expect(shown).to_contain_text("4.02 GB of 16.1 GB")
    expect(shown).to_contain_text(HOSTILE)
    now |= {"exit_code": 1, "total": None, "text": "the hub did not answer"}
    expect(shown).to_contain_text("failed (exit code 1)")
    expect(shown.locator(".command code")).to_have_text("corral pull llama-3.1-8b")


def test_a_key_is_made_shown_once_and_revoked(page: Any, console: Console, home: Path) -> None:
    page.goto(console.url)
    page.get_by_role("link", name="Keys").click()
    expect(item(page, "alice")).to_contain_text("60 requests/min, 100,000 tokens/min")
    expect(item(page, HOSTILE)).to_contain_text("all models")
    page.get_by_label("Client").fill("bob")
    page.get_by_label("Requests per minute").fill("30")
    form = page.get_by_role("form", name="New key")
    expect(form.locator(".command code")).to_have_text("corral gateway key add --rpm 30 bob")
    page.get_by_role("button", name="Make the key").click()
    secret = form.get_by_role("status").locator("code").text_content()
    assert len(secret) > 30
    expect(item(page, "bob")).to_contain_text("30 requests/min")
    page.reload()
    expect(item(page, "bob")).to_be_visible()
    assert secret not in page.content()
    item(page, "bob").get_by_role("button", name="Revoke").click()
    expect(page.locator("dialog code").first).to_have_text("corral gateway key remove bob")
    page.get_by_role("button", name="Do it").click()
    expect(page.get_by_role("dialog").get_by_role("status")).to_have_text("done")
    page.get_by_role("button", name="Close").click()
    expect(item(page, "bob")).to_have_count(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORRAL_HOME", str(home / "home"))
        until(lambda: [one.name for one in read_keys()] == ["alice", HOSTILE], "the keys that are left")


def test_use_is_shown_beside_each_key(page: Any, console: Console) -> None:
    used = {"answered": 1204, "failed": 3, "limited": 17, "prompt_tokens": 250_000, "output_tokens": 88_000}
    row = {"name": "alice", "created_s": time.time() - 260_000, "rpm": 60, "tpm": None, "models": [], "remove": "x"}
    other = {"name": "ci", "tpm": 50_000, "models": ["llama-3.1-8b", "herd"], "answered": 96, "limited": 0}
    said = {"keys": [{**row, **used}, {**row, **used, **other}], "gateways": ["http://127.0.0.1:8080"]}
    page.route("**/api/keys", lambda route: route.fulfill(json=said))
    page.goto(f"{console.url}/#/keys")
    expect(item(page, "alice")).to_contain_text(re.compile("answered1,204.*by a limit17.*tokens in250,000"))
    picture(page, "keys")


def test_nodes_show_what_runs_there_and_their_gpus(page: Any, console: Console) -> None:
    page.goto(f"{console.url}/#/nodes")
    here = page.locator("section", has_text="this machine")
    expect(here.locator("[data-gpu='0']")).to_contain_text(re.compile(r"87%.*69\.3 of 80 GiB.*93%.*413 W"))
    expect(here.locator("[data-gpu='1']")).to_contain_text("–")
    one = here.locator(".item[data-name='llama-3.1-8b-instruct']")
    expect(one).to_contain_text(re.compile(r"weights 15 GiB, KV cache 54\.2 GiB of \d+"))
    expect(one).to_contain_text("0 running, 0 waiting")
    far = page.get_by_role("region", name="Node node-a")
    expect(far).to_contain_text("8 H100-SXM in use")
    expect(far).to_contain_text("rank 0 of 2")
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    assert page.locator("main img").count() == 0
    plain = "['gpu-box', 'node-a', 'node-b']"  # in the picture
    page.evaluate(f"document.querySelectorAll('main h2').forEach((one, n) => one.textContent = {plain}[n])")
    picture(page, "nodes")


def test_read_only_downloads_nothing_and_names_no_client(browser: Any, home: Path, hub: FakeHub) -> None:
    env = environment(home, hub)
    with running_console(env, "--read-only") as console, watched_page(browser, console) as page:
        page.goto(f"{console.url}/#/models")
        expect(item(page, "smollm2").get_by_role("link", name="Plan")).to_be_visible()
        expect(page.get_by_role("button", name="Download")).to_have_count(0)
        expect(page.get_by_role("link", name="Start…")).to_have_count(0)
        expect(page.get_by_role("link", name="Keys")).to_have_count(0)


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_at_every_width_and_colour(browser: Any, console: Console, width: int, scheme: str) -> None:
    with watched_page(browser, console, width, scheme) as page:
        for where in ("models", "keys", "nodes"):
            page.goto(f"{console.url}/#/{where}")
            expect(page.locator(".item").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width

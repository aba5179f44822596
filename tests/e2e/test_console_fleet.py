"""The console's Fleet and Live views in a real browser: a job from its queue to ready, a failure's remedy, a batch.

Deployments are folders made by hand and a stand-in of SLURM's commands; the server behind the ready one is the fake
server. With CORRAL_GOLDEN=write the pictures of docs/console.md are taken.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from corral.base.files import write_atomic
from corral.deploy.deployment.start_times import Expected, Phase
from corral.deploy.lifecycle.staging import Staging
from corral.deploy.lifecycle.watching import Lines
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from tests.conftest import ROOT
from tests.console_home import Made, fake_program, make, submitted
from tests.e2e.console_page import Console, beating, picture, running_console, watched_page
from tests.stand_in import install_stand_in
from tests.tiny_llama import make_tiny_llama
from tests.until import LIMIT_S

SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"
HERE = ("gpu-box",)
PACE = Pace(ttft_s=0.02, itl_s=0.005)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("console")
        patch.setenv("CORRAL_HOME", str(place / "home"))
        queue(place, "PENDING", "Priority")
        fake_program(place / "bin", "sacct", "exit 1")
        patch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
        with beating(place / "home"):
            yield place


def queue(place: Path, state: str, reason: str, nodes: str = "") -> None:
    fake_program(place / "bin", "squeue", f"echo '4821|{state}|{reason}|N/A|N/A|1:00:00|{nodes}|0|0:0|'")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(pace=PACE)) as running:
        yield running


@pytest.fixture(scope="module")
def queued(home: Path, server: FakeServer) -> Made:
    """The deployments of the page; the one that waits is changed by its test."""
    ready = make("llama-3.1-8b-instruct", 400, words=("up", "llama-3.1-8b-instruct"), nodes=HERE).agent()
    ready.course(("starting", 0.5), ("loading", 12), ("ready", 40)).serves(f"{server.url}/v1")
    ready.log("INFO engine started", f"INFO {SCRIPT}", "INFO last line")
    make("qwen2.5-7b-instruct", 22, nodes=HERE).agent().course(("starting", 0.5), ("loading", 12))
    broken = make("llama-3.1-70b-instruct", 300, words=("up", "llama-3.1-70b-instruct"), nodes=HERE).agent()
    broken.course(("starting", 0.5), ("initialising", 7), ("loading", 12))
    broken.log("ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB")
    broken.event("state", 30, state="failed", reason="engine_exited", exit_code=1)
    return submitted(make("llama-3.1-405b-instruct", 900, target="slurm", nodes=("rank0", "rank1")), "4821", 3)


@pytest.fixture(scope="module")
def console(home: Path, queued: Made) -> Iterator[Console]:
    with running_console(environment(home)) as running:
        yield running


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "CORRAL_HOME": str(place / "home"), "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}


@pytest.fixture
def page(browser: Any, console: Console) -> Iterator[Any]:
    with watched_page(browser, console) as shown:
        yield shown


def card(page: Any, name: str) -> Any:
    return page.locator(f".deployment[data-name={json.dumps(name)}]")


def test_a_failure_is_read_with_its_remedy_and_the_link_is_gone(page: Any) -> None:
    failed = card(page, "llama-3.1-70b-instruct")
    expect(failed.get_by_role("alert")).to_contain_text("Out of memory")
    expect(failed.locator(".remedy")).to_contain_text("shorten --context")
    assert "once=" not in page.url
    assert page.evaluate("document.cookie") == ""  # no script can read it
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000
    picture(page, "fleet")


def test_a_second_tab_shows_the_same(page: Any, console: Console) -> None:
    other = page.context.new_page()
    other.goto(console.url)  # without a link
    expect(card(other, "llama-3.1-70b-instruct").get_by_role("alert")).to_contain_text("Out of memory")
    expect(other.get_by_role("img", name="connected")).to_be_visible()
    other.close()


def test_script_in_a_name_a_node_and_a_log_stays_text(
    page: Any, console: Console, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(home / "home"))
    make(SCRIPT, 60, nodes=(SCRIPT,)).agent().course(("starting", 0.5), ("loading", 12))
    odd = card(page, SCRIPT)
    expect(odd.locator("h2")).to_have_text(SCRIPT)
    expect(odd.locator(".facts-line")).to_contain_text(SCRIPT)
    expect(odd.locator(".standing")).to_contain_text("longer than usual; then about")  # and no promise of seconds
    card(page, "llama-3.1-8b-instruct").locator("h2 a").click()
    log = page.get_by_label("The engine's log")
    expect(log).to_contain_text(SCRIPT)
    page.get_by_label("Search the log").fill("last")
    expect(log).to_have_text("INFO last line\n")
    expect(log.locator("mark")).to_have_text("last")
    assert page.locator("main img, main script").count() == 0
    picture(page, "deployment")


def test_a_button_shows_the_line_that_does_the_same(page: Any) -> None:
    ready = card(page, "llama-3.1-8b-instruct")
    ready.get_by_role("button", name="Stop").click()
    expect(page.locator("dialog code")).to_have_text("corral down llama-3.1-8b-instruct")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("dialog")).to_have_count(0)
    ready.get_by_role("button", name="Restart").click()
    line = "corral down llama-3.1-8b-instruct && corral up --name llama-3.1-8b-instruct llama-3.1-8b-instruct"
    expect(page.locator("dialog code")).to_have_text(line)
    page.keyboard.press("Escape")


@pytest.fixture(scope="module")
def pressed(home: Path) -> Iterator[dict[str, str]]:
    """A deployment of the stand-in engine, made as a user makes one."""
    install_stand_in(home / "home", ROOT / "tests" / "stub_engine.py")
    env, model = environment(home), make_tiny_llama(home / "tiny")
    corral = [sys.executable, "-m", "corral"]
    done = subprocess.run([*corral, "up", str(model), "--name", "pressed"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield env
    subprocess.run([*corral, "down", "pressed"], env=env, capture_output=True)


def launch_of(name: str, home: Path) -> str:
    found = json.loads((home / "home" / "deployments" / name / "deployment.json").read_text())
    return str(found["launch_id"])


def test_restart_and_stop_are_pressed_through(page: Any, home: Path, pressed: dict[str, str]) -> None:
    shown, before = card(page, "pressed"), launch_of("pressed", home)
    expect(shown.locator(".tag")).to_have_text("ready")
    shown.get_by_role("button", name="Restart").click()
    dialog = page.get_by_role("dialog", name="Restart pressed")
    line = f"corral down pressed && corral up {home / 'tiny'} --name pressed"
    expect(dialog.locator("code").first).to_have_text(line)
    assert launch_of("pressed", home) == before  # nothing happens before it is confirmed
    dialog.get_by_role("button", name="Run").click()
    expect(dialog.get_by_role("status")).to_have_text("done")
    expect(dialog.get_by_label("Output")).to_contain_text("ready")
    assert launch_of("pressed", home) != before
    dialog.get_by_role("button", name="Close").click()
    expect(shown.locator(".tag")).to_have_text("ready")

    shown.get_by_role("button", name="Stop").click()
    dialog = page.get_by_role("dialog", name="Stop pressed")
    expect(dialog.locator("code").first).to_have_text("corral down pressed")
    dialog.get_by_role("button", name="Do it").click()
    expect(dialog.get_by_role("status")).to_have_text("done")
    picture(page, "stop")
    dialog.get_by_role("button", name="Close").click()
    page.get_by_text(re.compile(r"^\d+ ended$")).click()
    expect(shown.locator(".tag")).to_have_text("stopped")
    expect(shown.get_by_role("button", name="Stop")).to_have_count(0)
    command = [sys.executable, "-m", "corral", "status", "pressed", "--json"]
    told = json.loads(subprocess.run(command, env=pressed, capture_output=True, text=True).stdout)
    assert (told["state"], told["reason"]) == ("stopped", "requested")


def test_a_command_that_fails_says_why(page: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(home / "home"))
    made = make("lost", words=("up", "./no-such-model")).agent().course(("starting", 1))
    made.event("state", 5, state="stopped", reason="requested")
    page.get_by_text(re.compile(r"^\d+ ended$")).click()
    card(page, "lost").get_by_role("button", name="Start again").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("code").first).to_have_text("corral up --name lost ./no-such-model")
    dialog.get_by_role("button", name="Run").click()
    expect(dialog.get_by_role("status")).to_have_text(re.compile(r"failed \(exit code [1-9]"))
    expect(dialog.get_by_label("Output")).to_contain_text("no-such-model")
    page.keyboard.press("Escape")
    made.folder.delete()


def test_a_download_is_watched(page: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(home / "home"))
    made = make("fetched", 30)
    staging = Staging(Lines(quiet=True), made.folder, {"fetching model": Expected(40.0), "loading": Expected(9.0)})
    shown = card(page, "fetched")
    staging.phase(Phase.FETCHING)
    staging.detail("hub: model-00001-of-00004.safetensors", 1_015_000_000, 4 * 10**9)
    expect(shown.locator(".phase.now")).to_contain_text("fetching 25%")
    time.sleep(2)  # a pace: by it, and the little that came, more than two minutes are left
    staging.detail("hub: model-00002-of-00004.safetensors", 1_056_000_000, 4 * 10**9)
    expect(shown.locator(".phase.now")).to_contain_text("fetching 26%")
    standing = shown.locator(".standing")
    expect(standing).to_contain_text(re.compile(r"26% \(1\.06 of 4\.00 GB\) for .* left"))
    expect(shown.locator(".phase.later").last).to_have_text("ready")
    made.folder.delete()
    expect(shown).to_have_count(0)


def test_a_pace_that_did_not_hold_is_forgotten(page: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(home / "home"))
    made = make("paused", 30)
    staging = Staging(Lines(quiet=True), made.folder, {"fetching model": Expected(4000.0), "loading": Expected(9.0)})
    standing = card(page, "paused").locator(".standing")
    staging.phase(Phase.FETCHING)
    staging.detail("hub: model-00001-of-00004.safetensors", 1 * 10**9, 4 * 10**9)
    staging.detail("hub: model-00004-of-00004.safetensors", 4 * 10**9 - 1, 4 * 10**9)  # one byte left, at once
    expect(standing).to_contain_text("expected), ready in about")
    expect(standing).not_to_contain_text("longer than usual")
    made.folder.delete()


def test_read_only_shows_everything_and_asks_nobody(browser: Any, home: Path, queued: Made) -> None:
    with running_console(environment(home), "--read-only") as console, watched_page(browser, console) as page:
        expect(card(page, "llama-3.1-8b-instruct").locator(".tag")).to_have_text("ready")
        expect(page.locator("#read-only")).to_be_visible()
        for name in ("Stop", "Restart", "Start again"):
            expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)
        page.goto(f"{console.url}/#/play")
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        expect(page.locator(".ask")).to_contain_text("corral console --read-only --playground")
        page.get_by_label("Prompt", exact=True).fill("Hello")
        page.get_by_text("The request as curl and Python").click()
        expect(page.locator("pre.log").first).to_contain_text("Hello")


def test_a_job_is_followed_from_its_queue_to_ready(page: Any, home: Path, queued: Made, server: FakeServer) -> None:
    job = card(page, "llama-3.1-405b-instruct")
    expect(job.locator(".tag")).to_have_text("queued")
    expect(job.locator(".note")).to_contain_text("jobs of higher priority come first")
    queue(home, "RUNNING", "None", "n1")
    write_atomic(queued.folder.rank(0).address, json.dumps({"attempt": "4821.0"}))
    queued.agent().event("state", state="starting")
    expect(job.locator(".tag")).to_have_text("starting")
    queued.event("state", state="loading").event("phase", phase="loading", done=3, total=12)
    expect(job.locator(".phase.now")).to_contain_text("loading 25%")
    queued.event("phase", phase="warming")
    expect(job.locator(".phase.now")).to_contain_text("warming")
    expect(job.locator(".standing")).to_contain_text("usually 6.0 s here")
    queued.serves(f"{server.url}/v1").event("state", state="ready")
    expect(job.locator(".tag")).to_have_text("ready")
    expect(job.locator(".url")).to_have_text(f"{server.url}/v1")


def test_a_batch_is_watched_until_it_is_done(page: Any, home: Path, server: FakeServer) -> None:
    page.goto(page.url.partition("#")[0] + "#/live")
    expect(page.get_by_role("region", name="Servers")).to_contain_text("llama-3.1-8b-instruct")
    rows = home / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(40)))
    output = home / "out.jsonl"
    words = ["batch", "run", str(rows), "-o", str(output), "--url", server.url, "--max-tokens", "30"]
    words += ["--param", "ignore_eos=true", "--concurrency", "2"]
    server.set_pace(Pace(itl_s=0.15))  # a minute and a half for all rows: somebody looks before that is over
    with subprocess.Popen([sys.executable, "-m", "corral", *words], env=environment(home),
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as batch:  # fmt: skip
        row = page.locator(f"#jobs tr[data-name={json.dumps(str(output))}]")
        expect(row).to_contain_text(re.compile(r"\b([1-9]|[123]\d) of 40 rows"))
        server.set_pace(PACE)
        expect(row).to_contain_text("40 of 40 rows")
        assert batch.wait(LIMIT_S) == 0
    expect(row.locator(".tag").nth(1)).to_have_text("done")
    expect(page.locator(".chart canvas")).to_have_count(5)


def test_the_form_shows_the_line_and_the_plan(page: Any, console: Console) -> None:
    page.goto(f"{console.url}/#/fleet/start")
    page.get_by_label("Model").fill("smollm2")
    page.get_by_label("Context").fill("2k")
    expect(page.locator("form .command code")).to_have_text("corral up smollm2 --context 2k")
    expect(page.get_by_label("Plan", exact=True)).to_contain_text("context")
    picture(page, "start")


def test_an_old_failure_is_dismissed(page: Any) -> None:
    failed = card(page, "llama-3.1-70b-instruct")
    failed.get_by_role("button", name="Dismiss").click()
    expect(failed).to_be_hidden()
    page.reload()
    page.get_by_text(re.compile(r"^\d+ ended$")).click()
    expect(failed.get_by_role("alert")).to_contain_text("Out of memory")
    page.evaluate("localStorage.removeItem('corral-dismissed')")


def test_key_and_curl_are_shown_when_asked_for(page: Any, console: Console, queued: Made) -> None:
    key = (queued.folder.path.parent / "llama-3.1-8b-instruct" / "key").read_text().strip()
    page.goto(f"{console.url}/#/fleet/d/llama-3.1-8b-instruct")
    access = page.get_by_role("region", name="Access")
    expect(access).to_be_visible()
    assert key not in page.content()
    access.get_by_role("button", name="Show key and curl").click()
    expect(access.locator("code").nth(3)).to_contain_text(f"Bearer {key}")
    expect(page.get_by_role("link", name="Open in the Playground")).to_have_attribute(
        "href", "#/play/llama-3.1-8b-instruct"
    )


def test_start_is_pressed_once_and_answers_beside_the_button(page: Any, console: Console) -> None:
    posts: list[Any] = []
    said = {"id": "c1", "line": "corral up", "started_s": 0, "exit_code": None, "output": ["fetching"]}

    def begun(route: Any) -> None:
        posts.append(route.request.post_data_json)
        route.fulfill(status=202, json=said)

    page.route("**/api/fleet/start", begun)
    page.route("**/api/commands/c1", lambda route: route.fulfill(json=said))
    page.goto(f"{console.url}/#/fleet/start")
    page.get_by_label("Model").fill("smollm2")
    page.get_by_text("Settings, vLLM flags, runtime, port").click()
    page.get_by_label("Settings of the plan").fill("weights=bf16")
    page.get_by_label("Flags of vLLM").fill("--seed 1")
    page.get_by_label("Port", exact=True).fill("8123")
    line = "corral up smollm2 --port 8123 --set weights=bf16 -- --seed 1"
    expect(page.locator("form .command code")).to_have_text(line)
    page.reload()
    expect(page.locator("form .command code")).to_have_text(line)
    start = page.get_by_role("button", name="Start", exact=True)
    expect(start).to_be_enabled()
    start.dblclick()
    form = page.locator("form.card")
    expect(form.get_by_label("Output")).to_have_text("fetching")
    page.get_by_label("Name").fill("other")
    expect(page.locator("form .command code")).to_contain_text("--name other")
    expect(form.get_by_role("button", name="Starting…")).to_be_disabled()
    said |= {"exit_code": 0}
    expect(form.get_by_role("link", name="Open in the Playground")).to_be_visible()
    expect(start).to_be_enabled()
    sent = {"model": "smollm2", "settings": "weights=bf16", "flags": "--seed 1", "port": "8123", "options": {}}
    assert posts == [sent]


@pytest.mark.parametrize("width", [390, 2500])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_reads_at_every_width_and_colour(browser: Any, console: Console, width: int, scheme: str) -> None:
    with watched_page(browser, console, width, scheme) as page:
        for where in ("fleet", "live", "fleet/start", "fleet/d/llama-3.1-8b-instruct", "play"):
            page.goto(f"{console.url}/#/{where}")
            expect(page.locator(f".view-{where.partition('/')[0]} .card:visible").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width

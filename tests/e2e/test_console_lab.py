"""Playground, Plan and Runs in a real browser, against the fake server and real folders.

One browser and one console for the file. `CORRAL_GOLDEN=write` makes the pictures of docs/ anew.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from corral.base.files import write_atomic
from corral.base.record import dump_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.plan.choose import make_plan
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import read_facts
from tests.console_home import make
from tests.e2e.console_page import WAIT_MS, beating, picture
from tests.until import until

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


@dataclass
class Lab:
    """A console with something to show, and the page that shows it."""

    page: Any
    folder: Path
    server: FakeServer
    complaints: list[str]

    def open(self, where: str) -> Any:
        """A view as it is opened the first time: without the conversation of the test before."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#/runs")  # where no playground is open that would keep it again
        self.page.evaluate("sessionStorage.removeItem('corral-play')")
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#/{where}")
        return self.page

    url: str = ""

    def picture(self, name: str) -> None:
        picture(self.page, name)


def corral(env: dict[str, str], folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "corral", *words]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr


def measured(env: dict[str, str], folder: Path, server: FakeServer) -> None:
    """Two runs, a sweep, and a batch with failures, made by the commands a user types."""
    lengths = ("--input-len", "32", "--output-len", "16")
    corral(env, folder, "bench", "run", "--concurrency", "4", "--num-prompts", "60", "--name", "before", *lengths)
    corral(env, folder, "bench", "run", "--concurrency", "8", "--num-prompts", "60", "--name", "after", *lengths)
    corral(
        env, folder, "bench", "sweep", "--concurrency", "1,4,16", "--num-prompts", "32", "--name", "sweep", *lengths
    )
    rows = [{"id": f"r{n}", "prompt": f"row {n} {'cursed ' + HOSTILE if n % 6 == 0 else 'fine'}"} for n in range(30)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server.set_faults("status:code=400,match=cursed,message=<b onclick=alert(1)>no</b>")
    corral(env, folder, "batch", "run", "in.jsonl", "-o", "answers.jsonl")
    server.set_faults()


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    pace = Pace(ttft_s=0.02, itl_s=0.004, jitter=0.4)
    with FakeServer(FakeOptions(pace=pace, answer_tokens=(24, 40))) as server:
        env = {
            "CORRAL_HOME": str(folder / "home"),
            "HOME": str(folder),
            "PATH": "/usr/bin:/bin",
            "HF_HUB_OFFLINE": "1",
        }
        env |= {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"}
        measured(env, folder, server)
        command = [sys.executable, "-m", "corral", "console", "--no-open", "--json", "--port", "0"]
        console = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert console.stdout is not None
            told = json.loads(console.stdout.readline())
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            made = Lab(page, folder, server, [], told["url"])
            page.on("console", lambda message: made.complaints.append(message.text))
            page.on("pageerror", lambda error: made.complaints.append(str(error)))
            page.goto(told["link"])
            yield made
            context.close()
        finally:
            console.terminate()
            console.communicate(timeout=120)


def ask(page: Any, text: str, answers: int = 1) -> None:
    page.get_by_label("Prompt", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answered p", has_text="ended by")).to_have_count(answers)


def test_a_chat_is_streamed_coloured_and_branched(lab: Lab) -> None:
    page = lab.open("play")
    page.get_by_label("Probabilities").select_option("5")
    ask(page, "Tell me of Tokyo.")
    tokens = page.locator(".answer .token[role=button]")
    expect(tokens.nth(3)).to_be_visible()
    colours = tokens.evaluate_all("all => new Set(all.map(one => one.className)).size")
    assert colours > 2
    tokens.nth(2).hover()
    panel = page.locator(".alternatives")
    expect(panel.locator("tbody tr")).not_to_have_count(0)
    expect(panel).to_contain_text("log-probability")
    lab.picture("playground")
    before = tokens.evaluate_all("all => all.slice(0, 2).map(one => one.textContent).join('')")
    tokens.nth(2).click()
    other = panel.locator("tr:not(.own) button").first
    taken = other.locator("code").text_content()
    other.click()
    expect(page.locator(".answered")).to_contain_text("2 of 2")
    expect(page.locator(".answered p", has_text="ended by")).to_have_count(1)
    expect(tokens.nth(3)).to_be_visible()
    branched = tokens.evaluate_all("all => all.slice(0, 3).map(one => one.textContent)")
    assert "".join(branched[:2]) == before
    assert branched[2].replace(" ", "·") == taken
    page.get_by_role("button", name="The answer before").click()
    expect(page.locator(".answered")).to_contain_text("1 of 2")
    assert lab.complaints == []


def test_alternatives_are_reached_by_keys(lab: Lab) -> None:
    page = lab.open("play")
    page.get_by_label("Probabilities").select_option("5")
    ask(page, "Tell me of Kyoto.")
    first = page.locator(".answer .token[tabindex='0']")
    first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Alternatives")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".alternatives")).to_have_count(0)


def test_the_request_is_shown_as_curl_and_python(lab: Lab) -> None:
    page = lab.open("play")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("temperature").fill("0.25")
    page.get_by_label("Prompt", exact=True).fill("Say it's so.")
    page.get_by_text("The request as curl and Python").click()
    expect(page.locator("pre.log").nth(0)).to_contain_text('"temperature": 0.25')
    expect(page.locator("pre.log").nth(1)).to_contain_text("temperature=0.25")
    expect(page.locator("pre.log").nth(0)).to_contain_text("Bearer $OPENAI_API_KEY")


def test_two_settings_side_by_side(lab: Lab) -> None:
    page = lab.open("play")
    page.get_by_label("two side by side").check()
    right = page.get_by_role("region", name="right")
    right.get_by_text("Settings", exact=True).click()
    right.get_by_label("temperature").fill("1.5")
    ask(page, "Compare yourselves.", answers=2)
    texts = [page.get_by_role("region", name=name).locator(".answer").text_content() for name in ("left", "right")]
    assert texts[0] != texts[1]
    lab.picture("side-by-side")


@pytest.fixture
def two_models(lab: Lab) -> Iterator[dict[str, FakeServer]]:
    """Two deployments, each with a server and a model of its own."""
    lengths = {"smollm2-135m-instruct": (12, 16), "llama-3.1-8b-instruct": (40, 50)}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("CORRAL_HOME", str(lab.folder / "home"))
        running = {}
        for name, length in lengths.items():
            options = FakeOptions(model=name, pace=Pace(ttft_s=0.02, itl_s=0.004), answer_tokens=length)
            running[name] = stack.enter_context(FakeServer(options))
            made = make(name, 100, name).agent().course(("starting", 0.5), ("loading", 3), ("ready", 20))
            made.serves(f"{running[name].url}/v1")
            stack.callback(made.folder.delete)
        stack.enter_context(beating(lab.folder / "home"))
        yield running


def answered(server: FakeServer) -> float:
    """Requests that a server has completed."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        found = re.findall(r"^vllm:request_success_total.* (\S+)$", page.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def test_two_models_side_by_side(lab: Lab, two_models: dict[str, FakeServer]) -> None:
    page, names = lab.open("play"), dict(zip(("left", "right"), two_models, strict=True))
    page.get_by_label("two side by side").check()
    for side, name in names.items():
        lane = page.get_by_role("region", name=side)
        lane.get_by_label("Server").select_option(name)
        lane.get_by_label("Probabilities").select_option("5")
    ask(page, "What is a corral?", answers=2)
    answers = [page.get_by_role("region", name=side).locator(".answer").text_content() for side in names]
    assert answers[0] != answers[1]
    until(lambda: [answered(server) for server in two_models.values()] == [1, 1], "one answer of each")
    for side, name in names.items():
        lane = page.get_by_role("region", name=side)
        lane.get_by_text("The request as curl and Python").click()
        expect(lane.locator("pre.log").first).to_contain_text(f"corral env {name}")
        lane.get_by_text("The request as curl and Python").click()
    lab.picture("two-models")
    tokens = page.get_by_role("region", name="right").locator(".answer .token[role=button]")
    tokens.nth(2).click()
    page.locator(".alternatives tr:not(.own) button").first.click()
    expect(page.get_by_role("region", name="right").locator(".answered")).to_contain_text("2 of 2")
    expect(page.get_by_role("region", name="left").locator(".answered")).not_to_contain_text("2 of 2")
    assert lab.complaints == []


@pytest.fixture
def with_eyes(lab: Lab, two_models: dict[str, FakeServer]) -> None:
    """The first of the two models reads pictures, as its plan says."""
    facts, inventory = read_facts("qwen2.5-vl-7b-instruct", offline=True), parse_gpus("1xH100", None, "ib-ndr")
    write_atomic(DeploymentFolder.of(next(iter(two_models))).plan, dump_json(make_plan(facts, inventory, Goal())))


DROP = """(node) => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 3000, height: 1000});
  return new Promise((done) => canvas.toBlob((blob) => {
    const data = new DataTransfer();
    data.items.add(new File([blob], 'large.png', {type: 'image/png'}));
    node.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));
    done();
  }, 'image/png'));
}"""


def test_pictures_are_chosen_dropped_sent_and_kept(
    lab: Lab, two_models: dict[str, FakeServer], with_eyes: None
) -> None:
    """One is sent as it is, a large one smaller; a model that takes none is offered none."""
    page, (eyes, blind) = lab.open("play"), two_models
    server, choose = page.get_by_label("Server"), page.get_by_role("button", name="Picture…")
    server.select_option(blind)
    expect(choose).to_be_hidden()
    server.select_option(eyes)
    expect(choose).to_be_visible()
    with page.expect_file_chooser() as chooser:
        choose.click()
    small = lab.folder / "small.png"
    small.write_bytes(base64.b64decode(PNG))
    chooser.value.set_files([small, lab.folder / "in.jsonl"])
    expect(page.locator("#toast")).to_contain_text("is no PNG, JPEG, WebP or GIF")
    page.locator("form.ask").evaluate(DROP)
    expect(page.locator(".ask .thumbnail")).to_have_count(2)
    page.get_by_label("Prompt", exact=True).fill("What is on them?")
    page.get_by_text("The request as curl and Python").click()
    expect(page.locator("pre.log").first).to_contain_text("<picture 2: ")
    page.get_by_text("The request as curl and Python").click()
    server.select_option(blind)
    expect(page.locator(".ask .note:visible")).to_contain_text("takes no pictures")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    server.select_option(eyes)
    with page.expect_request("**/api/play/ask") as request:
        ask(page, "What is on them?")
    first, second, text = request.value.post_data_json["prompt"][0]["content"]
    assert first["image_url"]["url"] == f"data:image/png;base64,{PNG}"
    assert second["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert text == {"type": "text", "text": "What is on them?"}
    expect(page.locator(".ask .thumbnail")).to_have_count(0)
    sizes = page.locator(".talk .thumbnail").evaluate_all(
        "all => all.map(one => [one.naturalWidth, one.naturalHeight])"
    )
    assert sizes == [[1, 1], [1568, 523]]
    until(lambda: '"finish"' in (page.evaluate("sessionStorage.getItem('corral-play')") or ""), "what is kept")
    page.reload()
    expect(page.locator(".talk .thumbnail")).to_have_count(2)
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_role("button", name="Remove the picture").first.click()
    expect(page.locator(".ask .thumbnail")).to_have_count(1)
    assert lab.complaints == []


def test_a_prompt_as_a_heat_map_stays_text(lab: Lab) -> None:
    page = lab.open("play")
    page.get_by_label("Kind of request").select_option("completion")
    page.get_by_label("Prompt", exact=True).fill(f"San Francisco is a city. {HOSTILE}")
    page.get_by_role("button", name="Prompt heat map").click()
    heat = page.get_by_role("region", name="Prompt heat map")
    expect(heat).to_contain_text("perplexity")
    expect(heat.locator(".answer")).to_contain_text("onerror")
    assert heat.locator("img, script").count() == 0
    ask(page, HOSTILE)
    assert page.title() != "owned"
    assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize("probabilities", ["", "5"])
def test_script_in_an_answer_stays_text(lab: Lab, probabilities: str) -> None:
    """The console's own answer, with every text of it replaced: streamed pieces, tokens, alternatives."""

    def possessed(route: Any) -> None:
        answered = route.fetch()
        text = re.sub(r'"text": ?"[^"]+"', lambda _: f'"text":{json.dumps(HOSTILE)}', answered.text())
        assert HOSTILE in text
        route.fulfill(response=answered, body=text)

    page = lab.open("play")
    page.get_by_label("Probabilities").select_option(probabilities)
    page.route("**/api/play/ask", possessed)
    try:
        ask(page, "Say something.")
        expect(page.locator(".answer").first).to_contain_text("onerror")
        if probabilities:
            page.locator(".answer .token[role=button]").first.click()
        assert page.title() != "owned"
        assert page.locator("main img, main script").count() == 0
    finally:
        page.unroute("**/api/play/ask")


def test_a_refusal_says_what_to_do(lab: Lab) -> None:
    page = lab.open("play")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("temperature").fill("9")
    page.get_by_label("Prompt", exact=True).fill("x")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answered .problem")).to_contain_text(re.compile("temperature cannot be 9", re.IGNORECASE))
    expect(page.locator(".answered .problem")).to_contain_text("0 to 2")
    lab.complaints.clear()  # the browser tells of the 400


def test_a_conversation_survives_a_view_and_a_reload(lab: Lab) -> None:
    page = lab.open("play")
    page.get_by_label("Probabilities").select_option("5")
    page.get_by_label("Prompt", exact=True).fill("Remember this.")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Plan").click()  # while it is answered
    expect(page.get_by_role("heading", name="Plan", exact=True)).to_be_visible()
    page.get_by_role("link", name="Playground").click()
    expect(page.locator(".answered p", has_text="ended by")).to_have_count(1)
    expect(page.locator(".answer .token[role=button]").first).to_be_visible()
    page.get_by_label("Prompt", exact=True).fill("half a question")
    until(lambda: "half a question" in (page.evaluate("sessionStorage.getItem('corral-play')") or ""), "a draft")
    answer = page.locator(".answer").text_content()
    page.reload()
    expect(page.locator(".said")).to_have_text("Remember this.")
    expect(page.locator(".answer")).to_have_text(answer or "")
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("half a question")
    page.locator(".answer .token[role=button]").nth(1).click()
    page.locator(".alternatives tr:not(.own) button").first.click()  # its tokens are those of before
    expect(page.locator(".answered")).to_contain_text("2 of 2")
    assert lab.complaints == []


def test_a_conversation_is_saved_exported_and_read_again(lab: Lab) -> None:
    page = lab.open("play")
    ask(page, "Keep this.")
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export…").click()
    saved = lab.folder / "playground.json"
    download.value.save_as(saved)
    held = json.loads(saved.read_text())
    assert [one["role"] for one in held["lanes"][0]["messages"]] == ["user", "assistant"]
    with page.expect_download() as download:
        page.get_by_role("button", name="As Markdown").click()
    assert "## Question\n\nKeep this.\n" in download.value.path().read_text()
    for again in (
        lambda: page.get_by_label("Load a conversation").set_input_files(saved),
        page.get_by_role("button", name="Keep this.", exact=True).click,
    ):
        page.get_by_role("button", name="New").click()
        expect(page.locator(".said")).to_have_count(0)
        again()
        expect(page.locator(".said")).to_have_text("Keep this.")
    page.get_by_role("button", name="Delete Keep this.").click()
    assert page.evaluate("localStorage.getItem('corral-conversations')") == "[]"


def test_an_answer_is_made_again_and_a_question_edited(lab: Lab) -> None:
    page = lab.open("play")
    ask(page, "First.")
    ask(page, "Second.", answers=2)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answered").nth(1)).to_contain_text("2 of 2")
    expect(page.locator(".answered p", has_text="ended by")).to_have_count(2)
    page.get_by_role("button", name="Edit the message").first.click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("First.")
    ask(page, "Other.")
    expect(page.locator(".said")).to_have_text("Other.")
    page.get_by_text("The request as curl and Python").click()
    curl = page.locator("pre.log").first
    expect(curl).to_contain_text('"content": "Other."')  # what was sent, and not the answer to it
    expect(curl).to_contain_text('"max_tokens": 1024')
    expect(curl).to_contain_text('"temperature": 0.7')
    expect(curl).not_to_contain_text('"role": "assistant"')
    expect(curl).not_to_contain_text("logprobs")
    assert lab.complaints == []


MARKDOWN = f"""# Title {HOSTILE}

One **bold**, *slanted* and `code`.
- first
  - inner
- [good](https://example.org/x) and [bad](javascript:alert(1)) and ![x](https://example.org/p.png)

1. one

   still one
2. two

| a | b |
|---|---|
| 1 | {HOSTILE} |

> {HOSTILE}

```python
print("<b>")  # **no**
```
"""


def test_markdown_of_a_model_is_elements_of_text(lab: Lab) -> None:
    page = lab.open("play")
    shown = page.evaluate(
        """async (text) => {
        const { markdown } = await import('/static/markdown.js');
        const box = document.createElement('div');
        box.append(...markdown(text));
        const many = (selector) => [...box.querySelectorAll(selector)].map((one) => one.textContent);
        for (const one of ['*', '_', '`', '[', '>', '- ', '**a ', '|', '#']) markdown(one.repeat(20000));
        document.querySelector('main').append(box);
        return { tags: [...new Set([...box.querySelectorAll('*')].map((one) => one.tagName))].sort().join(' '),
            links: [...box.querySelectorAll('a')].map((one) => one.href), bold: many('strong'), slanted: many('em'),
            items: many('li'), code: many('pre'), cells: many('td'), head: many('[role=heading]') };
    }""",
        MARKDOWN,
    )
    assert shown["tags"] == "A BLOCKQUOTE BUTTON CODE DIV EM LI OL P PRE SPAN STRONG TABLE TBODY TD TH THEAD TR UL"
    assert shown["links"] == ["https://example.org/x", "https://example.org/p.png"]  # a picture is never loaded
    assert (shown["bold"], shown["slanted"]) == (["bold"], ["slanted"])
    assert shown["items"][1] == "inner"
    assert [one for one in shown["items"] if "still one" in one] == ["onestill one"]
    assert shown["code"] == ['print("<b>")  # **no**']
    assert shown["cells"] == ["1", HOSTILE]
    assert shown["head"] == [f"Title {HOSTILE}"]
    assert page.title() != "owned"
    assert lab.complaints == []


def test_a_plan_follows_the_sliders(lab: Lab) -> None:
    page = lab.open("plan")
    page.get_by_label("Model").fill("llama-3.1-70b")
    page.get_by_label("Hardware").select_option("H100-SXM")
    page.get_by_role("slider", name="GPUs in a node").fill("2")
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict).to_contain_text("4 × H100-SXM")
    expect(verdict.locator(".tag")).to_have_text("fits")
    bar = page.locator(".memory .part")
    expect(bar.first).to_be_visible()
    assert all(width > 0 for width in bar.evaluate_all("all => all.map(one => one.offsetWidth)"))
    figures = page.locator(".figure")
    reasons = figures.evaluate_all("all => all.map(one => one.querySelector('p.dim').textContent)")
    assert len(reasons) > 7
    assert all(reasons)
    expect(page.get_by_role("region", name="Commands")).to_contain_text("corral up llama-3.1-70b")
    page.get_by_text("Table of alternatives").click()
    expect(page.locator("details[open] tbody tr").first).to_be_visible()
    page.evaluate("scrollTo(0, 0)")
    lab.picture("plan")
    assert lab.complaints == []


def test_a_plan_below_its_form_is_one_press_away(lab: Lab) -> None:
    page = lab.open("plan")
    jump = page.get_by_role("button", name="See the plan")
    expect(page.get_by_label("Verdict")).to_be_visible()
    expect(jump).to_be_hidden()  # beside its form, it is in sight
    page.set_viewport_size({"width": 390, "height": 800})
    expect(jump).to_be_in_viewport()
    expect(jump).to_contain_text("fits")
    expect(page.get_by_label("Verdict")).not_to_be_in_viewport()
    jump.click()
    expect(page.get_by_label("Verdict")).to_be_in_viewport()
    page.set_viewport_size({"width": 1280, "height": 900})
    assert lab.complaints == []


def test_a_plan_is_kept_in_the_address_and_started(lab: Lab) -> None:
    page = lab.open("plan")
    page.get_by_label("Model").fill("smollm2")
    page.get_by_role("slider", name="Context").fill("2")
    expect(page).to_have_url(re.compile(r"context=2048"))
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("smollm2")
    page.get_by_role("link", name="Start…").click()
    expect(page.locator("form .command code")).to_have_text("corral up smollm2 --context 2048")
    assert lab.complaints == []


def test_a_plan_that_does_not_fit_names_what_would(lab: Lab) -> None:
    page = lab.open("plan")
    page.get_by_label("Model").fill("llama-3.1-405b")
    page.get_by_label("Hardware").select_option("A100-80")
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict.locator(".tag.bad")).to_have_text(re.compile("does not fit"))
    expect(verdict).to_contain_text("Nearest that would fit")
    expect(page.locator(".memory .edge")).to_be_visible()
    lab.picture("plan-refused")
    page.get_by_label("Model").fill("no-such-model")
    expect(page.locator(".problem")).to_be_visible()
    lab.complaints.clear()


def test_runs_are_listed_compared_and_overlaid(lab: Lab) -> None:
    page = lab.open("runs")
    for name in ("before", "after"):
        page.get_by_label(f"Compare {name}").check()
    expect(page.get_by_role("link", name="~/answers.jsonl")).to_be_visible()
    lab.picture("runs")
    page.get_by_role("button", name="Compare two runs").click()
    expect(page.get_by_role("heading", name="before against after")).to_be_visible()
    expect(page.locator(".chart canvas").first).to_be_visible()
    expect(page.locator("main")).to_contain_text("load.concurrency")
    assert set(page.locator("td .tag").all_text_contents()) <= {"noise", "better", "worse"}
    legend = page.locator(".chart").first.locator(".u-legend")
    expect(legend).to_contain_text("before")
    expect(legend).to_contain_text("after")
    lab.picture("compare")
    assert lab.complaints == []


def test_a_sweep_is_drawn_by_load(lab: Lab) -> None:
    page = lab.open("runs/run/sweep")
    expect(page.locator(".chart canvas")).to_have_count(4)
    lab.picture("sweep")
    with page.expect_download() as download:
        page.get_by_role("button", name="HTML report").click()
    assert "<svg" in download.value.path().read_text()
    for name in ("sweep/p01", "sweep/p03"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Compare two runs").click()
    expect(page.get_by_role("heading", name="sweep/p01 against sweep/p03")).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="concurrency 16").click()
    expect(page.get_by_role("heading", name="sweep/p03")).to_be_visible()
    assert lab.complaints == []


def test_the_failures_of_a_batch_are_grouped_and_its_rows_read(lab: Lab) -> None:
    page = lab.open("runs")
    page.get_by_role("link", name=re.compile(r"answers\.jsonl")).click()
    expect(page.locator("main")).to_contain_text("30 of 30 rows done, 5 failed")
    expect(page.locator("table.rows tbody tr")).to_have_count(25)
    page.get_by_role("button", name="Show").click()
    expect(page.locator("table.rows tbody tr")).to_have_count(5)
    expect(page.locator("table.rows")).to_contain_text("<b onclick=alert(1)>no</b>")
    lab.picture("batch")
    page.set_viewport_size({"width": 390, "height": 900})
    for cell in ("Message", "Question", "Answer"):  # below each other, as wide as the card
        assert page.locator(f"td[data-label='{cell}']").first.bounding_box()["width"] > 250
    page.set_viewport_size({"width": 1280, "height": 900})
    assert page.locator("main b, main img, main script").count() == 0
    assert lab.complaints == []


@pytest.mark.parametrize("where", ["play", "plan", "runs", "runs/run/sweep", "runs/compare/before/after"])
def test_nothing_is_cut_off_at_any_width(lab: Lab, where: str) -> None:
    page = lab.open(where)
    expect(page.locator("main h1")).to_be_visible()
    for width in (390, 2500):
        page.set_viewport_size({"width": width, "height": 1000})  # charts follow a moment later
        page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
    page.set_viewport_size({"width": 1280, "height": 900})

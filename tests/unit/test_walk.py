"""What a newcomer's walk through README and docs found, each as it was typed: silence, odd words, broken lines."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corral.base.shell import Completed
from corral.base.wording import counted
from corral.deploy.doctor.engine import check_runtime
from corral.deploy.doctor.finding import Level
from corral.engines import PINNED_VERSION, environments
from corral.engines.runtimes.base import NodeSide, make_runtime
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.lab.report import screen
from corral.lab.report.screen import PhaseScreen
from corral.lab.report.tables import wrapped
from corral.plan.candidate import refused_tensor
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.hardware.survey import Here
from corral.plan.models.facts import read_facts
from tests.unit.conftest import in_process

Command = Callable[..., tuple[int, str, str]]
UNKNOWN = "http://no-such-host.invalid:8000"


@pytest.fixture
def corral(clean_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    work = clean_home / "work"
    work.mkdir()
    (work / "rows.jsonl").write_text(json.dumps({"id": "a", "text": "b", "prompt": "c"}) + "\n")
    monkeypatch.chdir(work)
    return in_process(capsys)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with FakeServer(FakeOptions(pace=Pace(ttft_s=0.001, itl_s=0.0001))) as running:
        yield running.url


@pytest.mark.parametrize(
    "words",
    [
        ("complete", "hi"),
        ("bench",),
        ("top", "--once"),
        ("batch", "rows.jsonl", "-o", "out.jsonl"),
        ("score", "rows.jsonl", "-o", "out.jsonl"),
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_does_not_resolve_is_told_as_that(corral: Command, words: tuple[str, ...]) -> None:
    code, _, err = corral(*words, "--url", UNKNOWN)
    assert (code, "the name 'no-such-host.invalid' does not resolve to an address" in err) == (9, True), err
    assert "running" not in err  # nobody can know


# Lines of a terminal


def test_lines_break_between_words_and_never_in_a_command() -> None:
    lines = wrapped("Start it: `corral up llama --context 8192`, then wait for it.", 24, "  → ", "    ")
    assert lines == ["  → Start it:", "    `corral up llama --context 8192`,", "    then wait for it."]
    assert wrapped("one line, however long it is", None, "  → ") == ["  → one line, however long it is"]


def test_errors_and_notes_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen = Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setenv("COLUMNS", "40")
    screen.explain("corral: ", "a message of many words that does not fit the forty columns there are:\n    a line")
    assert max(map(len, seen.getvalue().splitlines())) <= 40
    assert seen.getvalue().splitlines()[0] == "corral: a message of many words that"
    assert "\n    a line\n" in seen.getvalue()


def test_a_note_is_never_written_behind_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The painter draws ten times a second, also between the cleared line and the note that takes its place."""
    shown = PhaseScreen()
    free: list[bool] = []

    def explain(lead: str, text: str) -> None:
        other = threading.Thread(target=lambda: free.append(shown._drawing.acquire(blocking=False)))
        other.start()
        other.join()

    monkeypatch.setattr(screen, "explain", explain)
    shown.note("something")
    assert free == [False]


# What was ignored in silence


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--arrival", "gamma"), "--arrival gamma needs a rate"),
        (("run", "--arrival", "constant", "--concurrency", "4"), "--arrival constant needs a rate"),
        (
            ("run", "--request-rate", "3", "--burstiness", "0.5"),
            "--burstiness applies to --arrival gamma, not to poisson",
        ),
        (("run", "--request-rate", "3", "--ramp-to", "9"), "--ramp-to applies to --arrival ramp, not to poisson"),
        (("run", "--concurrency", "3", "--trace-speed", "9"), "--trace-speed applies to --arrival trace"),
        (("search", "--slo", "ttft_p99=1s", "--over", "concurrency", "--arrival", "gamma"), "needs a rate"),
    ],
)
def test_bench_ignores_no_option_about_arrivals(corral: Command, words: tuple[str, ...], said: str) -> None:
    code, _, err = corral("bench", *words, "--url", "http://127.0.0.1:9")  # refused before anybody is asked
    assert (code, said in err) == (2, True), err


def test_bench_says_where_an_option_belongs(corral: Command) -> None:
    code, _, err = corral("bench", "--num-prompts", "20")
    assert (code, "--num-prompts is an option of `corral bench run` and `corral bench sweep`" in err) == (2, True), (
        err
    )


def test_bench_lists_a_series_by_its_fastest_run_and_its_worst_verdict(corral: Command, url: str) -> None:
    code, _, err = corral("bench", "list")
    assert (code, err) == (0, "No runs. `corral bench` makes one.\n")
    load = ("--concurrency", "1,2", "--num-prompts", "4", "--input-len", "8", "--output-len", "4")
    assert corral("bench", "sweep", *load, "--url", url)[0] in (0, 1)
    (row,) = json.loads(corral("bench", "list", "--json")[1])
    assert row["output_throughput"] > 0
    assert row["verdict"] in ("valid", "caution", "invalid")


def test_an_empty_prompt_is_refused_here(corral: Command, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    code, out, err = corral("complete", "--url", url)
    assert (code, out) == (2, "")
    assert err.startswith("corral: the prompt is empty.")


def test_an_error_before_the_first_token_has_no_blank_line_before_it(corral: Command, url: str) -> None:
    code, out, err = corral("complete", "hi", "--max-tokens", "2000000", "--url", url)
    assert (code, out) == (2, ""), err


def test_importing_an_engine_is_shown(corral: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "check", lambda *_: {"vllm": "0.32.0", "cuda": ""})
    code, out, err = corral("engine", "check", "cpu")
    assert (code, "importing vLLM" in err) == (0, True)
    assert "cuda  -" in out


# Words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("delete",), "`corral down --purge` or `corral models remove`"),
        (("install",), "`corral engine install`"),
        (("models", "nope"), "there is no verb `corral models nope`. Known: remove, update."),
        (("profile", "chek"), "there is no verb `corral profile chek`. Known: check"),
    ],
)
def test_unknown_verbs_are_answered_with_what_is_meant(corral: Command, words: tuple[str, ...], said: str) -> None:
    code, _, err = corral(*words)
    assert (code, said in err) == (2, True), err


@pytest.mark.parametrize("verb", [("plan", "--gpus", "H100"), ("up",), ("pull",)], ids=lambda verb: verb[0])
def test_an_unknown_model_is_one_answer_everywhere(corral: Command, verb: tuple[str, ...]) -> None:
    code, _, err = corral(*verb, "xyz")
    assert (code, err.splitlines()[:2]) == (
        3,
        [
            "corral: no model is called 'xyz'.",
            "  → `corral models` lists the names. A folder, or owner/name of the Hugging Face hub, works too.",
        ],
    )


def test_a_setting_of_a_chat_is_checked_as_an_option_is(
    corral: Command, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"/set temprature=1\n/set length_penalty=1.5\n/set\n/bye\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    _, _, err = corral("chat", "--url", url)
    assert "there is no parameter 'temprature'.\n  → Did you mean 'temperature'?\n" in err
    assert "length_penalty=1.5" in err
    assert "extra" not in err


def test_rows_and_runs_are_counted_as_people_count() -> None:
    assert [counted(1, "row"), counted(2000, "row"), counted(0, "entry", "entries")] == [
        "1 row",
        "2,000 rows",
        "0 entries",
    ]


def test_a_bad_row_is_told_once(corral: Command, url: str) -> None:
    Path("bad.jsonl").write_text('{"id": "d", "foo": 1}\n')
    code, _, err = corral("score", "bad.jsonl", "-o", "s.jsonl", "--url", url)
    assert code == 10
    assert "row 'd' has neither text, continuation nor choices.\n" in err


def test_tensor_sizes_that_do_not_divide_are_one_sentence() -> None:
    found = refused_tensor(read_facts("llama-3.1-8b"), parse_gpus("8xH100"))
    assert [(row.what, row.because) for row in found] == [
        ("TP3, TP5, TP6, TP7", "no divisor of the 32 attention heads")
    ]


def test_of_a_chain_of_causes_the_last_is_told() -> None:
    said = "error: failed\n  cause: dns error\n  cause: error resolving DNS\n  Caused by: Name or service not known\n"
    assert environments._last_words(Completed(("uv",), 1, said, "")) == "Name or service not known"


def test_an_engine_that_is_not_installed_yet_is_no_warning_on_this_machine(clean_home: Path) -> None:
    runtime = make_runtime("managed", {}, NodeSide(flavour="cpu", version=PINNED_VERSION, home=str(clean_home)))
    (found,) = check_runtime(Here(), ["here"], runtime, 20)[0]
    assert found.level is Level.OK
    assert found.text.endswith("is not installed yet; `corral up` installs it")


def test_slurm_that_is_not_set_up_here_names_a_remedy(corral: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.deploy.slurm import cluster

    failed = Completed(("scontrol",), 1, "", "scontrol: fatal: Could not establish a configuration source")
    monkeypatch.setattr(cluster, "ask", lambda _: failed)
    code, _, err = corral("slurm", "partitions")
    assert code == 1
    assert "Run Corral on a login node" in err


def test_help_of_every_group_still_opens() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "corral", "bench", "--help"], capture_output=True, text=True, check=True
    )
    assert "Verbs:" in done.stdout

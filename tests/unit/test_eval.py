"""`corral eval`: answers in a ledger, a harness that is killed, two models compared item by item."""

from __future__ import annotations

import http.server
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import ConflictError, DataError, EngineError, NotFoundError, UsageError
from corral.base.record import save_record
from corral.client.endpoint import Endpoint, FixedServer
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.lab.bench.fingerprint import Fingerprint
from corral.lab.eval import harness as harnesses
from corral.lab.eval.answers import AnswerBook
from corral.lab.eval.compare import compared
from corral.lab.eval.run import EvalOutcome, EvalRequest, run_eval, task_names
from corral.lab.eval.server import EvaluatedModel
from corral.lab.eval.store import RECORD, SAMPLES, EvalRecord, EvalSettings, TaskResult, load_record
from corral.lab.report.eval import comparison_page
from corral.use.batch.core.run import Quiet
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.spec import BatchServers
from corral.use.score.likelihood import ScoreOptions
from tests.until import until

STAND_IN = Path(__file__).parent.parent / "stand_in_harness.py"
IDENTITY = {"model": "fake", "revision": "1"}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness without lm-eval: every task is as many items as its name ends with."""
    monkeypatch.setattr(harnesses, "SCRIPT", STAND_IN)


class Reporter:
    def note(self, text: str) -> None:
        return

    def phase(self, name: str) -> None:
        return


def evaluate(server: FakeServer | str, folder: Path, *tasks: str, **more: Any) -> EvalOutcome:
    url = server if isinstance(server, str) else server.url
    request = EvalRequest(
        tasks, folder, more.pop("settings", EvalSettings()),
        runner=RunnerSettings(concurrency=2, backoff_s=0.01, runaway_share=1), **more,
    )  # fmt: skip
    servers = BatchServers(urls=(url,))
    return run_eval(request, servers, Quiet(), Reporter(), sys.executable)


def row(identity: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"id": identity, "kind": kind, **more}


ROWS = [
    row("c", "choices", context="A or B?", continuations=[" A", " B"], special=True),
    row("t", "text", text="the quick brown fox", special=False),
    row("g", "generate", context="Say it: ", stop=["\n"], max_tokens=4, params={"temperature": 0}),
    row("m", "template", messages=[{"role": "user", "content": "hi"}], text=""),
]


def fetch(server: FakeServer, folder: Path, rows: Sequence[dict[str, Any]], **more: Any) -> tuple[int, Any]:
    wanted = folder / "wanted.jsonl"
    wanted.write_text("".join(json.dumps(one) + "\n" for one in rows))
    book = AnswerBook(folder, more.pop("identity", IDENTITY), ScoreOptions(prefix="bos", too_long="window"),
                      RunnerSettings(backoff_s=0.01, runaway_share=1), Quiet(), signals=False, **more)  # fmt: skip
    return book.fetch(wanted, lambda: [FixedServer(Endpoint(server.url, "fake"))])


def answers(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in map(json.loads, (folder / "answers.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(max_model_len=64)) as running:
        yield running


def test_every_kind_of_request_has_its_answer_and_later_tasks_keep_it(server: FakeServer, tmp_path: Path) -> None:
    count, ran = fetch(server, tmp_path, ROWS[:3])
    assert (count, ran.fine, ran.done) == (3, 3, True)
    found = answers(tmp_path)
    assert [len(found[name]["likelihoods"]) for name in "ct"] == [2, 1]
    assert found["c"]["likelihoods"][0]["logprob"] < 0
    assert found["g"]["text"]
    assert found["g"]["left_out"] == 0
    other = row("o", "text", text="some other words", special=False)
    assert fetch(server, tmp_path, [other])[1].fine == 1
    count, ran = fetch(server, tmp_path, [*ROWS[:2], other])
    assert (count, ran.fine) == (3, 0)
    assert answers(tmp_path).keys() == {"c", "t", "g", "o"}


def test_a_prompt_that_is_too_long_loses_its_beginning(server: FakeServer, tmp_path: Path) -> None:
    long = row("l", "generate", context="word " * 100, max_tokens=10, params={"temperature": 0})
    fetch(server, tmp_path, [long])
    found = answers(tmp_path)["l"]
    assert found["prompt_tokens"] == 64 - 10
    assert found["left_out"] > 0
    with pytest.raises(EngineError, match="asks for answers of 64 tokens, and the model takes 64"):
        fetch(server, tmp_path, [{**long, "id": "x", "max_tokens": 64}])
    assert fetch(server, tmp_path, [long])[1].fine == 0


def test_a_template_that_the_server_renders_otherwise_is_refused(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="chat template"):
        fetch(server, tmp_path, [ROWS[3]])


def test_answers_of_another_model_do_not_count(server: FakeServer, tmp_path: Path) -> None:
    fetch(server, tmp_path, ROWS[:2])
    with pytest.raises(ConflictError, match="revision: '1' before, '2' now"):
        fetch(server, tmp_path, ROWS[:2], identity={**IDENTITY, "revision": "2"})
    _, ran = fetch(server, tmp_path, ROWS[:2], identity={**IDENTITY, "revision": "2"}, force=True)
    assert ran.fine == 2


def test_a_task_runs_once_and_then_costs_nothing(stand_in: None, tmp_path: Path) -> None:
    with FakeServer() as running:
        first = evaluate(running, tmp_path / "r", "words12")
        assert (first.asked, first.kept, first.stopped) == (12, 0, False)
        assert first.prompt_tokens > 0
        more = evaluate(running, tmp_path / "r", "words12", "words15")
        assert (more.asked, more.kept) == (3, 24)
    again = evaluate(running, tmp_path / "r", "words12")  # the server is gone
    assert (again.asked, again.tasks["words12"].metrics) == (0, first.tasks["words12"].metrics)
    with FakeServer(FakeOptions(model="other")) as other, pytest.raises(ConflictError, match="are of another model"):
        evaluate(other, tmp_path / "r", "words12")
    record = load_record(tmp_path / "r")
    assert record.tasks.keys() == {"words12", "words15"}
    assert record.model.engine.startswith("vLLM")
    assert record.tasks["words12"].settings.seeds == (0, 1234, 1234, 1234)


KILLED = """
import sys
from pathlib import Path
from tests.unit import test_eval
test_eval.harnesses.SCRIPT = test_eval.STAND_IN
outcome = test_eval.evaluate(sys.argv[1], Path(sys.argv[2]), "words60")
sys.exit(130 if outcome.stopped else 0)
"""


def test_killed_five_times_it_ends_with_the_same_result(stand_in: None, tmp_path: Path) -> None:
    results = tmp_path / "killed" / "answers.jsonl"

    def answered() -> int:
        return results.read_bytes().count(b"\n") if results.exists() else 0

    def begun(url: str) -> subprocess.Popen[bytes]:
        """A run that has found another answer."""
        before = answered()
        child = subprocess.Popen([sys.executable, "-c", KILLED, url, str(results.parent)])
        until(lambda: answered() > before, "another answer")
        return child

    with FakeServer(FakeOptions(pace=Pace(ttft_s=0.3))) as slow:
        for _ in range(5):
            child = begun(slow.url)
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        child = begun(slow.url)
        child.send_signal(signal.SIGINT)
        assert child.wait() == 130
    with FakeServer() as fast:
        last = evaluate(fast, results.parent, "words60")
        whole = evaluate(fast, tmp_path / "whole", "words60")
    assert 0 < last.asked < 60
    assert last.tasks["words60"].metrics == whole.tasks["words60"].metrics
    strip = [
        {name: {k: v for k, v in one.items() if k != "row"} for name, one in answers(folder).items()}
        for folder in (results.parent, tmp_path / "whole")
    ]
    assert strip[0] == strip[1]


def test_a_harness_that_refuses_or_ends_is_told_in_words(
    stand_in: None, server: FakeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFoundError, match="there is no task 'missing'") as caught:
        evaluate(server, tmp_path, "missing")
    assert "Did you mean words3?" in caught.value.remedy
    with pytest.raises(DataError, match="data of hub could not be loaded") as data:
        evaluate(server, tmp_path, "hub")
    assert "HF_HOME" in data.value.remedy
    with pytest.raises(EngineError, match="ended with code 3: something broke"):
        evaluate(server, tmp_path, "broken")
    with pytest.raises(UsageError, match="no chat template"):
        evaluate(server, tmp_path, "words3", settings=EvalSettings(chat=True))


class WithoutTokenize(http.server.BaseHTTPRequestHandler):
    """A server that is not vLLM: it has models, and nothing that gives log-likelihoods."""

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        body = json.dumps({"data": [{"id": "other"}]} if found else {"detail": "Not Found"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        return


def test_a_server_without_log_likelihoods_is_refused_in_words(stand_in: None, tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WithoutTokenize) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            with pytest.raises(UsageError, match="has no /tokenize, so it gives no log-likelihoods"):
                evaluate(f"http://127.0.0.1:{other.server_port}", tmp_path / "r", "words3")
        finally:
            other.shutdown()
            thread.join()
    assert not (tmp_path / "r" / RECORD).exists()


def test_tasks_are_named_in_one_word_or_in_several() -> None:
    assert task_names(["a,b", " c"]) == ("a", "b", "c")
    with pytest.raises(UsageError, match="no task"):
        task_names([","])


# Two models


def saved(folder: Path, values: dict[str, Sequence[Any]], metrics: dict[str, float], **more: Any) -> Path:
    """A folder of results of one task `t`, with these values of its items."""
    (folder / SAMPLES).mkdir(parents=True)
    count = len(next(iter(values.values())))
    items = [
        {"doc_id": n, "filter": "none", "doc_hash": str(n), "target": "x", "arguments": [["<b>prompt</b>", " yes"]],
         "filtered_resps": [[-1.0, True]], **{name: found[n] for name, found in values.items()}}
        for n in range(count)
    ]  # fmt: skip
    (folder / SAMPLES / "t.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))
    model = EvaluatedModel("m", "vLLM 1", "r", more.get("number_format", "fp32"), 64, {}, "", Fingerprint())
    task = TaskResult(
        {f"{name},none": value for name, value in metrics.items()}, {}, {"ppl": False}, count, "1", 0, "t.jsonl",
        EvalSettings(), "0", 0.0,
    )  # fmt: skip
    save_record(folder / RECORD, EvalRecord(model, {"t": task}))
    return folder


def test_zeros_and_ones_are_compared_in_pairs(tmp_path: Path) -> None:
    before, after = [1] * 80 + [0] * 20, [1] * 50 + [0] * 50
    a = saved(tmp_path / "a", {"acc": before}, {"acc": 0.8})
    b = saved(tmp_path / "b", {"acc": after}, {"acc": 0.5}, number_format="int8")
    found = compared(a, b)
    (change,) = found.changes
    half = 1.96 * math.sqrt(31 - 900 / 102) / 102  # Agresti and Min
    assert change.low == pytest.approx(-30 / 102 - half)
    assert change.high == pytest.approx(-30 / 102 + half)
    assert (change.verdict, change.better, change.worse) == ("worse", 0, 30)
    assert "-0.3 (95% interval" in change.sentence
    assert ("number format", "fp32", "int8") in found.differs
    page = comparison_page(found, ("a", "b"))
    assert "&lt;b&gt;prompt" in page
    assert "<b>prompt" not in page
    same = compared(a, a).changes[0]
    assert same.low is not None
    assert same.low < 0 < (same.high or 0), "no change among 100 items does not show that there is none"


def test_a_perplexity_is_compared_by_what_it_is_made_of(tmp_path: Path) -> None:
    before = [[-20.0 - n, 10] for n in range(9)]
    after = [[value * 1.01, words] for value, words in before]
    made = [math.exp(-sum(v for v, _ in one) / sum(w for _, w in one)) for one in (before, after)]
    a = saved(tmp_path / "a", {"ppl": before, "odd": ["x"] * 9}, {"ppl": made[0], "odd": 0.5})
    b = saved(tmp_path / "b", {"ppl": after, "odd": ["x"] * 9}, {"ppl": made[1], "odd": 0.6})
    change, odd = compared(a, b).changes
    assert change.difference == pytest.approx(made[1] - made[0])
    assert change.low is not None
    assert 0 < change.low < change.difference < (change.high or 0)
    assert (change.verdict, change.worse) == ("worse", 9)
    assert odd.verdict == "no interval"
    assert "no interval" in odd.sentence


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"acc": [1, 0]}, {"acc": 0.5})
    b = saved(tmp_path / "b", {"acc": [1, 0]}, {"acc": 0.5})
    path = b / SAMPLES / "t.jsonl"
    path.write_text(path.read_text().replace('"doc_hash": "1"', '"doc_hash": "other"'))
    with pytest.raises(DataError, match="other documents"):
        compared(a, b)
    with pytest.raises(NotFoundError, match="no results in"):
        compared(a, tmp_path)

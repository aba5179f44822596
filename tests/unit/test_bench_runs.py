"""Whole measurements against the fake server: what is sent, what is kept, what is said when things go wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import DataError
from corral.cli import main
from corral.cli.bench_options import make_spec
from corral.client.client import Client, run
from corral.client.endpoint import Endpoint
from corral.fake.app import FakeOptions
from corral.fake.faults import parse_fault
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.fake.words import encode
from corral.lab.bench.datasets import WORDS, Vocabulary, body_of, learn_vocabulary, load_prompts, path_of
from corral.lab.bench.load import send_times
from corral.lab.bench.series import _probe_spec
from corral.lab.bench.spec import Workload, parse_slos
from corral.lab.bench.store import runs_dir


@pytest.fixture(scope="module")
def server():
    with FakeServer(FakeOptions(pace=Pace(ttft_s=0.002, itl_s=0.0002), control=True)) as running:
        yield running


class Said(dict[str, Any]):
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as end:
            main(["bench", *arguments])
        said = Said()
        said.code = end.value.code if isinstance(end.value.code, int) else 1
        said.out, said.err = capsys.readouterr()
        return said

    return call


CHAT_LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {
    "model": "other", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}})  # fmt: skip
SMALL = ("--input-len", "24", "--output-len", "6", "--percentiles", "50")


# Prompts


def test_prompts_have_exactly_the_tokens_that_were_asked(server: FakeServer) -> None:
    async def learn() -> Vocabulary:
        async with Client(Endpoint(server.url, "fake")) as client:
            return await learn_vocabulary(client)

    words = run(learn())
    assert words.exact
    assert len(words.words) > 64
    for length in (1, 2, 17, 300):
        text = words.draw(length, random.Random(1))
        assert isinstance(text, str)
        assert len(encode(text.encode())) == length


def test_without_a_tokenizer_prompts_are_words_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def page(*_: object, **__: object) -> object:
        raise LookupError(404)

    monkeypatch.setattr(Client, "page", page)
    words = run(learn_vocabulary(Client(Endpoint("http://127.0.0.1:9", "m"))))
    assert not words.exact
    assert "no /tokenize" in words.note


def test_a_tokenizer_that_merges_words_gets_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        status = 200

        def __init__(self, text: str) -> None:
            self._text = text

        def json(self) -> dict[str, Any]:  # two letters a token, spaces or not
            pieces = [self._text[i : i + 2] for i in range(0, len(self._text), 2)]
            return {"count": len(pieces), "tokens": [sum(map(ord, p)) for p in pieces]}

    async def page(_: object, __: str, body: dict[str, Any], **___: object) -> Answer:
        return Answer(body["prompt"])

    monkeypatch.setattr(Client, "page", page)
    words = run(learn_vocabulary(Client(Endpoint("http://127.0.0.1:9", "m"))))
    drawn = words.draw(40, random.Random(1))
    assert isinstance(drawn, list)
    assert len(drawn) == 40


def test_the_seed_decides_every_prompt_and_two_seeds_share_none() -> None:
    words = Vocabulary(WORDS)
    one = [p.content for p in load_prompts(Workload(num_prompts=50, seed=1), words)]
    again = [p.content for p in load_prompts(Workload(num_prompts=50, seed=1), words)]
    other = [p.content for p in load_prompts(Workload(num_prompts=50, seed=2), words)]
    assert one == again
    starts = [str(text)[:64] for text in [*one, *other]]
    assert len(set(starts)) == 100  # no block of the prefix cache is shared


def test_prefix_repetition_shares_prefixes_on_purpose() -> None:
    work = Workload(dataset="prefix_repetition", num_prompts=30, num_prefixes=3, prefix_len=20, input_len=10)
    prompts = load_prompts(work, Vocabulary(WORDS))
    firsts = Counter(" ".join(str(p.content).split()[:20]) for p in prompts)
    assert sorted(firsts.values()) == [10, 10, 10]
    assert {p.input_tokens for p in prompts} == {30}


def test_bodies_are_streamed_seeded_and_of_the_right_path() -> None:
    work = Workload(num_prompts=2, seed=5)
    prompts = load_prompts(work, Vocabulary(WORDS))
    one, two = (json.loads(body_of(p, work, "m", n)) for n, p in enumerate(prompts))
    assert one["seed"] != two["seed"]
    assert one["stream"] is True
    assert one["ignore_eos"] is True
    assert one["stream_options"] == {"include_usage": True}
    assert path_of(prompts[0], work) == "/v1/completions"
    chat = Workload(num_prompts=2, chat=True)
    assert path_of(prompts[0], chat) == "/v1/chat/completions"
    assert json.loads(body_of(prompts[0], chat, "m", 0))["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("dataset", "text", "where"),
    [
        ("custom", '{"prompt": "a"}\n\n{"prompt": \n', "line 3"),
        ("custom", '{"text": "a"}\n', "line 1"),
        ("custom", "[1]\n", "line 1"),
        ("custom", "\n", "no request"),
        ("trace", '{"timestamp": 1, "input_length": "x", "output_length": 3}\n', 'line 1 .* "x"'),
        ("batch", '{"custom_id": "a", "body": {"input": "x"}}\n', "line 1"),
        ("batch", '{"prompt": "a"}\n{"prompts": "a"}\n', "line 2 .* lacks 'prompt' or 'messages'"),
        ("batch", '{"prompt": "a", "max_tokens": "many"}\n', "line 1 .* not 'many'"),
        ("batch", CHAT_LINE.replace("3", '"many"'), "line 1 .* not 'many'"),
        ("batch", CHAT_LINE.replace("hi", "\\ud800 hi"), "line 1 .* not valid JSON"),
        ("sharegpt", '{"a": 1}', "not a ShareGPT file"),
        ("sharegpt", '[{"conversations": [{"value": "\\ud800"}, {}]}]', r"conversation 1 .* '\\ud800'"),
        ("custom", '{"prompt": "a"}\n{"prompt": "a", "timestamp": "soon"}\n', "line 2 .* 'soon'"),
        ("custom", '{"prompt": "a", "timestamp": Infinity}\n', "line 1 .* inf"),
        ("custom", '{"prompt": "a", "output_tokens": NaN}\n', "line 1 .* nan"),
        ("custom", '{"prompt": "\\ud800"}\n', r"line 1 .* '\\ud800'"),
        ("custom", "[" * 100_000, "line 1 .* is not JSON"),
    ],
)
def test_a_malformed_file_is_named_by_its_line(tmp_path: Path, dataset: str, text: str, where: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(DataError, match=where):
        load_prompts(Workload(dataset=dataset, file=str(path)), None)


def test_files_of_the_field_are_read(tmp_path: Path) -> None:
    custom = tmp_path / "custom.jsonl"
    custom.write_text('\ufeff{"prompt": "a b", "output_tokens": 7}\r\n{"prompt": "c", "timestamp": 2.5}\n')
    one, two = load_prompts(Workload(dataset="custom", file=str(custom), output_len=9), None)
    assert (one.content, one.output_tokens, two.output_tokens, two.at_s) == ("a b", 7, 9, 2.5)
    share = tmp_path / "share.json"
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    share.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    assert [p.content for p in load_prompts(Workload(dataset="sharegpt", file=str(share)), None)] == ["hi"]
    batch = tmp_path / "batch.jsonl"
    batch.write_text(CHAT_LINE)
    (prompt,) = load_prompts(Workload(dataset="batch", file=str(batch)), None)
    assert path_of(prompt, Workload()) == "/v1/chat/completions"
    assert json.loads(body_of(prompt, Workload(), "served", 0))["model"] == "served"


def test_plain_rows_are_read_as_corral_batch_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "prompt": "x", "max_tokens": 5}\n{"messages": [{"role": "user", "content": "y"}]}\n')
    work = Workload(dataset="batch", file=str(path))
    one, two = load_prompts(work, None)
    assert (path_of(one, work), path_of(two, work)) == ("/v1/completions", "/v1/chat/completions")
    sent = json.loads(body_of(one, work, "served", 0))
    assert (sent["model"], sent["prompt"], sent["max_tokens"], one.output_tokens) == ("served", "x", 5, 5)
    assert "id" not in sent
    chat = Workload(dataset="batch", file=str(path), chat=True)
    assert {path_of(prompt, chat) for prompt in load_prompts(chat, None)} == {"/v1/chat/completions"}


# Runs


def test_a_run_is_measured_kept_and_told(bench, server: FakeServer) -> None:
    said = bench("run", "--url", server.url, "--concurrency", "4", "--num-prompts", "40", *SMALL, "--name", "mine")
    assert "40 answers" in said.out
    assert "TTFT" in said.out
    again = bench("report", "mine", "--json").json()
    assert again["summary"]["completed"] == 40
    assert again["summary"]["output_tokens"] == 240
    assert again["summary"]["input_tokens"] == 40 * 24
    assert again["fingerprint"]["server"]["engine"] == "vLLM 0.32.0"
    kinds = {p["kind"] for p in again["problems"]}
    assert kinds <= {"generator_lag", "warm_up"}, again["problems"]  # both can be true on a busy machine
    shown = bench("report", "mine")
    assert shown.out.splitlines()[0] == said.out.splitlines()[0]


def test_the_result_file_has_vllms_keys(bench, server: FakeServer) -> None:
    said = bench("run", "--url", server.url, "--request-rate", "400", "--num-prompts", "30", *SMALL,
                 "--save-detailed", "--json", "--slo", "ttft=1s,itl=1s")  # fmt: skip
    body = said.json()
    wanted = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
              "request_goodput", "output_throughput", "total_token_throughput", "mean_ttft_ms", "p50_itl_ms",
              "std_e2el_ms", "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
              "errors", "max_output_tokens_per_s", "max_concurrent_requests", "request_rate", "burstiness",
              "max_concurrency", "num_prompts", "model_id", "tokenizer_id", "date", "backend"}  # fmt: skip
    assert wanted <= set(body)
    assert body["request_goodput"] == pytest.approx(body["request_throughput"])
    assert len(body["itls"][0]) == 5


def test_a_seed_used_twice_is_found_out_by_the_prefix_cache(bench, server: FakeServer) -> None:
    again = ("run", "--url", server.url, "--concurrency", "2", "--num-prompts", "20", "--seed", "77",
             "--input-len", "100", "--output-len", "2", "--percentiles", "50", "--json")  # fmt: skip
    assert "prefix_cache" not in {p["kind"] for p in bench(*again).json()["problems"]}
    second = bench(*again)
    assert second.code == 1
    assert "prefix_cache" in {p["kind"] for p in second.json()["problems"]}


def test_conversations_carry_what_was_said(bench, server: FakeServer) -> None:
    body = bench("run", "--url", server.url, "--concurrency", "2", "--num-prompts", "4", "--dataset", "multi-turn",
                 "--turns", "3", *SMALL, "--json", "--save-detailed").json()  # fmt: skip
    assert body["completed"] == 12
    lengths = body["input_lens"]
    assert lengths[0] < lengths[1] < lengths[2]


def test_a_cap_on_concurrency_holds_in_the_open_loop(bench, server: FakeServer) -> None:
    body = bench("run", "--url", server.url, "--request-rate", "5000", "--concurrency", "3", "--num-prompts", "60",
                 *SMALL, "--json", "--save-detailed").json()  # fmt: skip
    assert body["completed"] == 60
    events = sorted(
        [(t, 1) for t in body["start_times"]]
        + [(t + e, -1) for t, e in zip(body["start_times"], body["latencies"], strict=True)]
    )
    most = under_way = 0
    for _, change in events:
        under_way += change
        most = max(most, under_way)
    assert most <= 3


def test_faults_are_counted_by_kind_and_never_averaged(bench) -> None:
    faults = (parse_fault("status:code=500,every=4"), parse_fault("cut:every=5"))
    with FakeServer(FakeOptions(faults=faults)) as server:
        said = bench("run", "--url", server.url, "--concurrency", "4", "--num-prompts", "60", *SMALL, "--warmup", "0",
                     "--json")  # fmt: skip
    body = said.json()
    assert said.code == 1
    assert body["completed"] + body["failed"] == 60
    assert set(body["errors_by_kind"]) == {"ServerFailed", "CutStream"}
    assert body["total_output_tokens"] == 6 * body["completed"]
    assert "failures" in {p["kind"] for p in body["problems"]}


@pytest.mark.parametrize(("fault", "kind"), [("zero", "zero_tokens"), ("length:factor=0.5", "output_lengths")])
def test_nonsense_is_marked(bench, fault: str, kind: str) -> None:
    with FakeServer(FakeOptions(faults=(parse_fault(fault),))) as server:
        said = bench("run", "--url", server.url, "--concurrency", "2", "--num-prompts", "12", *SMALL, "--warmup", "0",
                     "--json")  # fmt: skip
    assert said.code == 1
    assert kind in {p["kind"] for p in said.json()["problems"]}


def test_a_server_that_dies_ends_the_run_and_keeps_what_was_measured(bench, clean_home: Path) -> None:
    # served by a process of its own, because it is to die
    import subprocess
    import sys

    command = [sys.executable, "-m", "corral", "fake-server", "--until-eof", "--fault", "die:after=30"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = json.loads(process.stdout.readline())["url"]
        said = bench("run", "--url", url, "--concurrency", "2", "--num-prompts", "200", *SMALL, "--warmup", "0")
    assert said.code == 9
    assert "of 200 requests had been answered" in said.err
    assert "What was measured is in" in said.err
    assert bench("report", "last", "--json").json()["verdict"] == "invalid"


def test_a_refused_key_and_an_unknown_model_end_at_once(bench, tmp_path: Path) -> None:
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    for path in (key, wrong):
        path.write_text(path.name)
        path.chmod(0o600)
    with FakeServer(FakeOptions(key_file=key)) as server:
        refused = bench("run", "--url", server.url, "--key-file", str(wrong), "--num-prompts", "5")
        unknown = bench("run", "--url", server.url, "--key-file", str(key), "--model", "nope", "--num-prompts", "5")
    assert refused.code == 6
    assert unknown.code == 3
    assert "It serves: fake" in unknown.err
    assert bench("list", "--json").json() == []  # a run that never began leaves nothing behind


def test_an_empty_run_is_refused(bench, server: FakeServer) -> None:
    said = bench("run", "--url", server.url, "--num-prompts", "0")
    assert said.code == 2
    assert "--num-prompts cannot be 0" in said.err


def test_a_sweep_and_its_pages(bench, server: FakeServer, tmp_path: Path) -> None:
    said = bench("sweep", "--url", server.url, "--concurrency", "1,4", "--num-prompts", "12", *SMALL, "--name", "s")
    assert "concurrency 4" in said.out
    assert "corral bench report s -o report.html" in said.out
    for reference in ("s", "s/p02"):
        target = tmp_path / "page.html"
        assert bench("report", reference, "-o", str(target)).code == 0
        page = target.read_text()
        assert page.count("<svg") == page.count("</svg>") >= 4
        assert "http-equiv" not in page
        assert 'src="' not in page  # nothing is loaded from anywhere


def test_repeats_are_compared_with_intervals(bench, server: FakeServer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        bench("run", "--url", server.url, "--concurrency", "2", "--num-prompts", "12", *SMALL, "--repeat", "3",
              "--name", name)  # fmt: skip
    said = bench("compare", "a", "b")
    assert said.code == 0
    assert "95% interval" in said.out
    assert "Nothing known differs" in said.out
    found = bench("compare", "a", "b", "--json").json()
    assert found["repeats"] is True
    assert {"low", "high", "verdict"} <= set(found["figures"][0])
    assert bench("report", "a", "-o", str(tmp_path / "a.html")).code == 0
    assert "repeat" in bench("list").out


def test_names_that_do_not_exist_are_answered_with_those_that_do(bench, server: FakeServer) -> None:
    bench("run", "--url", server.url, "--concurrency", "1", "--num-prompts", "2", *SMALL, "--name", "thursday")
    said = bench("report", "thursdya")
    assert said.code == 3
    assert "thursday" in said.err
    assert bench("report", "last~9").code == 3


def test_an_option_before_the_subcommand_is_not_ignored(bench, server: FakeServer) -> None:
    said = bench("--url", server.url, "run", "--num-prompts", "2")
    assert said.code == 2
    assert "Write: corral bench run --url" in said.err


def test_a_trace_is_replayed_at_its_own_times(bench, server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 + 40 * n, "input_length": 10 + n, "output_length": 2 + n} for n in range(5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    said = bench("run", "--url", server.url, "--dataset", "trace", "--dataset-path", str(trace), "--json",
                 "--save-detailed", "--name", "t")  # fmt: skip
    assert said.json()["output_lens"] == [2, 3, 4, 5, 6]
    assert said.json()["input_lens"] == [10, 11, 12, 13, 14]
    rows = [json.loads(line) for line in (runs_dir() / "t" / "rows.jsonl").read_text().splitlines()]
    assert [row["intended_ns"] for row in rows] == [n * 40_000_000 for n in range(5)]


@pytest.mark.parametrize(("option", "loads", "labels"), [
    ("--request-rate", "50,500", ["50 req/s, Poisson", "500 req/s, Poisson"]),
    ("--concurrency", "1,4", ["concurrency 1", "concurrency 4"]),
])  # fmt: skip
def test_a_sweep_with_a_trace_varies_the_load_it_names(
    bench, server: FakeServer, tmp_path: Path, option: str, loads: str, labels: list[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 2}\n' * 10)
    said = bench("sweep", "--url", server.url, "--dataset", "trace", "--dataset-path", str(trace), option, loads,
                 "--percentiles", "50", "--json", "--name", "s")  # fmt: skip
    assert [run["load"] for run in said.json()["runs"]] == labels
    rows = [json.loads(line) for line in (runs_dir() / "s" / "p01" / "rows.jsonl").read_text().splitlines()]
    assert len({row["intended_ns"] for row in rows}) == 10  # the trace's own times are all 0


@pytest.mark.parametrize("arrival", ["poisson", "constant"])
def test_a_search_with_a_trace_probes_at_the_rates_it_names(arrival: str, tmp_path: Path) -> None:
    given = dict.fromkeys(("seed", "warmup"), None)
    given |= {"dataset": "trace", "file": str(tmp_path / "t"), "arrival": arrival, "percentiles": "99"}
    given |= {"input_len": 8, "output_len": 8, "range_ratio": 0.0, "prefix_len": 0, "num_prefixes": 1, "turns": 1,
              "chat": False, "ignore_eos": True, "temperature": 0.0, "slo": "", "stall_s": 9.0}  # fmt: skip
    base = make_spec(given)
    for rate in (1.0, 100.0):
        probe = _probe_spec(base, parse_slos("ttft_p99=1s"), "rate", rate, 15.0, 1)
        assert probe.load.arrival == arrival
        assert send_times(probe.load, 50, 1, [0.0] * 50)[-1] == pytest.approx(50 / rate * 1e9, rel=0.01)


def test_a_search_for_a_tpot_of_answers_with_one_token_is_refused(bench, server: FakeServer) -> None:
    said = bench("search", "--url", server.url, "--slo", "ttft_p99=1s,tpot_p99=50ms", "--output-len", "1")
    assert said.code == 2
    assert "tpot_p99 ≤ 50 ms cannot be judged with --output-len 1" in said.err
    assert bench("list", "--json").json() == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interruption_keeps_what_was_measured(server: FakeServer, bench, name: str) -> None:
    import signal
    import subprocess
    import sys
    import time

    command = [sys.executable, "-m", "corral", "bench", "run", "--url", server.url, "--concurrency", "1", "--seconds",
               "60", "--num-prompts", "100000", "--input-len", "8", "--output-len", "40"]  # fmt: skip
    command += ["--name", "cut"]
    assert server.app is not None
    before = server.app.requests
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while server.app.requests < before + 20:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.Signals[name])
        _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "bench/cut; `corral bench report cut` shows it" in told
    known = bench("report", "cut", "--json").json()
    assert known["summary"]["completed"] >= 10
    assert known["problems"][0]["kind"] == "stopped"

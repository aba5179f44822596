"""Scoring a file: forms in and out, bad rows, windows, resuming, kills, a server that goes away."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corral.base.errors import ConflictError, DataError, NotFoundError, UnreachableError, UsageError
from corral.client.client import Client, run
from corral.client.endpoint import Absence, Endpoint, FixedServer, ModelServer
from corral.client.pool import Page
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.use.batch.core.run import Quiet
from corral.use.batch.core.runner import RowRequest, RunnerSettings
from corral.use.score.job import ScoreReport, score_file
from corral.use.score.likelihood import ScoreOptions, read_row
from corral.use.score.score import Scorer, Scoring, TokenGate, summary
from tests.until import until

ROWS: list[dict[str, Any]] = [
    {"id": "t", "text": "the quick brown fox"},
    {"id": "p", "context": "Paris is ", "continuation": "in France"},
    {"id": "c", "context": "A or B?", "choices": [" A", " B"], "answer": 0},
]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(max_model_len=64)) as running:
        yield running


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Moving:
    """A server that is found at another address each time, the last one staying."""

    name = "moving"

    def __init__(self, *urls: str) -> None:
        self._urls = list(urls)

    def find(self) -> Endpoint:
        return Endpoint(self._urls.pop(0) if len(self._urls) > 1 else self._urls[0], "fake")

    def absence(self) -> Absence:
        return Absence("it is away")

    def seats(self) -> None:
        return None


def job(server: FakeServer | ModelServer, source: Path, output: Path, **options: Any) -> ScoreReport:
    chosen = {k: options.pop(k) for k in list(options) if k in ScoreOptions.__dataclass_fields__}
    asked = ScoreOptions(**chosen)
    settings = RunnerSettings(
        concurrency=asked.concurrency,
        most_weight=asked.tokens_in_flight,
        backoff_s=0.01,
        patience_s=options.pop("patience_s", 60),
    )
    used = FixedServer(Endpoint(server.url, "fake")) if isinstance(server, FakeServer) else server
    return score_file([used], "fake", source, output, asked, Quiet(), settings=settings, signals=False, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_form_gives_the_same_scores(server: FakeServer, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    assert job(server, source, tmp_path / "out.jsonl").state == "done"
    wanted = {row["id"]: row["sum_logprob"] for row in lines(tmp_path / "out.jsonl")}
    assert set(wanted) == {"t", "p", "c"}
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    (tmp_path / "rows.csv").write_text(
        "\ufeffid,text,context,continuation,choices,answer\r\n"
        "t,the quick brown fox,,,,\r\np,,Paris is ,in France,,\r\n"
        'c,,A or B?,,"["" A"", "" B""]",0\r\n'
    )
    columns = ("id", "text", "context", "continuation", "choices", "answer")
    whole = [{name: row.get(name) for name in columns} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(whole), tmp_path / "rows.parquet")
    for name in ("rows.jsonl.gz", "rows.parquet", "rows.csv"):
        out = tmp_path / f"{name}.jsonl"
        assert job(server, tmp_path / name, out).failed == 0, lines(out.with_suffix(".errors.jsonl"))
        found = {row["id"]: row["sum_logprob"] for row in lines(out)}
        assert found == wanted


def test_parquet_out_in_the_inputs_order(server: FakeServer, tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "text": "some words " * (1 + i % 5)} for i in range(50)]
    report = job(
        server, write(tmp_path / "rows.jsonl", [*rows, *ROWS]), tmp_path / "o.parquet", per_token=True, top=2
    )
    assert report.summary["rows"] == 53
    table = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert [row["id"] for row in table] == [row["id"] for row in [*rows, *ROWS]]
    assert len(table[0]["token_scores"]) == table[0]["tokens"]
    assert len(table[0]["token_scores"][0]["top"]) == 2
    assert table[-1]["choices"][1]["token_scores"]
    assert table[-1]["correct"] in (True, False)
    assert table[0]["choices"] is None


def test_bad_rows_are_set_apart(server: FakeServer, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS[0]).encode()
    source.write_bytes(
        b"\xef\xbb\xbf" + good + b"\r\n\r\n{broken\n\xff\xfe\n" + b'{"id": "long", "text": "%b"}\n' % (b"word " * 99)
        + b'{"id": "none", "txt": "a"}\n[1]\n' + b"[" * 5000 + b"\n"
    )  # fmt: skip
    with pytest.raises(DataError, match="5 of 7 rows"):  # as in `corral batch`: before anything is sent
        job(server, source, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    report = job(server, source, tmp_path / "out.jsonl", skip_bad=True)
    assert (report.fine, report.failed, report.left) == (1, 6, 0)
    bad = {row["number"]: row for row in lines(tmp_path / "out.errors.jsonl")}
    assert set(bad) == {3, 4, 5, 6, 7, 8}
    assert "not valid JSON" in bad[4]["message"]
    assert bad[5]["kind"] == "PromptTooLongError"
    assert "--too-long window" in bad[5]["remedy"]
    assert "'text'" in bad[6]["message"]


def test_bad_rows_end_with_the_exit_code_of_a_batch(server: FakeServer, tmp_path: Path) -> None:
    source, out = write(tmp_path / "rows.jsonl", [*ROWS, {"id": "bad"}]), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "corral", "score", "-i", str(source), "-o", str(out), "--url", server.url]
    assert subprocess.run(command, capture_output=True).returncode == 10
    done = subprocess.run([*command, "--skip-bad"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert len(lines(out)) == 3
    assert subprocess.run([*command, "--skip-bad"], capture_output=True).returncode == 1  # there is nothing left


def test_a_folder_of_an_earlier_corral_is_continued(server: FakeServer, tmp_path: Path) -> None:
    source, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    job(server, source, out)
    kept = json.loads((tmp_path / "out.jsonl.corral" / "job.json").read_text())
    assert kept == {
        "model": "fake", "too_long": "refuse", "window": None, "overlap": 1, "prefix": "auto",
        "special_tokens": False, "top": 0, "per_token": False,
    }  # fmt: skip
    assert job(server, source, out).before == 3


def test_a_batchs_output_is_not_scored_into(server: FakeServer, tmp_path: Path) -> None:
    source, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.corral").mkdir()
    (tmp_path / "out.jsonl.corral" / "job.json").write_text('{"version": 1}')
    with pytest.raises(ConflictError, match="belongs to a batch"):
        job(server, source, out)


def test_long_rows_in_windows(server: FakeServer, tmp_path: Path) -> None:
    words = " ".join(f"w{i}" for i in range(200))
    source = write(tmp_path / "rows.jsonl", [{"id": "l", "text": words}, {"context": words, "continuation": " end"}])
    job(server, source, tmp_path / "out.jsonl", too_long="window", per_token=True)
    whole, after = sorted(lines(tmp_path / "out.jsonl"), key=lambda row: row["row"])
    assert whole["windows"] == 5
    texts = [score["text"] for score in whole["token_scores"]]
    assert "".join(texts) in words
    assert len(texts) == whole["tokens"]
    assert after["windows"] == 1
    assert "".join(score["text"] for score in after["token_scores"]) == " end"


async def tokens(client: Client, text: str) -> list[int]:
    found: list[int] = (
        await client.page("/tokenize", {"model": "fake", "prompt": text, "add_special_tokens": False})
    ).json()["tokens"]
    return found


def test_the_boundary_is_where_lm_eval_puts_it(server: FakeServer) -> None:
    async def main() -> None:
        async with Client(Endpoint(server.url, "fake")) as client:
            scorer = Scorer(client, ScoreOptions(per_token=True))
            for context, continuation in (
                ("Paris is", " big"),
                ("Paris is ", "big"),
                ("", "big house"),
                ("Par", "is big"),
            ):
                score = await scorer.score(read_row({"context": context, "continuation": continuation}, 1))
                ids = [found.id for found in score.token_scores]
                kept = context.rstrip()
                whole = await tokens(client, context + continuation)
                cut = len(await tokens(client, kept)) if kept else 0
                assert ids == whole[max(cut, 1) :]

    run(main())


def test_a_token_over_the_boundary_leaves_the_contexts_own() -> None:
    """lm-evaluation-harness sends [Par] + [ big]; the tokens of "Paris big" would be another condition."""
    known: dict[Any, list[int]] = {"": [], "Par": [7], "Paris big": [70, 8]}
    asking = Scoring(ScoreOptions(prefix="none")).steps(read_row({"context": "Par", "continuation": "is big"}, 1))
    prompts = asked(next(asking))
    while isinstance(prompts[0], str):
        answers = [json.dumps({"tokens": known[prompt], "max_model_len": 64}) for prompt in prompts]
        prompts = asked(asking.send([Page(200, answer.encode()) for answer in answers]))
    assert prompts == [(7, 8)]


def asked(requests: Sequence[RowRequest]) -> list[Any]:
    """The prompts of some requests: texts to tokenise, or tokens."""
    return [request.body["prompt"] for request in requests if isinstance(request.body, Mapping)]


def test_a_text_may_begin_as_it_does_for_lm_eval(server: FakeServer, tmp_path: Path) -> None:
    """lm-evaluation-harness puts the first token before a text, also where the tokenizer itself adds none."""
    source = write(tmp_path / "rows.jsonl", [ROWS[0]])
    found: dict[str, float] = {}
    for prefix in ("bos", "<s>", "none"):
        out = tmp_path / f"{len(found)}.jsonl"
        assert job(server, source, out, prefix=prefix).failed == 0
        found[prefix] = lines(out)[0]["sum_logprob"]
    assert found["bos"] == found["<s>"] != found["none"]


def test_duplicates_are_named(server: FakeServer, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"id": "a", "text": "x y"}, {"text": "b"}, {"id": "a", "text": "z"}])
    with pytest.raises(DataError, match="line 3 has the id 'a', which line 1 has already"):
        job(server, source, tmp_path / "out.jsonl")


def test_an_empty_file_is_no_error(server: FakeServer, tmp_path: Path) -> None:
    report = job(server, write(tmp_path / "rows.jsonl", []), tmp_path / "out.jsonl")
    assert (report.state, report.rows) == ("done", 0)


def test_what_is_refused(server: FakeServer, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(UsageError):
        job(server, source, tmp_path / "out.txt")
    with pytest.raises(NotFoundError):
        job(server, tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="no folder"):
        job(server, source, tmp_path / "nope" / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]  # a mistyped command leaves nothing
    foreign = tmp_path / "mine.jsonl"
    foreign.write_text("keep me\n")
    with pytest.raises(ConflictError):
        job(server, source, foreign)
    assert foreign.read_text() == "keep me\n"
    assert job(server, source, foreign, force=True).fine == 3
    (tmp_path / "other.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError):
        job(server, tmp_path / "other.parquet", tmp_path / "o.jsonl")


def test_other_settings_must_be_forced(server: FakeServer, tmp_path: Path) -> None:
    source, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    job(server, source, out)
    with pytest.raises(ConflictError, match="per_token"):
        job(server, source, out, per_token=True)
    assert job(server, source, out, concurrency=2).before == 3
    assert job(server, source, out, per_token=True, force=True).fine == 3
    assert job(server, source, out, per_token=True, force=True).before == 3  # nothing to start over for
    assert all("id" in row for row in lines(out))


def test_rows_added_later_are_scored(server: FakeServer, tmp_path: Path) -> None:
    source, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    job(server, source, out)
    write(source, [*ROWS, {"id": "new", "text": "one more row"}])
    report = job(server, source, out)
    assert (report.before, report.fine) == (3, 1)
    assert len(lines(out)) == 4


def test_a_job_that_is_running_is_left_alone(server: FakeServer, tmp_path: Path) -> None:
    from corral.use.batch.core.folder import BatchFolder, BatchLock

    source, out = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    folder = BatchFolder(out)
    folder.create()
    with BatchLock(folder.lock, "it"), pytest.raises(ConflictError, match=str(os.getpid())):
        job(server, source, out)


def rows_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_lost_or_doubled_when_killed(way: signal.Signals, tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "text": f"row {i} has some words to be scored"} for i in range(400)]
    source, out = write(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    with FakeServer(FakeOptions(pace=Pace(ttft_s=0.5))) as server:
        command = [sys.executable, "-m", "corral", "score", "-i", str(source), "-o", str(out), "--url", server.url]
        for _ in range(2):
            before = rows_in(out)
            with subprocess.Popen([*command, "--concurrency", "8"], stderr=subprocess.PIPE, text=True) as process:
                # three waves of requests: the ledger counts at least the first of them
                until(lambda: rows_in(out) >= before + 24, "rows that count")  # noqa: B023 - asked here and now
                process.send_signal(way)
                _, told = process.communicate(timeout=120)
            assert process.returncode == (-9 if way == signal.SIGKILL else 130)
            if way == signal.SIGINT:
                assert "The same command continues." in told
                assert "Traceback" not in told
        server.set_pace(Pace())
        report = job(server, source, out)
    assert report.state == "done"
    assert 0 < report.before < 400
    assert sorted(row["id"] for row in lines(out)) == sorted(row["id"] for row in rows)


def test_a_server_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    rows = [{"id": i, "text": f"row {i} has words"} for i in range(60)]
    source, out = write(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    second = FakeServer()
    with FakeServer(FakeOptions(pace=Pace(ttft_s=0.01))) as first, second:
        first.set_faults("reset:after=20")
        report = job(Moving(first.url, second.url), source, out, concurrency=4)  # it came back on another port
    assert (report.fine, report.failed) == (60, 0)


def test_patience_ends(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(UnreachableError) as caught:
        job(Moving("http://127.0.0.1:9"), source, tmp_path / "o.jsonl", concurrency=1, patience_s=0)
    assert "same command" in caught.value.remedy


def test_tokens_in_flight_are_bounded() -> None:
    async def main() -> None:
        gate, now, most = TokenGate(100), [0], [0]

        async def one(tokens: int) -> None:
            async with gate.hold(tokens):
                now[0] += min(tokens, 100)
                most[0] = max(most[0], now[0])
                await asyncio.sleep(0.001)
                now[0] -= min(tokens, 100)

        tasks = [asyncio.ensure_future(one(n)) for n in (30, 60, 500, 40, 40, 40, 1) * 4]
        tasks[3].cancel()
        tasks[9].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most[0] == 100
        assert (now[0], gate._free) == (0, 100)

    run(main())


def test_texts_and_choices_have_no_common_perplexity() -> None:
    text = {"kind": "text", "tokens": 4, "sum_logprob": -8.0}
    choice = {"kind": "choices", "tokens": 1, "sum_logprob": -0.1, "correct": True, "correct_norm": True}
    mixed = summary([text, choice], 0)
    assert "perplexity" not in mixed
    assert mixed["kinds"]["text"]["perplexity"] == summary([text], 0)["perplexity"]
    assert (mixed["rows"], mixed["tokens"], mixed["accuracy"]) == (2, 5, 1.0)

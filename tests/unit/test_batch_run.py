"""Whole jobs against the fake server: retries, waiting, refusals, resume, output forms, several endpoints."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import (
    AccessError,
    ConflictError,
    CorralError,
    DataError,
    EngineError,
    LaunchError,
    UnreachableError,
    UsageError,
)
from corral.client.endpoint import Absence, Endpoint, FixedServer, ModelServer
from corral.client.errors import OverloadedError, ServerGoneError, TimedOutError, error_from_status
from corral.client.fanout import backoff_s
from corral.client.metrics import Reading
from corral.client.reply import Reply
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace as FakePace
from corral.fake.server import FakeServer
from corral.use.batch.batch import run_batch, saved_spec
from corral.use.batch.core.folder import BatchFolder, BatchLock
from corral.use.batch.core.lanes import LanePace, Verdict, judge
from corral.use.batch.core.run import Quiet, RunSummary, run_assignment, whole_assignment
from corral.use.batch.core.runner import Counts, RowRequest, RowStep, Runner, RunnerSettings
from corral.use.batch.core.table import Table, hash64
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.inspect import ask_to_stop, inspect
from corral.use.batch.spec import BatchServers, BatchSpec
from tests.until import until

QUICK = RunnerSettings(backoff_s=0.01, longest_backoff_s=0.05, drain_s=1.0)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(answer_tokens=(2, 6), max_model_len=512)) as made:
        yield made


class Work:
    """A running server, and a folder with rows."""

    def __init__(self, server: FakeServer, place: Path) -> None:
        self.server, self.place = server, place
        self.input, self.output = place / "in.jsonl", place / "out.jsonl"

    def rows(self, count: int, **more: Any) -> None:
        lines = [json.dumps({"id": f"r{n}", "prompt": f"Row {n}", **more}) for n in range(count)]
        self.input.write_text("\n".join(lines) + "\n")

    def order(self, **more: Any) -> BatchSpec:
        return BatchSpec(**{"input": str(self.input), "output": str(self.output), **more})

    def run(self, settings: RunnerSettings = QUICK, **more: Any) -> RunSummary:
        where = more.pop("where", BatchServers(urls=(self.server.url,)))
        row_order = more.pop("row_order", "input")
        return run_batch(self.order(**more), where, settings, Quiet(), row_order=row_order, signals=False).summary

    def lines(self, path: Path | None = None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (path or self.output).read_text().splitlines()]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return self.lines(self.place / "out.errors.jsonl")


@pytest.fixture
def work(server: FakeServer, tmp_path: Path) -> Work:
    return Work(server, tmp_path)


def test_every_row_gets_its_columns_back_with_an_answer(work: Work) -> None:
    work.rows(30, label="kept")
    summary = work.run(recipe=Recipe(params={"max_tokens": 3}))
    assert (summary.state, summary.fine, summary.failed) == ("done", 30, 0)
    lines = work.lines()
    assert {line["id"] for line in lines} == {f"r{n}" for n in range(30)}
    assert all(line["label"] == "kept" and line["response"] and line["completion_tokens"] <= 3 for line in lines)
    assert summary.output_tokens == sum(line["completion_tokens"] for line in lines)
    assert not (work.place / "out.errors.jsonl").exists()


def test_a_finished_job_needs_no_server(work: Work) -> None:
    work.rows(5)
    work.run()
    work.server.stop()
    summary = work.run()
    assert (summary.state, summary.before, summary.fine) == ("done", 5, 0)


def test_an_empty_input_is_a_success_with_no_requests(work: Work) -> None:
    work.input.touch()
    assert work.run().rows == 0
    assert work.output.read_bytes() == b""


def test_faults_are_tried_again_and_bad_requests_are_not(work: Work) -> None:
    work.rows(60)
    work.server.set_faults(
        "status:code=400,match=Row 7 ", "status:code=400,match=Row 33", "status:code=500,p=0.2", "abort:p=0.1",
        "status:code=429,p=0.1", "cut:p=0.1", "garbage:p=0.1", "reset:p=0.05",
    )  # fmt: skip
    summary = work.run(replace(QUICK, attempts=40, losses=40))
    assert (summary.fine, summary.failed) == (59, 1)
    assert summary.retries > 0
    assert [(e["custom_id"], e["response"]["status_code"], e["error"]["line"]) for e in work.errors] == [
        ("r33", 400, 34)
    ]


def test_a_row_that_always_fails_is_given_up_after_its_attempts(work: Work) -> None:
    work.rows(20)
    work.server.set_faults("status:code=500,match=Row 13")
    summary = work.run(replace(QUICK, attempts=3))
    assert (summary.fine, summary.failed) == (19, 1)
    assert summary.retries == 2
    assert work.errors[0]["error"]["code"] == "ServerFailed"
    assert work.run().failed == 0  # it stays failed …
    work.server.set_faults()
    again_ = work.run(retry_failed=True)  # … until asked for
    assert (again_.before, again_.fine) == (19, 1)
    assert len(work.lines()) == 20


def test_nearly_everything_failing_stops_the_job(work: Work) -> None:
    work.rows(300)
    work.server.set_faults("status:code=400")
    with pytest.raises(EngineError, match="of the last 100 rows failed") as raised:
        work.run()
    assert "--keep-going" in raised.value.remedy
    assert inspect(str(work.output)).state == "failed"
    assert work.run(replace(QUICK, runaway_share=1.0)).failed > 0


def test_a_wrong_key_stops_at_once(work: Work, tmp_path: Path) -> None:
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    for path, text in ((key, "right"), (wrong, "wrong")):
        path.write_text(text)
        path.chmod(0o600)
    work.rows(5)
    with FakeServer(FakeOptions(key_file=key)) as guarded:
        with pytest.raises(AccessError):
            work.run(where=BatchServers(urls=(guarded.url,), key_file=str(wrong)))
        assert work.run(where=BatchServers(urls=(guarded.url,), key_file=str(key))).fine == 5


def test_an_address_without_a_server_is_refused_at_once_and_leaves_nothing(work: Work) -> None:
    work.rows(5)
    with pytest.raises(UnreachableError, match="cannot be reached"):
        work.run(where=BatchServers(urls=("http://127.0.0.1:9",)))
    assert [path.name for path in work.place.iterdir()] == ["in.jsonl"]


def test_patience_ends(work: Work) -> None:
    work.rows(5)
    work.server.set_faults("status:code=503")
    with pytest.raises(UnreachableError, match=r"Nothing has succeeded for 0\.3 s"):
        work.run(replace(QUICK, patience_s=0.3))
    work.server.set_faults()
    assert work.run().fine == 5


class Moving:
    """A server that is away, then at a first address, then at a second."""

    name = "moving"

    def __init__(self, *urls: str | None) -> None:
        self._urls = list(urls)

    def find(self) -> Endpoint | None:
        url = self._urls[0]
        if len(self._urls) > 1:
            self._urls.pop(0)
        return Endpoint(url, "fake") if url else None

    def absence(self) -> Absence:
        return Absence("moving is on its way")

    def seats(self) -> None:
        return None


class Plain:
    """The smallest work there is; two requests make one row when asked to."""

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts

    def first_step(self, number: int, raw: bytes) -> RowStep:
        body = {"prompt": raw.decode(), "max_tokens": 2}
        return RowStep([RowRequest("/v1/completions", {**body, "seed": part}) for part in range(self._parts)], raw)

    def result(self, number: int, context: Any, replies: Any) -> bytes:
        assert all(isinstance(reply, Reply) for reply in replies)
        return json.dumps({"id": number, "texts": [reply.text for reply in replies]}).encode() + b"\n"

    def failure(self, number: int, raw: bytes, error: CorralError) -> bytes:
        return json.dumps({"id": number, "error": error.message}).encode() + b"\n"


def core(
    place: Path,
    count: int,
    servers: list[ModelServer],
    work: Plain,
    settings: RunnerSettings = QUICK,
    listener: Quiet | None = None,
) -> RunSummary:
    """The generic core, without anything of `corral batch`."""
    place.mkdir(exist_ok=True)
    data = place / "data"
    table, offset = Table(data), 0
    with data.open("wb") as file:
        for number in range(count):
            raw = b"row %d" % number
            table.add(hash64(raw), hash64(raw), offset, len(raw), number + 1)
            offset += file.write(raw)
    folder = BatchFolder(place / "core.jsonl")
    folder.create()
    listener = listener or Quiet()
    with BatchLock(folder.lock, "core") as lock, whole_assignment(folder, table, lock, listener) as rows:
        return run_assignment(lambda: servers, rows, work, settings, listener, signals=False)


def test_an_endpoint_that_moves_is_found_again(tmp_path: Path, server: FakeServer) -> None:
    with FakeServer(FakeOptions(faults=())) as dying:
        place = Moving(None, None, dying.url, server.url)
        dying.set_faults("reset:after=20")
        summary = core(tmp_path, 200, [place], Plain())
    assert (summary.fine, summary.losses >= 1) == (200, True)


class Unreadable(Moving):
    """A server that answers while its files cannot be read."""

    def seats(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.timeout(60)
def test_a_server_whose_plan_cannot_be_read_is_used(tmp_path: Path, server: FakeServer) -> None:
    assert core(tmp_path, 5, [Unreadable(server.url)], Plain()).fine == 5


class Ended:
    """A server that has failed for good, or that somebody stopped, and may start again."""

    name = "ended"

    def __init__(self, *urls: str | None, stopped: bool = False) -> None:
        self._urls, self._stopped = list(urls), stopped
        self.looks = 0

    def find(self) -> Endpoint | None:
        url = self._urls.pop(0) if self._urls else None
        return Endpoint(url, "fake") if url else None

    def absence(self) -> Absence:
        self.looks += 1
        error = LaunchError("'ended' has failed: no memory.", "Buy some.", reason="out_of_memory")
        return Absence("ended has failed: no memory", "Buy some.", error, self._stopped)

    def seats(self) -> None:
        return None


class Listening(Quiet):
    """Remembers what was said, and what is waited for."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.waits: set[str] = set()

    def note(self, kind: str, text: str) -> None:
        self.notes.append((kind, text))

    def tick(self, counts: Counts, runner: Runner) -> None:
        self.waits.add(runner.waiting_for)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_server_that_has_ended_ends_the_batch_at_once_with_its_reason(tmp_path: Path, stopped: bool) -> None:
    listening = Listening()
    with pytest.raises(LaunchError, match="no memory") as raised:
        core(tmp_path, 5, [Ended(stopped=stopped)], Plain(), listener=listening)
    assert raised.value.details["reason"] == "out_of_memory"
    assert raised.value.exit_code == 8
    assert "Buy some. Everything up to here is kept." in raised.value.remedy
    assert [text for kind, text in listening.notes if kind == "waiting"] == [
        "ended has failed: no memory; waiting for it. Buy some."
    ]


def test_a_server_that_has_ended_is_waited_for_on_request(tmp_path: Path, server: FakeServer) -> None:
    listening = Listening()
    waiting = Ended(None, None, server.url)
    assert core(tmp_path, 5, [waiting], Plain(), replace(QUICK, wait=True), listening).fine == 5
    assert waiting.looks == 2
    assert "ended has failed: no memory" in listening.waits
    with pytest.raises(UnreachableError, match=r"Nothing has succeeded for 0\.3 s\. ended has failed"):
        core(tmp_path / "more", 5, [Ended()], Plain(), replace(QUICK, wait=True, patience_s=0.3))


def test_one_of_several_servers_that_ended_does_not_end_the_batch(tmp_path: Path, server: FakeServer) -> None:
    assert core(tmp_path, 50, [Ended(), FixedServer(Endpoint(server.url, "fake"))], Plain()).fine == 50


def test_a_server_stopped_while_in_use_may_be_started_again(tmp_path: Path, server: FakeServer) -> None:
    with FakeServer() as first:
        first.set_faults("reset:after=20")
        place = Ended(first.url, None, None, server.url, stopped=True)
        summary = core(tmp_path, 100, [place], Plain())
    assert summary.fine == 100
    assert place.looks >= 2


def test_a_server_that_drains_hands_over_to_its_successor(tmp_path: Path, server: FakeServer) -> None:
    with FakeServer() as draining:
        draining.set_faults("status:code=503")
        summary = core(tmp_path, 50, [Moving(draining.url, server.url)], Plain(), replace(QUICK, patience_s=20))
    assert (summary.fine, summary.losses) == (50, 1)


def test_an_engine_that_hangs_behind_a_healthy_door_is_noticed(tmp_path: Path, server: FakeServer) -> None:
    server.set_faults("hang:times=3")
    place = FixedServer(Endpoint(server.url, "fake"))
    summary = core(tmp_path, 50, [place], Plain(), replace(QUICK, hang_s=3))
    assert (summary.fine, summary.losses) == (50, 1)


def test_a_runner_whose_job_was_taken_over_writes_nothing_more(work: Work) -> None:
    work.rows(200)
    work.server.set_pace(FakePace(requests_per_s=10))
    folder = BatchFolder(work.output)
    stolen: list[bool] = []

    class Thief(Quiet):
        def tick(self, counts: Any, runner: Any) -> None:
            if counts.committed and not stolen:
                other = {"pid": 1, "host": "elsewhere", "boot_id": "b", "start_ticks": 5}
                folder.lock.write_text(json.dumps(other))
                stolen.append(True)

    with pytest.raises(ConflictError, match="taken over by process 1 on elsewhere"):
        run_batch(work.order(), BatchServers(urls=(work.server.url,)), QUICK, Thief(), signals=False)
    assert 0 < len(work.lines()) < 200
    assert folder.lock.exists()  # it is the other's


def test_several_requests_may_make_one_row(tmp_path: Path, server: FakeServer) -> None:
    server.set_faults("status:code=500,p=0.2")
    summary = core(tmp_path, 50, [FixedServer(Endpoint(server.url, "fake"))], Plain(3), replace(QUICK, attempts=30))
    assert summary.fine == 50
    lines = [json.loads(line) for line in (tmp_path / "core.jsonl").read_text().splitlines()]
    assert all(len(line["texts"]) == 3 for line in lines)


class Rounds(Plain):
    """Asks twice, once for the tokens of its prompt; heavy rows are sent one at a time."""

    def __init__(self, weight: int) -> None:
        super().__init__()
        self._weight = weight

    def first_step(self, number: int, raw: bytes) -> RowStep:
        return RowStep([RowRequest("/tokenize", {"prompt": raw.decode()}, page=True)], raw)

    def result(self, number: int, context: Any, replies: Any) -> Any:
        if isinstance(replies[0], Reply):
            return super().result(number, context, replies)
        tokens = replies[0].json()["tokens"]
        return RowStep([RowRequest("/v1/completions", {"prompt": tokens, "max_tokens": 2}, self._weight)], context)


def test_a_row_may_ask_again_after_its_answers(tmp_path: Path, server: FakeServer) -> None:
    server.set_faults("status:code=500,p=0.2")
    settings = replace(QUICK, attempts=30, most_weight=10)
    summary = core(tmp_path, 50, [FixedServer(Endpoint(server.url, "fake"))], Rounds(weight=4), settings)
    assert (summary.fine, summary.failed) == (50, 0)
    lines = [json.loads(line) for line in (tmp_path / "core.jsonl").read_text().splitlines()]
    assert sorted(line["id"] for line in lines) == list(range(50))


@pytest.mark.parametrize(("weight", "most"), [(4, 2), (11, 1), (0, 60)])
def test_no_more_weight_is_under_way_than_allowed(tmp_path: Path, weight: int, most: int) -> None:
    with FakeServer(FakeOptions(pace=FakePace(ttft_s=0.01))) as server:
        settings = replace(QUICK, concurrency=64, most_weight=10)
        seen: list[int] = []

        class Watching(Rounds):
            def result(self, number: int, context: Any, replies: Any) -> Any:
                if isinstance(replies[0], Reply):
                    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as page:
                        text = page.read().decode()
                    seen.append(int(float(re.findall(r"num_requests_running\{.*?\} ([0-9.e+]+)", text)[0])))
                return super().result(number, context, replies)

        summary = core(tmp_path, 30, [FixedServer(Endpoint(server.url, "fake"))], Watching(weight), settings)
    assert summary.fine == 30
    assert max(seen) <= most


def test_two_endpoints_share_the_work_and_take_over_from_each_other(tmp_path: Path, server: FakeServer) -> None:
    with FakeServer() as stuck:
        stuck.set_faults("hang:after=4")
        places = [FixedServer(Endpoint(url, "fake")) for url in (server.url, stuck.url)]
        summary = core(tmp_path, 100, list(places), Plain(), replace(QUICK, concurrency=8))
    assert summary.fine == 100
    assert summary.stolen >= 1
    assert len({json.loads(line)["id"] for line in (tmp_path / "core.jsonl").read_text().splitlines()}) == 100


def test_other_settings_are_refused_and_named(work: Work) -> None:
    work.rows(5)
    work.run(recipe=Recipe(params={"temperature": 0}))
    with pytest.raises(ConflictError, match="temperature 0 → 1") as raised:
        work.run(recipe=Recipe(params={"temperature": 1}))
    assert raised.value.exit_code == 4
    with (
        FakeServer(FakeOptions(model="other")) as other,
        pytest.raises(ConflictError, match="model 'fake' → 'other'"),
    ):
        work.run(recipe=Recipe(params={"temperature": 0}), where=BatchServers(urls=(other.url,)))
    summary = work.run(recipe=Recipe(params={"temperature": 1}), force=True)
    assert (summary.before, summary.fine) == (0, 5)


def test_a_changed_input_is_refused_and_forced_row_by_row(work: Work) -> None:
    work.rows(6)
    work.run()
    before = {line["id"]: line for line in work.lines()}
    text = work.input.read_text().splitlines()
    text[2] = text[2].replace("Row 2", "Something else")
    work.input.write_text("\n".join([*reversed(text), '{"id":"new","prompt":"x"}']) + "\n")
    with pytest.raises(ConflictError, match="the input changed"):
        work.run()
    summary = work.run(force=True)
    assert (summary.before, summary.fine) == (5, 2)
    after = {line["id"]: line for line in work.lines()}
    assert len(work.lines()) == 7
    assert {name for name in before if before[name] == after[name]} == {"r0", "r1", "r3", "r4", "r5"}


def test_touching_the_input_without_changing_it_is_harmless(work: Work) -> None:
    work.rows(4)
    work.run()
    os.utime(work.input)
    assert work.run().before == 4


def test_an_output_of_somebody_else_is_not_overwritten(work: Work) -> None:
    work.rows(3)
    work.output.write_text("precious\n")
    with pytest.raises(ConflictError, match="does not belong to a batch"):
        work.run()
    assert work.output.read_text() == "precious\n"
    assert work.run(force=True).fine == 3


@pytest.mark.parametrize("output", ["in.jsonl", ".", "no/such/folder/o.jsonl", "o.xlsx", "o.parquet.gz"])
def test_an_output_that_cannot_be_is_refused_before_anything(work: Work, output: str) -> None:
    work.rows(1)
    with pytest.raises((UsageError, ConflictError)):
        work.run(output=str(work.place / output))
    assert work.input.read_text()


def test_bad_rows_stop_everything_or_are_skipped(work: Work) -> None:
    work.rows(3)
    with work.input.open("a") as file:
        file.write('{"id":"r1","prompt":"again"}\n{"id":"bad"}\nnonsense\n')
    with pytest.raises(DataError, match="3 of 6 rows") as raised:
        work.run()
    assert [p["line"] for p in raised.value.details["problems"]] == [5, 6, 4]
    assert not work.output.exists()
    summary = work.run(skip_bad=True)
    assert (summary.fine, summary.failed) == (3, 3)
    assert {(e["custom_id"], e["error"]["line"]) for e in work.errors} == {(None, 4), ("bad", 5), (None, 6)}
    assert work.run(skip_bad=True).before == 6


class Recorded(Quiet):
    """Keeps what it is told; `on_answer` is called once the first rows are there."""

    def __init__(self, on_answer: Callable[[], None] = lambda: None) -> None:
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self._on_answer = on_answer
        self._called = False

    def note(self, kind: str, text: str) -> None:
        self.kinds.append(kind)
        self.texts.append(text)

    def tick(self, counts: Counts, runner: Runner) -> None:
        if counts.fine and not self._called:
            self._called = True
            self._on_answer()


def test_a_server_that_falls_silent_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "corral", "fake-server", "--until-eof", "--ttft-ms", "50"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]

        class Listener(Recorded):
            def note(self, kind: str, text: str) -> None:
                super().note(kind, text)
                if kind == "hung":
                    server.send_signal(signal.SIGCONT)

        listener = Listener(lambda: server.send_signal(signal.SIGSTOP))
        (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "Row {n}"}}\n' for n in range(400)))
        order = BatchSpec(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
        settings = replace(QUICK, concurrency=20, hang_s=0.5)
        summary = run_batch(order, BatchServers(urls=(url,)), settings, listener, signals=False).summary
        assert (summary.fine, summary.losses) == (400, 1)
        assert "answered nothing" in " ".join(listener.texts)
        server.communicate("")


def test_answers_that_will_be_cut_short_are_told_before(work: Work) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Say something long"}}
    work.input.write_text(json.dumps(row) + "\n")
    told = Recorded()
    run_batch(work.order(), BatchServers(urls=(work.server.url,)), QUICK, told, signals=False)
    assert any("after 16 tokens" in text for text in told.texts)
    work.rows(2)
    told = Recorded()
    run_batch(
        work.order(output=str(work.place / "b.jsonl")),
        BatchServers(urls=(work.server.url,)),
        QUICK,
        told,
        signals=False,
    )
    assert not any("16 tokens" in text for text in told.texts)


def test_a_prompt_made_long_by_its_template_is_found_too(work: Work) -> None:
    work.rows(1)
    with pytest.raises(DataError, match="the context holds 512"):
        work.run(recipe=Recipe(template="word " * 600 + "{{prompt}}"))


def test_prompts_longer_than_the_context_are_found_before_they_are_sent(work: Work) -> None:
    work.rows(2)
    with work.input.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "x y " * 2000}) + "\n")
    with pytest.raises(DataError, match="line 3 has 4001 tokens; the context holds 512"):
        work.run()
    work.input.write_text(json.dumps({"prompt": "x y " * 200}) + "\n")  # it fits, its answer does not
    with pytest.raises(DataError, match=r"tokens and asks for 256 \(--max-tokens .*\); the context holds 512"):
        work.run()


@pytest.mark.parametrize("row_order", ["longest-first", "prefix-first"])
def test_orders_change_nothing_but_the_order(work: Work, row_order: str) -> None:
    work.rows(20)
    assert work.run(row_order=row_order).fine == 20
    assert len(work.lines()) == 20


def test_longest_first_sends_the_longest_first(work: Work, tmp_path: Path) -> None:
    work.input.write_text("".join(json.dumps({"id": n, "prompt": "x" * n}) + "\n" for n in range(1, 9)))
    work.run(replace(QUICK, concurrency=1), row_order="longest-first")
    assert [line["id"] for line in work.lines()] == list(range(8, 0, -1))


def test_ordered_csv_gz_and_parquet(work: Work) -> None:
    work.rows(20, score=1.5)
    csv_path, gz, pq = work.place / "o.csv", work.place / "o.jsonl.gz", work.place / "o.parquet"
    work.run(output=str(csv_path), ordered=True)
    with csv_path.open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [f"r{n}" for n in range(20)]
    work.run(output=str(gz), ordered=True)
    with gzip.open(gz, "rt") as file:
        assert [json.loads(line)["id"] for line in file] == [f"r{n}" for n in range(20)]
    parquet = pytest.importorskip("pyarrow.parquet")
    work.run(output=str(pq), ordered=True)
    table = parquet.read_table(pq)
    assert table.column("id").to_pylist() == [f"r{n}" for n in range(20)]
    assert str(table.schema.field("score").type) == "double"
    assert str(table.schema.field("completion_tokens").type) == "int64"


def test_stopping_and_resuming_by_name(work: Work) -> None:
    work.rows(2000)
    work.server.set_pace(FakePace(requests_per_s=200))

    class Stop(Quiet):
        def tick(self, counts: Any, runner: Any) -> None:
            if counts.fine > 20 and not runner.stopped:
                ask_to_stop(str(work.output))

    summary = run_batch(
        work.order(), BatchServers(urls=(work.server.url,)), replace(QUICK, concurrency=8), Stop(), signals=False
    ).summary
    assert summary.state == "cancelled"
    assert 20 < summary.fine < 2000
    standing = inspect(str(work.output))
    assert (standing.state, standing.fine, standing.holder) == ("cancelled", summary.fine, None)
    work.server.set_pace(FakePace())
    order, where = saved_spec(str(work.output))
    assert run_batch(order, where, QUICK, Quiet(), signals=False).summary.before == summary.fine
    assert inspect(str(work.output)).state == "done"


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("csv", "id,prompt\n" + "".join(f'{n},"Row\n{n}"\n' for n in range(40))),
        ("csv", "prompt\n" + "".join(f"Row {n}\n" for n in range(40))),
        ("jsonl", "".join(f'{{"prompt": "Row {n}"}}\n\n' for n in range(40))),
        ("text", "".join(f"Row {n}\n\n" for n in range(40))),
    ],
)
def test_what_came_through_stdin_is_resumed_as_it_was_read(
    work: Work, monkeypatch: pytest.MonkeyPatch, format_: str, text: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    work.server.set_faults("status:code=400,match=7")
    assert work.run(input="-", input_format=format_).failed
    work.server.set_faults()
    record = BatchFolder(work.output).spec.read_bytes()
    monkeypatch.setattr(sys, "stdin", None)  # resume may be called anywhere
    order, where = saved_spec(str(work.output))
    summary = run_batch(replace(order, retry_failed=True), where, QUICK, Quiet(), signals=False).summary
    assert (summary.state, summary.before + summary.fine, summary.failed) == ("done", 40, 0)
    assert BatchFolder(work.output).spec.read_bytes() == record
    BatchFolder(work.output).index.unlink()
    with pytest.raises(DataError, match=r"not in .* as they were kept"):
        run_batch(order, where, QUICK, Quiet(), signals=False)


@pytest.mark.parametrize("moved", [False, True])
def test_a_job_with_a_spool_is_resumed_from_anywhere(
    work: Work, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    source = work.place / "in.csv"
    source.write_text("prompt\n" + "".join(f"Row {n}\n" for n in range(40)))
    place = work.place / "sub"
    place.mkdir()
    monkeypatch.chdir(work.place)
    work.server.set_faults("status:code=400,match=7")
    assert work.run(input=str(source), output="sub/o.jsonl").failed
    work.server.set_faults()
    monkeypatch.chdir(place.rename(work.place / "other") if moved else place)
    order, where = saved_spec("o.jsonl")
    summary = run_batch(replace(order, retry_failed=True), where, QUICK, Quiet(), signals=False).summary
    assert (summary.state, summary.before + summary.fine, summary.failed) == ("done", 40, 0)


def test_the_command_line_from_stdin_to_a_signal_to_the_end(work: Work) -> None:
    work.server.set_pace(FakePace(ttft_s=2))
    argv = [sys.executable, "-m", "corral", "batch", "-", "-o", str(work.output), "--url", work.server.url,
            "--concurrency", "4", "--input-format", "text", "--json"]  # fmt: skip
    text = "".join(f"prompt {n}\n" for n in range(100))
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None
        run.stdin.write(text)
        run.stdin.close()
        run.stdin = None
        until(lambda: work.output.exists() and work.output.stat().st_size, "a result")
        refused = subprocess.run([*argv[:6], *argv[6:]], input=text, capture_output=True, text=True, timeout=120)
        assert refused.returncode == 4
        assert f"process {run.pid} on " in refused.stderr
        run.send_signal(signal.SIGTERM)
        out, _ = run.communicate(timeout=120)
        assert run.returncode == 130
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["event"] == "summary"
    assert events[-1]["state"] == "stopped"
    assert events[-1]["left"] > 0
    work.server.set_pace(FakePace())
    resume = [sys.executable, "-m", "corral", "batch", "resume", str(work.output)]
    done = subprocess.run(resume, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "done: 100 of 100 rows" in done.stderr
    assert len(work.lines()) == 100


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_reader_of_the_progress_who_leaves_does_not_end_the_batch(work: Work, words: list[str]) -> None:
    work.rows(30)
    work.server.set_faults("status:code=400,match=Row 7")
    argv = [
        sys.executable,
        "-m",
        "corral",
        "batch",
        str(work.input),
        "-o",
        str(work.output),
        "--url",
        work.server.url,
    ]
    read, write = os.pipe()
    os.close(read)
    told = None if words else write  # without --json all is said on stderr
    run = subprocess.run(
        [*argv, *words], stdout=write, stderr=told or subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60
    )
    os.close(write)
    assert (run.returncode, run.stderr or b"") == (1, b"")  # that of a batch with a row in the error file
    assert len(work.lines()) == 29
    work.input.write_text("{bad\n")
    read, write = os.pipe()
    os.close(read)
    refused = subprocess.run([*argv, *words], stdout=write, stderr=write, stdin=subprocess.DEVNULL, timeout=60)
    os.close(write)
    assert refused.returncode == DataError.exit_code


def test_the_pace_follows_the_server() -> None:
    pace = LanePace(start=256)
    pace.follow_metrics(Reading(0.0, running=30, waiting=202), in_flight=232, now=9)
    assert pace.limit == 256  # it may still be taking in what was sent
    pace.follow_metrics(Reading(0.0, running=32, waiting=200), in_flight=232, now=9.5)
    pace.follow_metrics(Reading(0.0, running=32, waiting=200), in_flight=232, now=10)
    assert pace.limit == 40  # what runs, and a queue of a quarter (at least 8)
    pace.follow_metrics(Reading(0.0, running=40, waiting=0, kv_use_fullest=0.3), in_flight=40, now=20)
    assert pace.limit == 60
    pace.follow_metrics(Reading(0.0, running=60, waiting=0, kv_use_fullest=0.97), in_flight=60, now=21)
    assert pace.limit == 60  # the cache is full
    pace.follow_metrics(Reading(0.0, running=60, waiting=0, preemptions=3), in_flight=60, now=22)
    assert pace.limit == 48
    pace.overloaded(now=23)
    pace.overloaded(now=23.5)
    assert pace.limit == 34  # once a second
    fixed = LanePace(fixed=5)
    fixed.overloaded(now=1)
    assert fixed.limit == 5


def test_the_pace_rises_quickly_until_the_server_was_full_once() -> None:
    pace = LanePace(start=256)
    assert pace.poll_s < 1
    pace.follow_metrics(Reading(0.0, running=0), in_flight=256, now=10)
    assert pace.limit == 256  # the figures may be older than our requests
    pace.follow_metrics(Reading(0.0, running=256), in_flight=256, now=10.25)
    assert pace.limit == 512
    pace.follow_metrics(Reading(0.0, running=300), in_flight=512, now=10.5)
    assert pace.limit == 512
    pace.follow_metrics(Reading(0.0, running=512), in_flight=512, now=10.75)
    assert pace.limit == 1024
    pace.follow_metrics(Reading(0.0, running=700, waiting=324), in_flight=1024, now=11)
    assert (pace.limit, pace.poll_s) == (1024, 0.25)  # still rising
    pace.follow_metrics(Reading(0.0, running=512, waiting=512), in_flight=1024, now=11.25)
    assert (pace.limit, pace.poll_s) == (640, 1.0)
    pace.follow_metrics(Reading(0.0, running=640), in_flight=640, now=20)
    assert pace.limit == 960  # from now on by half


def test_a_server_that_runs_all_there_is_to_do_is_left_alone() -> None:
    pace = LanePace(start=256)
    pace.follow_metrics(Reading(0.0, running=128), in_flight=128, now=10)
    assert pace.poll_s == 1.0
    on_its_way, waits, at_the_limit = (100, 0, 128), (100, 28, 128), (256, 0, 256)
    for running, waiting, in_flight in (on_its_way, waits, at_the_limit):
        seeking = LanePace(start=256)
        seeking.follow_metrics(Reading(0.0, running=running, waiting=waiting), in_flight=in_flight, now=10)
        assert seeking.poll_s < 1
    pace.reset()
    assert pace.poll_s < 1  # it has to fill again


def test_a_long_step_is_not_asked_after_four_times_a_second() -> None:
    pace = LanePace(start=256)
    waits = []
    for running, tokens in ((1, 0), (1, 0), (1, 0), (1, 0), (113, 1), (113, 1)):
        pace.follow_metrics(Reading(0.0, running=running, generated_tokens=tokens), in_flight=128, now=10)
        waits.append(pace.poll_s)
    assert waits == [0.25, 0.5, 1.0, 1.0, 0.25, 0.5]
    pace.reset()
    assert pace.poll_s == 0.25


def test_the_pace_begins_at_what_the_plan_lets_run() -> None:
    small, large, fixed = LanePace(start=256), LanePace(start=256, highest=1024), LanePace(fixed=5)
    for pace, seats in ((small, 16), (large, 2048), (fixed, 512), (small, None)):
        pace.set_seats(seats)
    assert (small.limit, large.limit, fixed.limit) == (24, 2560, 5)
    few = LanePace(start=256, most=100)
    few.set_seats(512)
    assert few.limit == 100  # connections that may be open
    assert LanePace(fixed=500, most=100).limit == 100


def test_without_metrics_throughput_is_the_guide() -> None:
    pace = LanePace(start=16)
    pace.follow_throughput(100, in_flight=16, now=10)
    assert pace.limit == 24
    pace.follow_throughput(101, in_flight=24, now=11)
    assert pace.limit == 16  # it brought nothing


def test_errors_are_judged() -> None:
    assert judge(ServerGoneError("http://x closed the connection")) is Verdict.GONE
    nobody = ServerGoneError("http://x refused")
    nobody.reached = False
    assert judge(nobody) is Verdict.AWAY
    late = TimedOutError("http://x did not accept a connection")
    assert judge(late) is Verdict.AGAIN
    late.reached = False
    assert judge(late) is Verdict.AWAY
    assert judge(OverloadedError("429")) is Verdict.LATER
    for status, verdict in ((400, Verdict.ROW), (401, Verdict.FATAL), (404, Verdict.FATAL), (500, Verdict.AGAIN)):
        assert judge(error_from_status(status, b"", None, "x")) is verdict
    assert backoff_s(0, 0.5, 60, retry_after_s=7.0) == 7.0
    assert all(backoff_s(50, 0.5, 60) <= 60 for _ in range(20))

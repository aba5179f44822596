"""The batch API with the official SDK, unchanged: upload, create, poll, download, cancel, list, restart."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from corral.base.errors import NotFoundError
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.use.batch import spec as job
from corral.use.batch.batch import run_batch
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.input import check
from corral.use.batch.service import workers
from corral.use.batch.service.app import BatchService, ServiceOptions
from corral.use.batch.service.store import Store
from corral.use.batch.spec import BatchServers
from tests.until import until


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(answer_tokens=(2, 6))) as made:
        yield made


def options(server: FakeServer, folder: Path) -> ServiceOptions:
    return ServiceOptions(
        folder, BatchServers(urls=(server.url,)), port=0, settings=RunnerSettings(backoff_s=0.01, drain_s=0.1)
    )


def sdk(service: BatchService) -> openai.OpenAI:
    return openai.OpenAI(base_url=service.url + "/v1", api_key=Path(service.key_file).read_text().strip())


def row(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Question {number}"}]
    whole = {"model": "fake", "messages": messages, **body}
    return {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": whole}


def upload(client: openai.OpenAI, rows: list[dict[str, Any]]) -> str:
    data = b"".join(json.dumps(one).encode() + b"\n" for one in rows)
    return client.files.create(file=("rows.jsonl", io.BytesIO(data)), purpose="batch").id


def create(client: openai.OpenAI, file: str) -> Any:
    return client.batches.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h", metadata={"who": "test"}
    )


def ended(client: openai.OpenAI, identity: str) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(identity)
        return batch if batch.status in ("completed", "failed", "cancelled") else None

    return until(look, "the batch's end")


def begun(client: openai.OpenAI, identity: str) -> None:
    def look() -> bool:
        counts = client.batches.retrieve(identity).request_counts
        return bool(counts and counts.completed)

    until(look, "an answer")


def test_a_batch_through_the_sdk(server: FakeServer, tmp_path: Path) -> None:
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        server.set_faults("status:code=400,match=Question 20")
        file = upload(client, [row(n) for n in range(21)])
        assert client.files.retrieve(file).filename == "rows.jsonl"
        batch = ended(client, create(client, file).id)
        assert batch.status == "completed"
        assert batch.metadata == {"who": "test"}
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
            21,
            20,
            1,
        )
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(a["custom_id"] for a in answers) == sorted(f"q{n}" for n in range(20))
        assert all(a["response"]["body"]["choices"][0]["message"]["content"] for a in answers)
        failed = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
        assert [(f["custom_id"], f["response"]["status_code"]) for f in failed] == [("q20", 400)]
        assert [b.id for b in client.batches.list()] == [batch.id]
        assert {f.id for f in client.files.list()} == {file, batch.output_file_id, batch.error_file_id}
        assert client.files.delete(file).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file)


def test_bad_input_fails_the_batch_and_says_where(server: FakeServer, tmp_path: Path) -> None:
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        rows = [row(1), row(1), {"custom_id": "x"}, {**row(4), "url": "/v1/completions"}, row(5, model="gpt-4o")]
        batch = ended(client, create(client, upload(client, rows)).id)
        assert batch.status == "failed"
        assert sorted(error.line for error in batch.errors.data) == [2, 3, 4, 5]
    with BatchService(replace(options(server, tmp_path / "kept"), skip_bad=True)) as service, sdk(service) as client:
        batch = ended(client, create(client, upload(client, rows)).id)
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed) == ("completed", 1, 4)
        assert [one["error"]["code"] for one in lines_of(client, batch.error_file_id)] == ["invalid_row"] * 4


def lines_of(client: openai.OpenAI, file: str) -> list[Any]:
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


def test_rows_that_the_server_refuses_are_results(server: FakeServer, tmp_path: Path) -> None:
    """Too long, or refused otherwise: also where nearly all are, the rest is done, in OpenAI's shapes."""
    server.set_faults("status:code=422,match=Question 1")
    wanted = replace(options(server, tmp_path / "kept"), settings=RunnerSettings(backoff_s=0.01, runaway_rows=5))
    with BatchService(wanted) as service, sdk(service) as client:
        long = {"messages": [{"role": "user", "content": "word " * 20_000}]}
        rows = [row(1), *(row(n, **long) for n in range(2, 14)), row(20), row(21, max_tokens=10_000_000)]
        batch = ended(client, create(client, upload(client, rows)).id)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 15, 1, 14)
        refused = {one["custom_id"]: one for one in lines_of(client, batch.error_file_id)}
        assert {one["response"]["status_code"] for one in refused.values()} == {400, 422}
        assert all(one["error"] is None for one in refused.values())
        body = refused["q2"]["response"]["body"]
        assert batch.model == "fake"
        assert "maximum context length" in body["error"]["message"]
        assert {"message", "type", "param", "code"} <= body["error"].keys()
        (answer,) = lines_of(client, batch.output_file_id)
        own = answer["response"]["body"]["usage"]
        usage = batch.usage
        assert (usage.input_tokens, usage.output_tokens) == (own["prompt_tokens"], own["completion_tokens"])
        assert usage.total_tokens == own["total_tokens"]
        assert usage.input_tokens_details.cached_tokens >= 0
        assert usage.output_tokens_details.reasoning_tokens == 0


def test_a_cancel_gives_up_rows_under_way(server: FakeServer, tmp_path: Path) -> None:
    wanted = replace(options(server, tmp_path / "kept"), settings=RunnerSettings(backoff_s=0.01, drain_s=3600))
    with BatchService(wanted) as service, sdk(service) as client:
        server.set_faults("hang:match=Question 7")
        batch = create(client, upload(client, [row(n) for n in range(8)]))
        until(lambda: service.store.batch(batch.id)["request_counts"]["completed"] == 7, "the other rows")
        assert client.batches.cancel(batch.id).status == "cancelling"
        stopped = ended(client, batch.id)
        counts = stopped.request_counts
        assert (stopped.status, counts.total, counts.completed, counts.failed) == ("cancelled", 8, 7, 0)
        assert stopped.cancelling_at <= stopped.cancelled_at
        answers = lines_of(client, stopped.output_file_id)
        assert len(answers) == 7
        assert stopped.usage.input_tokens == sum(one["response"]["body"]["usage"]["prompt_tokens"] for one in answers)


def test_files_expire(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hour: Any = {"anchor": "created_at", "seconds": 3600}
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        data = io.BytesIO(json.dumps(row(1)).encode() + b"\n")
        file = client.files.create(file=("rows.jsonl", data), purpose="batch", expires_after=hour)
        assert file.expires_at == file.created_at + 3600
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", output_expires_after=hour
        )
        batch = ended(client, made.id)
        output = client.files.retrieve(batch.output_file_id)
        assert output.expires_at == output.created_at + 3600
        kept = upload(client, [row(2)])
        assert client.files.retrieve(kept).expires_at is None
        contents = [service.store.content(file.id), service.store.content(output.id)]
        for bad in ({"anchor": "created_at", "seconds": 60}, {"anchor": "now", "seconds": 3600}):
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                client.files.create(file=("rows.jsonl", b"{}"), purpose="batch", expires_after=bad)  # type: ignore[arg-type]
            with pytest.raises(openai.BadRequestError, match="output_expires_after"):
                client.batches.create(
                    input_file_id=kept, endpoint="/v1/chat/completions", completion_window="24h",
                    output_expires_after=bad,  # type: ignore[arg-type]
                )  # fmt: skip
        waiting = service.store.add_batch(file.id, "/v1/chat/completions", "24h", None)["id"]
        later = time.time() + 3700
        monkeypatch.setattr("corral.use.batch.service.store.time.time", lambda: later)
        assert {one.id for one in client.files.list()} == {kept, file.id}  # a batch still reads it
        service.store.change(waiting, "cancelled")
        assert [one.id for one in client.files.list()] == [kept]
        assert not [one for one in contents if one.exists()]
        for gone in (file.id, output.id):
            with pytest.raises(openai.NotFoundError):
                client.files.content(gone)


def test_cancel_keeps_what_is_done(server: FakeServer, tmp_path: Path) -> None:
    server.set_pace(Pace(requests_per_s=50))
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        batch = create(client, upload(client, [row(n) for n in range(5000)]))
        begun(client, batch.id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        stopped = ended(client, batch.id)
        assert stopped.status == "cancelled"
        assert client.files.content(stopped.output_file_id).text


@pytest.mark.parametrize("when", ["before the folder is made", "while the input is read"])
def test_cancel_while_validating(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    reached, go = threading.Event(), threading.Event()

    def held(real: Any) -> Any:
        def wait(*args: Any, **more: Any) -> Any:
            reached.set()
            assert go.wait(60)
            return real(*args, **more)

        return wait

    if when == "while the input is read":
        monkeypatch.setattr(job, "scan", held(check.scan))
    else:
        monkeypatch.setattr(workers, "run_batch", held(run_batch))
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        batch = create(client, upload(client, [row(n) for n in range(20)]))
        assert reached.wait(60)
        assert client.batches.cancel(batch.id).status == "cancelling"
        go.set()
        stopped = ended(client, batch.id)
        assert (stopped.status, stopped.output_file_id) == ("cancelled", None)


def test_a_restart_continues(server: FakeServer, tmp_path: Path) -> None:
    server.set_pace(Pace(requests_per_s=100))
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        batch = create(client, upload(client, [row(n) for n in range(2000)]))
        begun(client, batch.id)
    server.set_pace(Pace())
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        done = ended(client, batch.id)
        assert done.status == "completed"
        lines = client.files.content(done.output_file_id).text.splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(f"q{n}" for n in range(2000))


def test_every_path_needs_the_key(server: FakeServer, tmp_path: Path) -> None:
    with BatchService(options(server, tmp_path / "kept")) as service:
        for path in ("/v1/files", "/v1/batches", "/v1/files/x/content", "/", "/v1/models"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(service.url + path, timeout=60)
            assert refused.value.code == 401
            refused.value.close()
        with urllib.request.urlopen(service.url + "/health", timeout=60) as answer:
            assert answer.status == 200
        with openai.OpenAI(base_url=service.url + "/v1", api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                client.files.list()
            with pytest.raises(openai.AuthenticationError):
                client.files.create(file=("x", b"x" * 100_000), purpose="batch")


def test_what_cannot_be_done_is_said(server: FakeServer, tmp_path: Path) -> None:
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("x", b"x"), purpose="assistants")
        with pytest.raises(openai.NotFoundError):
            create(client, "file-unknown")
        file = upload(client, [row(1)])
        with pytest.raises(openai.BadRequestError, match="it must be"):
            client.batches.create(input_file_id=file, endpoint="/v1/embeddings", completion_window="24h")
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("../key")


def test_a_file_that_is_deleted_while_files_are_listed_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "kept")
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.touch()
        store.add_file(f"file-{path.name}", path.name, "batch", path)
    listed = Path.glob

    def deleted_meanwhile(folder: Path, pattern: str) -> list[Path]:
        found = list(listed(folder, pattern))
        store.delete_file("file-a")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", deleted_meanwhile)
        assert [one["id"] for one in store.files()] == ["file-b"]
    with pytest.raises(NotFoundError):
        store.file("file-a")


def test_the_rest_of_the_sdks_surface(server: FakeServer, tmp_path: Path) -> None:
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        file = client.files.create(
            file=("rows.jsonl", json.dumps(row(1)).encode()), purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )  # fmt: skip
        assert client.files.wait_for_processing(file.id).status == "processed"
        made = [create(client, file.id).id for _ in range(3)]
        done = [ended(client, identity) for identity in made]
        assert all(batch.usage.output_tokens and batch.object == "batch" for batch in done)
        page = client.batches.list(limit=2)
        assert page.has_more
        assert {batch.id for batch in page} == set(made)  # through all pages
        assert not client.batches.list(after=page.get_next_page().data[-1].id).data
        with client.files.with_streaming_response.content(done[0].output_file_id) as streamed:
            assert json.loads(b"".join(streamed.iter_bytes()))["custom_id"] == "q1"
        raw = client.batches.with_raw_response.retrieve(made[0])
        assert raw.parse().id == made[0]
        client.files.content(done[0].output_file_id).write_to_file(tmp_path / "answers.jsonl")
        assert json.loads((tmp_path / "answers.jsonl").read_text())["custom_id"] == "q1"


def test_the_sdks_errors(server: FakeServer, tmp_path: Path) -> None:
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        file = upload(client, [row(1)])
        batch = ended(client, create(client, file).id)
        with pytest.raises(openai.ConflictError, match="completed"):
            client.batches.cancel(batch.id)
        for call in (
            lambda: client.batches.cancel("batch_unknown"),
            lambda: client.batches.retrieve("batch_unknown"),
            lambda: client.files.delete("file-unknown"),
            lambda: client.files.content("file-unknown"),
            lambda: client.files.retrieve("file-unknown"),
        ):
            with pytest.raises(openai.NotFoundError) as refused:
                call()
            assert refused.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError, match="metadata"):
            client.batches.create(
                input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h", metadata=[1],  # type: ignore[arg-type]
            )  # fmt: skip


def test_the_async_sdk(server: FakeServer, tmp_path: Path) -> None:
    async def ask(service: BatchService) -> list[str]:
        key = Path(service.key_file).read_text().strip()
        async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key=key) as client:
            data = json.dumps(row(1)).encode()
            file = await client.files.create(file=("rows.jsonl", data), purpose="batch")
            await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            return [batch.input_file_id async for batch in client.batches.list()]

    with BatchService(options(server, tmp_path / "kept")) as service:
        assert len(asyncio.run(ask(service))) == 1

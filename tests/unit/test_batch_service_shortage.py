"""A machine that is short of something pauses a batch, and dying workers are replaced: no batch hangs or is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from corral.base.errors import DataError
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.serve.asgi_server import without_paths
from corral.use.batch.batch import run_batch
from corral.use.batch.service import app, workers
from corral.use.batch.service.app import BatchService
from corral.use.batch.service.workers import Shortage, has_room, shortage_of
from tests.skips import NO_MOUNT
from tests.unit.test_batch_service import begun, create, ended, options, row, sdk, server, upload
from tests.until import until

__all__ = ["server"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # workers die here


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "corral-test", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(NO_MOUNT)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MARGIN_BYTES", 0)
    monkeypatch.setattr(workers, "RETRY_S", 0.05)
    monkeypatch.setattr(workers, "SUPERVISE_S", 0.05)


def fill(place: Path) -> Path:
    """Leave no byte free."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    return filler


def waits_for(client: openai.OpenAI, identity: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = client.batches.retrieve(identity).model_extra["waiting_for"]  # type: ignore[index]
    return found


def paused(client: openai.OpenAI, identity: str, short: Shortage) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = waits_for(client, identity)
        return found if found and found["code"] == short.value else None

    return until(look, f"a pause for {short.value}")


def rows_once(client: openai.OpenAI, batch: Any, count: int) -> None:
    assert batch.status == "completed", batch.errors
    lines = client.files.content(batch.output_file_id).text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(f"q{n}" for n in range(count))


def test_a_full_disk_pauses_a_batch_and_it_goes_on_by_itself(server: FakeServer, small_disk: Path) -> None:
    server.set_pace(Pace(requests_per_s=150))
    with BatchService(options(server, small_disk)) as service, sdk(service) as client:
        batch = create(client, upload(client, [row(n) for n in range(600)]))
        begun(client, batch.id)
        for _ in range(2):
            filler = fill(small_disk)
            told = paused(client, batch.id, Shortage.DISK)
            assert str(small_disk) not in told["message"]
            assert "continues by itself" in told["message"]
            assert client.batches.retrieve(batch.id).status == "in_progress"
            filler.unlink()
            until(lambda: waits_for(client, batch.id) is None, "it goes on")
        server.set_pace(Pace())
        rows_once(client, ended(client, batch.id), 600)


def test_a_disk_that_is_full_at_the_end_does_not_lose_the_end(
    server: FakeServer, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reached, go = workers._count_lines, threading.Event(), threading.Event()

    def held(path: Path) -> int:
        reached.set()
        assert go.wait(60)
        return real(path)

    monkeypatch.setattr(workers, "_count_lines", held)
    with BatchService(options(server, small_disk)) as service, sdk(service) as client:
        batch = create(client, upload(client, [row(n) for n in range(20)]))
        assert reached.wait(60)
        filler = fill(small_disk)
        go.set()
        paused(client, batch.id, Shortage.DISK)
        filler.unlink()
        rows_once(client, ended(client, batch.id), 20)


def test_no_free_descriptors_pause_a_batch(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = run_batch, threading.Event()
    hogs: list[int] = []

    def hog(*given: Any, **more: Any) -> Any:
        if not taken.is_set():
            taken.set()
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            with contextlib.suppress(OSError):
                while True:
                    hogs.append(os.open("/dev/null", os.O_RDONLY))
        return real(*given, **more)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(workers, "run_batch", hog)
    try:
        with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
            batch = create(client, upload(client, [row(n) for n in range(20)]))
            assert taken.wait(60)
            until(lambda: service.store._waits.get(batch.id), "a pause")
            assert service.store._waits[batch.id]["code"] == Shortage.FILES.value
            while hogs:
                os.close(hogs.pop())
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            rows_once(client, ended(client, batch.id), 20)
    finally:
        for hogged in hogs:
            os.close(hogged)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_that_dies_is_replaced_and_its_batch_goes_on(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    real, left = run_batch, [deaths]

    def dying(*given: Any, **more: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise SystemExit
        return real(*given, **more)

    monkeypatch.setattr(workers, "run_batch", dying)
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        batches = [create(client, upload(client, [row(n) for n in range(10)])) for _ in range(3)]
        for batch in batches:
            rows_once(client, ended(client, batch.id), 10)
        assert all(thread.is_alive() for thread in service.workers._threads)


def test_a_batch_whose_workers_keep_dying_fails_with_its_reason_and_others_go_on(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run_batch

    def dying(order: Any, *given: Any, **more: Any) -> Any:
        if Path(order.output).name == f"{fatal}.jsonl":
            raise SystemExit
        return real(order, *given, **more)

    fatal = ""
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        file = upload(client, [row(n) for n in range(10)])
        made = service.store.add_batch(file, "/v1/chat/completions", "24h", None)
        fatal = made["id"]
        monkeypatch.setattr(workers, "run_batch", dying)
        service.workers.submit(fatal)
        batch = ended(client, fatal)
        assert batch.status == "failed"
        assert "worker died" in batch.errors.data[0].message
        rows_once(client, ended(client, create(client, file).id), 10)


def test_an_error_inside_fails_the_batch_without_a_path(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise DataError("/srv/secret/batches/x.jsonl cannot be read.", "Look at `/srv/secret/batches`.")

    monkeypatch.setattr(workers, "run_batch", broken)
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        batch = ended(client, create(client, upload(client, [row(1)])).id)
        assert batch.status == "failed"
        assert "secret" not in batch.errors.data[0].message


def test_a_batch_whose_input_was_deleted_fails_with_its_reason(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BatchService(options(server, tmp_path / "kept")) as service, sdk(service) as client:
        file = upload(client, [row(1)])
        made = service.store.add_batch(file, "/v1/chat/completions", "24h", None)
        client.files.delete(file)
        service.workers.submit(made["id"])
        batch = ended(client, made["id"])
        assert (batch.status, batch.errors.data[0].code) == ("failed", "input_file_deleted")


def test_a_model_that_is_away_is_said(tmp_path: Path) -> None:
    gone = FakeServer()
    with gone:
        pass
    with BatchService(options(gone, tmp_path / "kept")) as service, sdk(service) as client:
        batch = create(client, upload(client, [row(1)]))
        told = until(lambda: waits_for(client, batch.id), "that it waits")
        assert told["code"] == "model_away"


def test_shortages_are_told_from_other_errors() -> None:
    assert shortage_of(OSError(errno.EDQUOT, "quota")) is Shortage.DISK
    assert shortage_of(MemoryError()) is Shortage.MEMORY
    assert shortage_of(RuntimeError("can't start new thread")) is Shortage.MEMORY
    assert shortage_of(DataError("x", "y", errno=errno.EMFILE)) is Shortage.FILES
    assert shortage_of(ValueError()) is None
    assert shortage_of(OSError(errno.EACCES, "no")) is None
    told = DataError("cannot be written", "")
    told.__cause__ = OSError(errno.ENOSPC, "full")
    assert shortage_of(told) is Shortage.DISK


def test_a_folder_that_is_gone_has_no_room(tmp_path: Path) -> None:
    assert has_room(tmp_path)
    assert not has_room(tmp_path / "gone")


def test_paths_are_cut_out_of_texts_and_addresses_stay() -> None:
    assert without_paths("see /srv/a/b.jsonl now") == "see …/b.jsonl now"
    assert without_paths("http://127.0.0.1:80/v1/chat/completions") == "http://127.0.0.1:80/v1/chat/completions"
    assert without_paths("'/srv/a/x'") == "'…/x'"

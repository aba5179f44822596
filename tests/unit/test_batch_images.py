"""Pictures that batch rows name by a path: checked before anything is sent, read where the batch runs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import DataError
from corral.client.images import check_images, with_images
from corral.fake.server import FakeServer
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.input.check import scan
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.input.rows import open_source
from corral.use.batch.output import BatchWork
from tests.unit.test_batch_pooling import corral, lines
from tests.unit.test_chat_screen import PNG


def row(name: str, url: Any, **more: Any) -> str:
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": url}]
    return json.dumps({"id": name, "messages": [{"role": "user", "content": parts}], **more}) + "\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    (tmp_path / "in" / "cats").mkdir(parents=True)
    (tmp_path / "in" / "cats" / "a b.png").write_bytes(PNG)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "in"


def test_a_picture_is_read_beside_the_input_and_the_output_names_it(place: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    spellings = {"path": "cats/a b.png", "file": f"file://{place}/cats/a%20b.png", "whole": f"{place}/cats/a b.png",
                 "data": url}  # fmt: skip
    made = "".join(row(name, {"url": one}, seed=7) for name, one in spellings.items())
    (place / "rows.jsonl").write_text(made + row("none", {"url": "https://example.org/x.png"}, seed=7))
    with FakeServer() as server:
        code = corral(
            "batch", "run", str(place / "rows.jsonl"), "-o", "out.jsonl", "--max-tokens", "8", "--url", server.url
        )
    assert code == 0
    answers = {one["id"]: one for one in lines(Path("out.jsonl"))}
    assert len({answers[name]["response"] for name in spellings}) == 1
    assert answers["none"]["response"] != answers["data"]["response"]
    assert answers["path"]["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": "cats/a b.png"}}


def test_bad_pictures_are_found_by_the_check_and_skipped_row_by_row(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "text.png").write_text("no picture")
    with (place / "large.png").open("wb") as file:
        file.write(PNG)
        file.truncate((20 << 20) + 1)
    bad = {"gone": "nowhere.png", "kind": "text.png", "large": "large.png", "pipe": "/dev/zero"}
    good = row("good", "cats/a b.png")
    (place / "rows.jsonl").write_text(good + "".join(row(name, {"url": url}) for name, url in bad.items()))
    assert corral("batch", "check", str(place / "rows.jsonl")) == 10
    with FakeServer() as server:
        run = ("batch", "run", str(place / "rows.jsonl"), "-o", "out.jsonl", "--max-tokens", "4", "--url", server.url)
        assert corral(*run) == 10
        assert corral(*run, "--skip-bad") == 1
    assert [one["id"] for one in lines(Path("out.jsonl"))] == ["good"]
    told = {one["custom_id"]: one["error"]["message"] for one in lines(Path("out.errors.jsonl"))}
    assert told.keys() == bad.keys()
    assert "cannot be read: No such file" in told["gone"]
    assert "is not a picture" in told["kind"]
    assert "at most 20 MiB" in told["large"]
    assert "is not a file" in told["pipe"]


def test_a_picture_that_vanished_after_the_check_fails_its_row_alone(place: Path) -> None:
    path = place / "rows.jsonl"
    path.write_text(row("one", {"url": "cats/a b.png"}))
    folder = BatchFolder(place / "out.jsonl")
    folder.create()
    scanned = scan(open_source(str(path)), Recipe(), folder)
    work = BatchWork(scanned.recipe, scanned.table, (), "columns", "response", folder=place)
    step = work.first_step(0, path.read_bytes())
    assert (step.requests[0].weight, b"cats" in str(step.requests[0].body).encode()) == (len(PNG), False)
    (place / "cats" / "a b.png").unlink()
    with pytest.raises(DataError, match="No such file"):
        work.first_step(0, path.read_bytes())


def test_rows_of_others_read_no_files_here(place: Path) -> None:
    """`corral batch serve` passes paths on as they are; vLLM refuses them."""
    path = place / "rows.jsonl"
    path.write_text(row("one", {"url": f"{place}/cats/a b.png"}) + row("two", {"url": "/etc/hostname"}))
    folder = BatchFolder(place / "out.jsonl")
    folder.create()
    scanned = scan(open_source(str(path)), Recipe(), folder, local=False)
    assert scanned.problems.count == 0
    work = BatchWork(scanned.recipe, scanned.table, (), "columns", "response", as_service=True, folder=place)
    body = work.first_step(0, path.read_bytes().splitlines()[0]).requests[0].body
    assert "data:image" not in str(body)


def test_the_pictures_of_a_row_are_bounded_together(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.client.images.MOST_OF_A_REQUEST", 2 * len(PNG) + 1)
    part = {"type": "image_url", "image_url": {"url": "cats/a b.png"}}
    for count in (2, 3):
        body = {"messages": [{"role": "user", "content": [dict(part) for _ in range(count)]}]}
        for read in (check_images, with_images):
            if count == 2:
                read(body, place)
            else:
                with pytest.raises(DataError, match="more than"):
                    read(body, place)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": 3},
        {"messages": [3]},
        {"messages": [{"content": [3, {"image_url": 4}]}]},
        {"messages": [{"content": "cats/a b.png"}]},
        {"prompt": "x"},
    ],
)
def test_malformed_parts_are_left_to_the_server(place: Path, body: dict[str, Any]) -> None:
    assert with_images(body, place) == (body, 0)


def test_relative_paths_need_a_folder(place: Path) -> None:
    body = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "cats/a b.png"}}]}]}
    with pytest.raises(DataError, match="is relative"):
        check_images(body, None)

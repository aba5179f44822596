"""Recordings that batch rows name by a path: checked before anything is sent, uploaded from where the batch runs."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import DataError
from corral.client.audio import RECORDING, audio_form, check_audio
from corral.fake.server import FakeServer
from corral.node.agent.probe import silence
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.input.check import scan
from corral.use.batch.input.recipe import OPENAI, Recipe
from corral.use.batch.input.rows import open_source
from corral.use.batch.output import BatchWork
from tests.unit.test_batch_images import place
from tests.unit.test_batch_pooling import corral, lines

__all__ = ["place"]


def row(name: str, **body: Any) -> str:
    line = {"custom_id": name, "method": "POST", "url": "/v1/audio/transcriptions", "body": body}
    return json.dumps(line) + "\n"


@pytest.mark.parametrize("shape", ["openai", "columns"])
def test_recordings_are_uploaded(place: Path, shape: str) -> None:
    sound = silence() + b"\r\n--x\r\n\0\xff"
    (place / "speech one.wav").write_bytes(sound)
    (place / "rows.jsonl").write_text(row("a", file="speech one.wav", language="de") + row("b", file="gone.wav"))
    with FakeServer() as server:
        run = ("batch", "run", str(place / "rows.jsonl"), "-o", "out.jsonl", "--format", shape, "--url", server.url)
        assert corral(*run) == 10
        assert corral(*run, "--skip-bad") == 1
    answer = lines(Path("out.jsonl"))[0]
    text = answer["response"] if shape == "columns" else answer["response"]["body"]["text"]
    assert text == f"{len(sound)} bytes {zlib.crc32(sound):08x} de"
    error = lines(Path("out.errors.jsonl"))[0]
    assert (error["custom_id"], "No such file" in error["error"]["message"]) == ("b", True)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "lacks 'file'"),
        ({"file": 3}, "is not the path of a recording"),
        ({"file": "a.wav", "response_format": "srt"}, "response_format 'srt'"),
        ({"file": "/dev/zero"}, "is not a file"),
        ({"file": "large.wav"}, "at most 25 MiB"),
    ],
)
def test_what_cannot_be_sent_is_found_before(place: Path, body: dict[str, Any], problem: str) -> None:
    with (place / "large.wav").open("wb") as file:
        file.truncate(RECORDING.most_bytes + 1)
    path = place / "rows.jsonl"
    path.write_text(row("a", **body))
    folder = BatchFolder(place / "out.jsonl")
    folder.create()
    scanned = scan(open_source(str(path)), Recipe(), folder)
    scanned.problems.close()
    assert problem in scanned.problems.first[0].text


def test_rows_of_the_batch_service_read_no_recordings(place: Path) -> None:
    (place / "a.wav").write_bytes(silence())
    path = place / "rows.jsonl"
    path.write_text(row("a", file=str(place / "a.wav")))
    folder = BatchFolder(place / "out.jsonl")
    folder.create()
    scanned = scan(open_source(str(path)), Recipe(kind=OPENAI), folder, local=False)
    work = BatchWork(scanned.recipe, scanned.table, (), "openai", "response", as_service=True, folder=place)
    with pytest.raises(DataError, match="rows of the batch service read none"):
        work.first_step(0, path.read_bytes())


def test_names_cannot_leave_their_field(tmp_path: Path) -> None:
    path = tmp_path / 'a".wav'
    path.write_bytes(b"x")
    assert check_audio(path) == 1
    form = audio_form({"file": str(path), 'la"\r\nX: y': "de", "temperature": 0.5}, path)
    assert b'filename="a_.wav"' in form
    assert b"\r\nX: y" not in form
    assert b"\r\n\r\n0.5\r\n" in form

"""What can be checked in a second is checked first: no server is asked, nothing is planned, fetched or written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import in_process

Command = Callable[..., tuple[int, str, str]]
NOBODY = ("--url", "http://127.0.0.1:9")  # an address where nobody answers: who asks it exits 9


@pytest.fixture
def corral(clean_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    work = clean_home / "work"
    work.mkdir()
    (work / "rows.jsonl").write_text(json.dumps({"id": "a", "text": "b", "prompt": "c"}) + "\n")
    monkeypatch.chdir(work)
    return in_process(capsys)


MISSING = (
    ("batch", "row.jsonl", "-o", "out.jsonl", *NOBODY),
    ("batch", "row.jsonl", "-o", "out.jsonl"),
    ("batch", "row.jsonl", "-o", "out.jsonl", "--start", "smollm2"),
    ("batch", "check", "row.jsonl"),
    ("batch", "rows.jsonl", "-o", "out.jsonl", "--prompt-template", "@row.jsonl", *NOBODY),
    ("score", "row.jsonl", "-o", "out.jsonl", *NOBODY),
    ("score", "row.jsonl", "-o", "out.jsonl"),
    ("bench", "run", "--dataset", "custom", "--dataset-path", "row.jsonl", *NOBODY),
    ("bench", "--dataset", "sharegpt", "--dataset-path", "row.jsonl", *NOBODY),
    ("chat", "--load", "row.jsonl", *NOBODY),
    ("complete", "-f", "row.jsonl", *NOBODY),
    ("complete", "a", "--json-schema", "@row.jsonl", *NOBODY),
    ("up", "smollm2", "--hosts", "@row.jsonl"),
    ("doctor", "--hosts", "@row.jsonl"),
)


@pytest.mark.parametrize("words", MISSING, ids=" ".join)
def test_a_file_that_is_not_there_is_one_answer_everywhere(corral: Command, words: tuple[str, ...]) -> None:
    code, _, err = corral(*words)
    assert (code, err.splitlines()[:2]) == (
        3,
        ["corral: there is no file 'row.jsonl'.", "  → Did you mean rows.jsonl?"],
    )
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]  # nothing was begun


@pytest.mark.parametrize("verb", [("batch", "rows.jsonl"), ("score", "rows.jsonl")], ids=lambda verb: verb[0])
@pytest.mark.parametrize("output", ["nope/out.jsonl", "/nope/out.jsonl", "."])
def test_an_output_that_cannot_be_is_told_first_and_makes_no_folder(
    corral: Command, verb: tuple[str, ...], output: str
) -> None:
    code, _, err = corral(*verb, "-o", output, *NOBODY)
    assert code == 2, err
    assert "output" in err
    assert not Path("nope").exists()
    assert not Path("/nope").exists()


@pytest.mark.parametrize("verb", [("batch",), ("score", "-i")], ids=lambda verb: verb[0])
def test_a_corrected_command_is_not_refused(corral: Command, verb: tuple[str, ...]) -> None:
    assert corral(*verb, "row.jsonl", "-o", "out.jsonl", *NOBODY)[0] == 3
    code, _, err = corral(*verb, "rows.jsonl", "-o", "out.jsonl", *NOBODY)
    assert code == 9, err  # it gets as far as the server now


def test_a_file_that_is_no_text_is_one_answer_everywhere(corral: Command) -> None:
    Path("wide.txt").write_bytes("ö".encode("utf-16"))
    for words in (("complete", "-f", "wide.txt"), ("complete", "a", "--grammar", "@wide.txt"),
                  ("batch", "rows.jsonl", "-o", "o.jsonl", "--prompt-template", "@wide.txt"),
                  ("doctor", "--hosts", "@wide.txt")):  # fmt: skip
        code, _, err = corral(*words, *(NOBODY if words[0] != "doctor" else ()))
        assert code == 10
        assert "wide.txt is not UTF-8 (byte 0)." in err


@pytest.mark.parametrize(
    "words",
    [
        ("status", "a", "b"),
        ("ps", "--nope"),
        ("plan", "--goal", "fun"),
        ("nosuchverb",),
        ("bench", "run", "--seed", "x"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_a_document_too(corral: Command, words: tuple[str, ...]) -> None:
    code, out, err = corral(*words, "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["error"]["kind"]) == (2, 2, "UsageError")
    assert found["error"]["message"] in err
    assert "--help" in found["error"]["remedy"]

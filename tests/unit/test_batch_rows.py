"""Inputs of every form, good and bad: what is read, and what is said about what cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from corral.base.errors import CorralError, DataError, NotFoundError, UsageError
from corral.cli.batch import command
from corral.client.sampling import request_fields
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.table import RowReader, Table, hash64
from corral.use.batch.input.check import read_problems, scan
from corral.use.batch.input.recipe import OPENAI, PLAIN, Recipe
from corral.use.batch.input.rows import open_source
from corral.use.batch.inspect import check_input
from corral.use.score.job import ScoreRows
from tests.unit.conftest import in_process


def prompts(path: Path, tmp_path: Path, **recipe: Any) -> list[str]:
    folder = BatchFolder(tmp_path / "o.jsonl")
    folder.create()
    scanned = scan(open_source(str(path)), Recipe(**recipe), folder)
    assert not scanned.problems.count, scanned.problems.first
    reader = RowReader(scanned.table)
    found = [scanned.recipe.read(reader.raw(n), scanned.table.lines[n]).body for n in range(len(scanned.table))]
    reader.close()
    return [body.get("prompt") or body["messages"][-1]["content"] for body in found]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"prompt":"one"}\n{"prompt":"zw\xc3\xb6lf"}\n'),
        ("bom.jsonl", b'\xef\xbb\xbf{"prompt":"one"}\r\n\r\n{"prompt":"zw\xc3\xb6lf"}'),
        ("strings.jsonl", b'"one"\n"zw\xc3\xb6lf"\n'),
        ("a.json", b' [ "one",\n {"prompt": "zw\xc3\xb6lf"} ] '),
        ("lines.json", b'{"prompt":"one"}\n{"prompt":"zw\xc3\xb6lf"}\n'),
        ("a.txt", b"one\r\n\nzw\xc3\xb6lf"),
        ("a.csv", b"\xef\xbb\xbfprompt,more\none,1\nzw\xc3\xb6lf,2\n"),
        ("a.tsv", b"prompt\tmore\none\t1\nzw\xc3\xb6lf\t2\n"),
        ("a.txt.gz", gzip.compress(b"one\nzw\xc3\xb6lf\n", mtime=0)),
        ("messages.jsonl", b'{"messages":[{"role":"user","content":"one"}]}\n'
                           b'{"messages":[{"role":"user","content":"zw\xc3\xb6lf"}]}\n'),
    ],
)  # fmt: skip
def test_every_form_gives_the_same_prompts(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert prompts(path, tmp_path) == ["one", "zwölf"]


def test_parquet_and_zst(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["one", "zwölf"], "empty": [None, 1]}), path)
    assert prompts(path, tmp_path) == ["one", "zwölf"]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"prompt":"one"}\n{"prompt":"two"}\n'))
    assert prompts(path, tmp_path) == ["one", "two"]


def test_zst_of_several_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00note"
    lines = [f"{n} {'x' * (n % 50)}" for n in range(20_000)]
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(zstandard.compress(text[:100_001]) + skipped + zstandard.compress(text[100_001:]))
    assert prompts(path, tmp_path) == lines


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.json"])
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path, name: str, ending: str, keep: float) -> None:
    text = {"a.txt": "{}\n" * 5000, "a.csv": "prompt\n" + "{}\n" * 5000, "a.json": json.dumps(["{}"] * 5000)}[name]
    whole = text.format(*(hash64(b"%d" % n) for n in range(5000))).encode()
    pack = gzip.compress if ending == ".gz" else zstandard.compress
    packed = pack(whole)
    path = tmp_path / (name + ending)
    path.write_bytes(packed)
    assert check_input(str(path), None, Recipe()).rows == 5000
    path.write_bytes(packed[: int(len(packed) * keep)])
    with pytest.raises(DataError, match="is cut off or damaged"):
        check_input(str(path), None, Recipe())


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_that_is_not_compressed_or_damaged_is_refused(tmp_path: Path, ending: str) -> None:
    pack = gzip.compress if ending == ".gz" else zstandard.compress
    packed = bytearray(pack("".join(f"{hash64(b'%d' % n)}\n" for n in range(5000)).encode()))
    packed[len(packed) // 2 : len(packed) // 2 + 100] = b"\xff" * 100
    path = tmp_path / f"a.txt{ending}"
    for content in (b"plain text\n", bytes(packed)):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is cut off or damaged"):
            check_input(str(path), None, Recipe())


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"x\n" * 5000)[:20], b"plain", gzip.compress(b"abc")[:-8] + b"x" * 8],
    ids=["cut", "plain", "damaged"],
)
def test_a_damaged_input_to_score_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content)
    folder = BatchFolder(tmp_path / "o.jsonl")
    folder.create()
    with pytest.raises(DataError, match="is cut off or damaged"):
        scan(open_source(str(path)), ScoreRows(), folder)


def test_all_problems_are_told_by_line_not_only_the_first(tmp_path: Path) -> None:
    good = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}})
    lines = [
        good, "{bad", "", good, good.replace('"a"', '"b"').replace("POST", "GET"),
        good.replace('"a"', '"c"').replace("/v1/completions", "/v1/files"),
        good.replace('"a"', '"d"').replace('"prompt": "x"', '"prompt": "x", "temperature": -1'),
        good.replace("custom_id", "costum_id"), '["not an object"]',
        good.replace('"a"', '"e"').replace('"prompt": "x"', '"prompt": "x", "stream": true'),
        good.replace('"a"', '"f"').replace('"prompt": "x"', '"max_tokens": 3'),
    ]  # fmt: skip
    path = tmp_path / "in.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"custom_id": "\xff"}\n{"custom_id":"z","a":"\x00"}\n')
    found = check_input(str(path), None, Recipe())
    assert [problem.line for problem in found.problems] == [2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    said = {problem.line: problem.text for problem in found.problems}
    assert "not valid JSON" in said[2]
    assert said[4] == "has the id 'a', which line 1 has already"
    assert "only POST" in said[5]
    assert "/v1/chat/completions" in said[6]
    assert said[7] == "temperature cannot be -1. Its range is 0 to 2"
    assert "did you mean 'custom_id'" in said[8]
    assert "UTF-8" in said[12] or "utf-8" in said[12]
    assert "NUL" in said[13]


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("a.jsonl", b"\xff\xfe{\x00", DataError, "UTF-16"),
        ("a.json", b'"text"', DataError, "not an array"),
        ("a.csv", b"a,a\n1,2\n", DataError, "same name"),
        ("a.unknown", b"x", UsageError, "--input-format"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole(
    tmp_path: Path, name: str, content: bytes, error: type[CorralError], words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(error) as raised:
        check_input(str(path), None, Recipe())
    assert words in raised.value.message + raised.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b'["one", 3, "x"]', "neither text nor an object"),
        ("a.json", b'["one", ', "nothing after it"),
        ("a.csv", b"prompt,b\none\n", "fewer cells"),
        ("a.csv", b"prompt\none,two\n", "more cells"),
        ("a.txt", b"ok\n\xff\n", "not UTF-8"),
        ("a.jsonl", b'{"promt":"x"}', "did you mean 'promt'"),
        ("a.jsonl", b'{"prompt":""}', "empty"),
        ("a.jsonl", b'{"prompt":"x","max_tokens":"many"}', "max_tokens must be a whole number"),
        ("a.jsonl", b'{"messages":[{"content":"x"}]}', "without a 'role'"),
    ],
)
def test_one_bad_row(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    problems = check_input(str(path), None, Recipe()).problems
    assert len(problems) == 1
    assert words in problems[0].text


def test_an_input_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(NotFoundError) as raised:
        open_source(str(tmp_path / "promts.jsonl"))
    assert "prompts.jsonl" in raised.value.remedy
    with pytest.raises(UsageError):
        open_source(str(tmp_path))


def test_an_empty_file_has_no_rows_and_no_problems(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    assert check_input(str(path), None, Recipe()).rows == 0


def test_templates_take_columns_and_say_what_is_missing() -> None:
    recipe = Recipe(kind=PLAIN, template="Sum up {{ text }} in {{n}} words")
    assert recipe.read(b'{"text":"it","n":3}', 1).body["prompt"] == "Sum up it in 3 words"
    with pytest.raises(DataError, match="did you mean 'txt'"):
        recipe.read(b'{"txt":"it","n":3}', 1)


def test_chat_system_parameters_and_ids() -> None:
    recipe = Recipe(kind=PLAIN, system="Be brief.", params={"temperature": 0, "max_tokens": 5})
    parsed = recipe.read(b'{"prompt":"Hi","max_tokens":9,"id":7,"label":"x"}', 1)
    assert parsed.id == "7"
    assert parsed.path == "/v1/chat/completions"
    assert parsed.body["max_tokens"] == 9  # the row wins
    assert [m["role"] for m in parsed.body["messages"]] == ["system", "user"]
    assert "label" not in parsed.body
    assert Recipe(kind=PLAIN).read(b'{"prompt":"Hi"}', 4).id == "row-4"
    with pytest.raises(DataError, match="id column"):
        Recipe(kind=PLAIN, id_column="key").read(b'{"prompt":"Hi"}', 4)


def test_csv_cells_become_numbers_only_where_they_are_parameters() -> None:
    parsed = Recipe(kind=PLAIN, text_cells=True).read(b'{"prompt":"5","max_tokens":"7","seed":""}', 1)
    assert parsed.body == {"prompt": "5", "max_tokens": 7}


def test_whole_requests_take_no_template() -> None:
    with pytest.raises(UsageError, match="whole requests"):
        Recipe(kind=OPENAI, template="x")


WRONG = {"temperature": 3, "top_p": 0, "max_tokens": 5.0, "n": True, "stop": "", "min_tokens": 99, "stream": True}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_parameters_are_refused_as_complete_refuses_them(name: str, value: object) -> None:
    wrong = {"max_tokens": 9, name: value}
    with pytest.raises(UsageError) as by_complete:
        request_fields({"extra": wrong})
    with pytest.raises(UsageError) as by_flag:
        Recipe(params=wrong)
    assert (by_flag.value.message, by_flag.value.remedy) == (by_complete.value.message, by_complete.value.remedy)
    body = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", **wrong}}
    for recipe, row in ((Recipe(kind=OPENAI), body), (Recipe(kind=PLAIN), {"prompt": "x", **wrong})):
        if name == "stream" and row is not body:
            continue  # a column of that name is data
        with pytest.raises(DataError) as by_row:
            recipe.read(json.dumps(row).encode(), 1)
        if name != "stream":
            assert by_row.value.message == f"{by_complete.value.message} {by_complete.value.remedy}".removesuffix(".")


def test_parameters_of_a_batch_take_the_form_that_the_path_needs() -> None:
    row = b'{"prompt":"x"}'
    for chat, wanted in ((True, {"logprobs": True, "top_logprobs": 2}), (False, {"logprobs": 2})):
        body = Recipe(kind=PLAIN, chat=chat, params={"logprobs": 2, "regex": "a+", "note": 1}).read(row, 1).body
        assert {name: body[name] for name in body if "logprobs" in name} == wanted
        assert (body["structured_outputs"], body["note"]) == ({"regex": "a+"}, 1)
    body = {"messages": [{"role": "user"}], "logprobs": True}
    whole = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    assert Recipe(kind=OPENAI).read(json.dumps(whole).encode(), 1).body["logprobs"] is True
    with pytest.raises(DataError, match="whole number"):
        Recipe(kind=PLAIN).read(b'{"prompt":"x","logprobs":true}', 1)
    assert Recipe(kind=PLAIN, params={"seed": 1}).read(b'{"prompt":"x","seed":null}', 1).body["seed"] == 1
    cells = b'{"prompt":"x","stop":"5","ignore_eos":"TRUE","n":""}'
    body = Recipe(kind=PLAIN, text_cells=True).read(cells, 1).body
    assert body == {"stop": ["5"], "ignore_eos": True, "prompt": "x", "max_tokens": 256}


def test_a_problem_of_many_rows_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 40 + '{"prompt": 5}\n')
    done = CliRunner().invoke(command, ["check", str(path)])
    assert isinstance(done.exception, DataError)
    first, second = done.output.splitlines()
    assert first.startswith("line 1 lacks 'prompt'")
    assert "--prompt-column" in first
    assert first.endswith("; 39 more rows too")
    assert second == "line 41 has a 'prompt' that is not text"
    every = json.loads(CliRunner().invoke(command, ["check", "--json", str(path)]).stdout)
    assert len(every["problems"]) == 41
    refused = CliRunner().invoke(command, ["check", str(path), "--temperature", "5"]).exception
    assert isinstance(refused, UsageError)
    refused = CliRunner().invoke(command, ["check", str(path), "--param", "stream=true"]).exception
    assert isinstance(refused, UsageError)


def test_problems_of_skipped_rows_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"a","id":"x"}\n{"no":1,"id":"y"}\n')
    folder = BatchFolder(tmp_path / "o.jsonl")
    folder.create()
    scanned = scan(open_source(str(path)), Recipe(), folder)
    scanned.problems.close()
    assert [(p.row, p.line, p.id) for p in read_problems(scanned.problems.path)] == [(1, 2, "y")]
    assert list(scanned.table.flags) == [0, 1]


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=20))
def test_any_text_survives_its_way_through_a_table(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    place = tmp_path_factory.mktemp("rows")
    path = place / "in.json"
    path.write_text(json.dumps(texts))
    assert prompts(path, place) == texts
    scanned = scan(open_source(str(path)), Recipe(), BatchFolder(place / "o.jsonl"))
    scanned.table.save(place / "index", {"digest": "d"})
    loaded = Table.load(place / "index")
    assert loaded is not None
    assert loaded[0].digest() == scanned.table.digest()


def test_a_row_that_changes_after_the_check_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"a"}\n')
    folder = BatchFolder(tmp_path / "o.jsonl")
    folder.create()
    table = scan(open_source(str(path)), Recipe(), folder).table
    path.write_text('{"prompt":"b"}\n')
    reader = RowReader(table)
    with pytest.raises(DataError, match="changed after it was checked"):
        reader.raw(0)
    reader.close()


def test_the_length_of_an_answer_is_the_same_as_for_one_prompt() -> None:
    from corral.use.llm.llm import request_for

    def sent(row: dict[str, Any], **recipe: Any) -> Any:
        return Recipe(kind=PLAIN, **recipe).read(json.dumps(row).encode(), 1).body.get("max_tokens")

    assert sent({"prompt": "one"}) == request_for("one", {})[1]["max_tokens"] == 256
    assert (
        sent({"prompt": "one", "min_tokens": 300}) == request_for("one", {"min_tokens": 300})[1]["max_tokens"] == 300
    )
    assert sent({"prompt": "one", "max_tokens": 4}, params={"max_tokens": 9}) == 4
    assert sent({"prompt": "one"}, params={"max_tokens": 9}) == 9
    assert sent({"prompt": "one"}, chat=True) is None  # a chat ends by itself
    whole = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "one"}}
    assert "max_tokens" not in Recipe(kind=OPENAI).read(json.dumps(whole).encode(), 1).body  # sent as it is


@pytest.mark.parametrize("verb", ["check", "run"])
def test_bad_rows_are_skipped_alike(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` ends as `run` would: 10 refuses the input, 1 has rows in the error file, 0 has none."""
    corral = in_process(capsys, "batch", verb)
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt":"a"}\n')
    bad.write_text('{"prompt":"a"}\n{"id":"x"}\n{"id":"x"}\n')
    with FakeServer(FakeOptions()) as server:
        for path, skip, code in ((good, [], 0), (good, ["--skip-bad"], 0), (bad, [], 10), (bad, ["--skip-bad"], 1)):
            output = tmp_path / f"{path.stem}{len(skip)}.out.jsonl"
            more = ["-o", str(output), "--url", server.url] if verb == "run" else []
            ended, _, err = corral(str(path), *skip, *more)
            assert ended == code, err
            if code == 10:
                assert "2 of 3 rows" in err
            elif verb == "run":
                errors = output.with_name(f"{output.stem}.errors.jsonl")
                assert (len(errors.read_text().splitlines()) if errors.exists() else 0) == 2 * code


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x", "max_token": 9},
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_token": 9}},
    ],
)
def test_a_misspelt_parameter_of_a_row_is_found_before_anything_is_sent(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(row) + "\n")
    found = CliRunner().invoke(command, ["check", str(path)], standalone_mode=False)
    assert found.exit_code
    assert "'max_token' (did you mean 'max_tokens'?)" in f"{found.output}{found.exception}"

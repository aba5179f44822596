"""`corral embed` and `corral rerank`, and batch rows whose answer is no completion, against the fake server."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from corral.base.errors import CorralError, DataError
from corral.cli import root
from corral.client.metrics import parse
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.fake.words import vector
from corral.use.batch.input.recipe import OPENAI, Recipe


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(max_model_len=64)) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def corral(*words: str) -> int:
    result = CliRunner().invoke(root, words, standalone_mode=False)
    if isinstance(result.exception, CorralError):
        return int(result.exception.exit_code)
    assert result.exception is None, result.exception
    return result.return_value or 0


def prompt_tokens(server: FakeServer) -> float:
    """What the server has read in all."""
    with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/metrics") as page:
        return parse(page.read(), 0.0).prompt_tokens or 0.0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_parquet_has_vectors_of_floats_in_the_order_of_the_input(server: FakeServer, place: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (place / "in.csv").write_text("id,text\n" + "".join(f"r{n},text number {n}\n" for n in range(50)))
    assert corral("embed", "in.csv", "-o", "out.parquet", "--ordered", "--url", server.url) == 0
    table = parquet.read_table(place / "out.parquet")
    assert str(table.schema.field("embedding").type) == "list<element: float>"
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(50)]
    assert rows[7]["embedding"] == vector("text number 7")
    assert rows[7]["prompt_tokens"] > 0


def test_a_text_that_is_too_long_fails_alone_and_the_same_command_continues(server: FakeServer, place: Path) -> None:
    texts = ["short", "word " * 500, "also short"]
    (place / "in.jsonl").write_text(
        "".join(json.dumps({"id": str(n), "text": t}) + "\n" for n, t in enumerate(texts))
    )
    command = ("embed", "in.jsonl", "-o", "out.jsonl", "--url", server.url)
    assert corral(*command) == 1
    assert {row["id"] for row in lines(place / "out.jsonl")} == {"0", "2"}
    failed = next(iter(place.glob("out*errors*.jsonl")))
    assert "maximum context length" in lines(failed)[0]["error"]["message"]
    before = prompt_tokens(server)
    assert corral(*command) == 1  # nothing is left to do
    assert prompt_tokens(server) == before > 0
    assert corral(*command, "--dimensions", "4") == 4  # other settings than at the start


def test_documents_are_ranked_row_by_row(server: FakeServer, place: Path) -> None:
    documents = ["cheese is made of milk", "Paris is the capital of France", "rain"]
    rows = [{"id": "a", "query": "the capital of France", "documents": documents},
            {"id": "b", "query": "milk and cheese", "documents": documents}]  # fmt: skip
    (place / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert corral("rerank", "in.jsonl", "-o", "out.jsonl", "--ordered", "--url", server.url, "--top-n", "2") == 0
    found = {row["id"]: row["ranking"] for row in lines(place / "out.jsonl")}
    assert [found["a"][0]["index"], found["b"][0]["index"]] == [1, 0]
    assert len(found["a"]) == 2


def test_rows_of_a_batch_may_ask_for_vectors_scores_and_rankings(server: FakeServer, place: Path) -> None:
    requests = {
        "/v1/embeddings": {"input": ["a", "b"]},
        "/v1/score": {"queries": "a", "documents": ["a", "b"]},
        "/v1/rerank": {"query": "a", "documents": ["b", "a"]},
        "/v1/completions": {"prompt": "a"},
    }
    rows = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in requests.items()]
    (place / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert corral("batch", "run", "in.jsonl", "-o", "out.jsonl", "--url", server.url) == 0
    found = {row["custom_id"]: row["response"]["body"] for row in lines(place / "out.jsonl")}
    assert [one["embedding"] for one in found["/v1/embeddings"]["data"]] == [vector("a"), vector("b")]
    assert found["/v1/score"]["data"][0]["score"] == 1
    assert found["/v1/rerank"]["results"][0]["index"] == 1
    assert found["/v1/completions"]["choices"]


@pytest.mark.parametrize(
    ("url", "body", "says"),
    [
        ("/v1/embeddings", {}, "'input'"),
        ("/v1/rerank", {"query": "a"}, "'documents'"),
        ("/v1/score", {"queries": "a"}, "'queries' and 'documents'"),
        ("/v1/responses", {"input": "a", "stream": True}, "stream"),
        ("/v1/other", {}, "must be one of"),
    ],
)
def test_a_request_that_lacks_what_its_path_needs_is_a_bad_row(url: str, body: dict[str, Any], says: str) -> None:
    row = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    with pytest.raises(DataError, match=says):
        Recipe(kind=OPENAI).read(json.dumps(row).encode(), 1)

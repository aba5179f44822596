"""A model that embeds instead of writing: ready after an embedding, then asked for vectors and for nearness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.conftest import FAST, Corral


@pytest.fixture(scope="module")
def server(corral: Corral, tiny_model: Path) -> Iterator[dict[str, Any]]:
    done = corral.run("up", str(tiny_model), "--name", "pooling", *FAST, "--json", "--", "--convert", "embed")
    yield json.loads(done.stdout)
    corral.run("down", "pooling", check=False)


def test_a_model_that_embeds_becomes_ready(corral: Corral, server: dict[str, Any]) -> None:
    status = corral.json("status", "pooling")
    assert (status["state"], status["task"]) == ("ready", "embed")
    assert server["first_answer"] == ""
    key = Path(server["endpoint"]["key_file"]).read_text().strip()
    with openai.OpenAI(base_url=server["endpoint"]["base_url"], api_key=key) as client:
        rows = client.embeddings.create(model=status["model"], input=["a", "b"]).data
    assert [len(row.embedding) for row in rows] == [128, 128]
    assert sum(number * number for number in rows[0].embedding) == pytest.approx(1, abs=1e-2)


def test_vectors_of_a_file_come_as_parquet_and_documents_are_ranked(
    corral: Corral, server: dict[str, Any], tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"id": str(n), "text": f"row {n}"}) + "\n" for n in range(9))
    )
    corral.run("embed", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.parquet"), "-d", "pooling", "--ordered")
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["id"], len(row["embedding"])) for row in rows] == [(str(n), 128) for n in range(9)]
    row = {"query": "row 1", "documents": ["another text", "row 1"]}
    (tmp_path / "rank.jsonl").write_text(json.dumps(row) + "\n")
    corral.run("rerank", str(tmp_path / "rank.jsonl"), "-o", str(tmp_path / "ranked.jsonl"), "-d", "pooling")
    ranking = json.loads((tmp_path / "ranked.jsonl").read_text())["ranking"]
    assert ranking[0]["index"] == 1
    assert ranking[0]["score"] == pytest.approx(1, abs=1e-2)

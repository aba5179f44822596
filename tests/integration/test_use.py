"""Tiny models that real vLLM serves: probabilities against transformers' logits, and `corral.up` in Python."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import corral as library
from corral.llm.llm import LLM
from tests.integration.conftest import Corral, free_port
from tests.integration.transformers_scores import planned_dtype, reference, rows
from tests.tiny_llama import make_tiny_llama


def worst_difference(llm: LLM, theirs: list[dict[str, Any]], rows: list[dict[str, str]]) -> float:
    """The largest difference of a token's log-probability; tokens and their number must be the same."""
    scores = llm.score(rows, per_token=True, prefix="none")
    assert not scores.bad
    worst = 0.0
    for ours, other in zip(scores, theirs, strict=True):
        assert [score.id for score in ours.token_scores] == other["tokens"]
        for score, value in zip(ours.token_scores, other["logprobs"], strict=True):
            worst = max(worst, abs(score.logprob - value))
        assert ours.sum_logprob == pytest.approx(sum(score.logprob for score in ours.token_scores), abs=1e-9)
    return worst


def quieten(model: Path, halvings: int = 6) -> Path:
    """Divide the last layer by a power of two, so that logits stay small.

    A bfloat16 has 8 bits: near 16 its steps are 0.06, and no two programs agree to less, whatever they compute.
    """
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    begin, end = json.loads(data[8 : 8 + length])["lm_head.weight"]["data_offsets"]
    part = memoryview(data)[8 + length + begin : 8 + length + end].cast("H")
    for at, value in enumerate(part):
        part[at] = value - (halvings << 7) if (value >> 7 & 0xFF) > halvings else 0
    del part
    path.write_bytes(data)
    return model


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_scores_are_those_of_transformers(corral: Corral, tmp_path: Path, stored: str) -> None:
    model = make_tiny_llama(tmp_path / "tiny", dtype=stored)
    if stored == "bfloat16":
        quieten(model)
    name = f"use-{stored}"
    document = corral.json("up", str(model), "--name", name, "--port", free_port(), "--set", "eager=true")
    dtype = planned_dtype(corral, name)
    try:
        with LLM(library.Endpoint(document["endpoint"]["base_url"], document["endpoint"]["model"],
                                  document["endpoint"]["key_file"])) as llm:  # fmt: skip
            worst = worst_difference(llm, reference(corral, model, dtype, rows()), rows())
        print(f"stored in {stored}, served in {dtype}: largest difference {worst:.2e}")
        assert worst < (1e-4 if dtype == "float32" else 1e-2)
    finally:
        corral.run("down", name)


@pytest.mark.filterwarnings(  # the agent is meant to outlive the process that starts it
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:subprocess .* is still running:ResourceWarning"
)
def test_up_in_python(corral: Corral, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "CORRAL_HOME"):
        monkeypatch.setenv(name, corral.env[name])
    port = int(free_port())
    with library.up(str(tiny_model), name="use-tiny", fixed={"eager": True}, port=port, quiet=True) as llm:
        assert llm.complete("a", max_tokens=3).text is not None
        with library.up(str(tiny_model), name="use-tiny", reuse=True, quiet=True) as same:
            assert same.endpoint == llm.endpoint
        assert llm.complete("b", max_tokens=3).usage  # leaving the reuser did not stop it
    assert corral.json("status", "use-tiny", check=False)["state"] == "stopped"

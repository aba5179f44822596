"""What transformers makes of the same model and texts: the scores that vLLM's are held against."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from corral.use.llm.llm import LLM
from tests.conftest import ROOT
from tests.integration.conftest import Corral

REFERENCE = ROOT / "tests" / "reference_scores.py"
PAIRS = [
    ("The capital of France is", " Paris, a city on the Seine."),
    ("The capital of France is ", "Paris"),
    ("Once upon a time\n\n", "there was a fox."),
    ("I love 🎉 in 東", "京都 and 鰻 🎊!"),
    ("Par", "is is big"),
    ("", "No context at all, but some words."),
    ("def f(x):\n    return", " x + 1  # one more\n"),
]


def reference(corral: Corral, model: Path, dtype: str, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    python = corral.engine / "bin" / "python"
    given = "".join(json.dumps(row) + "\n" for row in rows)
    done = subprocess.run(
        [python, REFERENCE, model, dtype], input=given, capture_output=True, text=True, timeout=300,
        env={**corral.env, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows() -> list[dict[str, str]]:
    return [{"id": str(n), "context": c, "continuation": t} for n, (c, t) in enumerate(PAIRS)]


def planned_dtype(home: Path, name: str) -> str:
    """What a deployment computes in: the format that this machine's CPU is quick in, unless it was fixed."""
    plan = json.loads((home / "deployments" / name / "plan.json").read_text())
    return {"bf16": "bfloat16", "fp32": "float32"}[plan["precision"]["compute"]]


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

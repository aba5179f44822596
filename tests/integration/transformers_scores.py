"""What transformers makes of the same model and texts: the scores that vLLM's are held against."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

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


def planned_dtype(corral: Corral, name: str) -> str:
    """What a deployment computes in: the format that this machine's CPU is quick in, unless it was fixed."""
    plan = json.loads((corral.home / "deployments" / name / "plan.json").read_text())
    return {"bf16": "bfloat16", "fp32": "float32"}[plan["precision"]["compute"]]

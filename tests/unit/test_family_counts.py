"""Families of models: what their configs count to, against the parameters of the models that transformers makes.

`benchmarks/family_counts.py` writes `tests/data/family_counts.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import UncountedError
from corral.plan.models.facts import facts_from_config

DATA = json.loads((Path(__file__).parents[1] / "data/family_counts.json").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = {row["family"]: row for row in DATA["families"]}
# families that vLLM serves and that are refused, and what is not understood
REFUSED = {
    "hrm_text": "num_layers_per_stack",
    "hy_v4": "hc_mult",
    "inkling_text": "hybrid_sliding",
    "whisper": "num_hidden_layers",
    "zamba2": "layers_block_type",
}


def differences(family: str) -> list[float]:
    """Of what is counted from what transformers has, as shares, for each config of the family."""
    rows = FAMILIES[family]["configs"]
    return [facts_from_config(config, family, family, "hub").parameters / n - 1 for config, n in rows]


@pytest.mark.parametrize("family", sorted(row["family"] for row in DATA["families"] if row["served"]))
def test_what_vllm_serves_is_counted_as_transformers_makes_it(family: str) -> None:
    if family in REFUSED:
        with pytest.raises(UncountedError, match=f"cannot be counted from its config: .*{REFUSED[family]}"):
            differences(family)
    else:
        assert max(map(abs, differences(family))) < 0.001


def test_no_family_is_counted_wrong() -> None:
    read = []
    for family in FAMILIES:
        try:
            assert max(map(abs, differences(family))) < 0.001, family
        except UncountedError:
            continue
        read.append(family)
    assert len(read) >= 108

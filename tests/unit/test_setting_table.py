"""A new setting of vLLM is one row of the table: everything else follows from it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from corral.base.errors import UsageError
from corral.deploy.lifecycle.decision import DeployRequest
from corral.engines.flags import shipped_flags
from corral.engines.settings import SETTINGS, Setting, VariedBy, boolean, read_back, vllm_defaults, whole
from corral.lab.tune.knobs import knobs_for
from corral.plan.choose import make_plan
from corral.plan.contract import EngineSettings, Goal, Plan
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import read_facts
from corral.plan.settings import parse_assignments


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = Setting(
        "partial_prefills", whole, "--max-num-partial-prefills", ("-mpp",), varied_by=VariedBy.TUNE, tries=("2", "4")
    )
    cascade = Setting("cascade", boolean, "--cascade-attn", unsaid=True, varied_by=VariedBy.TUNE)
    untuned = Setting("offload", whole, "--cpu-offload-gb")
    for row in (partial, cascade, untuned):
        monkeypatch.setitem(SETTINGS, row.name, row)


def planned(*assignments: str) -> Plan:
    facts = read_facts("llama-3.1-8b", offline=True)
    return make_plan(facts, parse_gpus("1xH200"), Goal(), parse_assignments(assignments))


@pytest.mark.usefixtures("rows")
def test_a_row_is_settable_and_becomes_a_flag(clean_home: Path) -> None:
    plan = planned("partial_prefills=3", "cascade=false", "offload=8")
    assert plan.fits
    words = list(plan.engine_args)
    assert words[words.index("--max-num-partial-prefills") + 1] == "3"
    assert words[words.index("--cpu-offload-gb") + 1] == "8"
    assert "--no-cascade-attn" in words
    assert "--cascade-attn" not in planned("cascade=true").engine_args  # vLLM's own default needs no flag
    with pytest.raises(UsageError, match="partial_prefills must be a whole number"):
        planned("partial_prefills=few")


@pytest.mark.usefixtures("rows")
def test_a_row_is_read_back_from_its_flags() -> None:
    read = read_back(["-mpp", "3", "--no-cascade-attn", "--cpu-offload-gb=8", "--other", "1"])
    assert read.fields == {"partial_prefills": "3", "cascade": "false", "offload": "8"}
    assert read.rest == ("--other", "1")


@pytest.mark.usefixtures("rows")
def test_a_row_is_tuned_if_it_says_so(clean_home: Path) -> None:
    request = DeployRequest("llama-3.1-8b")
    knobs = {knob.name: knob.values for knob in knobs_for(planned(), request, (), False, True)}
    assert knobs["partial_prefills"] == ("2", "4")
    assert knobs["cascade"] == ("false",)
    assert "offload" not in knobs
    fixed = {knob.name for knob in knobs_for(planned(), request, ("-mpp", "3"), False, True)}
    assert "partial_prefills" not in fixed
    assert "given partial_prefills" in fixed


def test_the_table_agrees_with_the_plan_and_with_vllm() -> None:
    known = shipped_flags()
    assert known is not None
    assert {row.flag for row in SETTINGS.values() if row.flag} <= set(known.takes_value)
    planned_fields = {field.name for field in fields(EngineSettings)}
    assert set(vllm_defaults(True, 1)) <= planned_fields
    assert all(row.varied_by is not VariedBy.TUNE or not row.changes_answers for row in SETTINGS.values())

"""The Plan view's backend: every number with its reason, refusals with what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from corral.base.errors import CorralError, NotFoundError, UsageError
from corral.console.context import real_number, whole_number
from corral.console.plans import FactCache, alternatives, plan_choices, plan_page, read_question


def planned(**given: str) -> dict[str, Any]:
    return plan_page(read_question(given, FactCache(lambda: 0.0)))


def test_a_plan_that_fits_explains_every_number() -> None:
    found = planned(model="llama-3.1-8b", kind="H100-SXM", count="1", concurrency="64", price="2.5")
    assert found["fits"]
    assert found["verdict"] == "fits"
    figures = {one["name"]: one for one in found["figures"]}
    assert {"split", "context", "KV cache", "one stream", "together", "first token", "load", "cost"} <= figures.keys()
    assert [name for name, one in figures.items() if not one["because"]] == []
    memory = found["memory"]
    assert [part["name"] for part in memory["parts"] if not part["because"]] == []
    assert sum(part["bytes"] for part in memory["parts"]) == pytest.approx(memory["budget_bytes"], rel=0.01)
    assert memory["budget_bytes"] < memory["total_bytes"]
    assert found["commands"]["up"].startswith("corral up llama-3.1-8b")
    assert found["commands"]["vllm"].startswith("vllm serve")


def test_a_refusal_says_why_and_what_would_fit() -> None:
    found = planned(model="llama-3.1-405b", kind="A100-80", count="1")
    assert not found["fits"]
    assert found["reason"]
    assert found["nearest"]
    assert found["commands"] is None
    used = sum(part["bytes"] for part in found["memory"]["parts"] if part["name"] != "KV cache")
    assert used > found["memory"]["budget_bytes"]


def test_a_broken_rule_shows_no_numbers() -> None:
    found = planned(model="llama-3.1-8b", kind="H100-SXM", context="10000000")
    assert found["verdict"] == "cannot run as asked"
    assert found["memory"] is None
    assert found["figures"] == []


def test_precision_and_context_are_taken_from_the_form() -> None:
    found = planned(model="llama-3.1-70b", kind="H100-SXM", count="2", nodes="2", weights="fp8", context="8192")
    figures = {one["name"]: one["value"] for one in found["figures"]}
    assert figures["weights"] == "fp8"
    assert figures["context"] == 8192
    assert "2 nodes" in found["hardware"]


def test_alternatives_are_listed_with_what_keeps_them_from_running() -> None:
    rows = alternatives(read_question({"model": "llama-3.1-70b", "kind": "H100-SXM", "count": "4"}, FactCache(float)))
    assert any(not row["problem"] for row in rows)
    assert any(row["problem"] for row in rows)
    running = [bool(row["problem"]) for row in rows]
    assert running == sorted(running)


@pytest.mark.parametrize("given", [
    {}, {"model": "no-such-model-at-all"}, {"model": "llama-3.1-8b", "kind": "H9000"},
    {"model": "llama-3.1-8b", "kind": "H100-SXM", "count": "many"}, {"model": "llama-3.1-8b", "context": "-1"},
    {"model": "llama-3.1-8b", "kind": "H100-SXM", "nodes": "0"}, {"model": "llama-3.1-8b", "weights": "int3"},
    {"model": "llama-3.1-8b", "goal": "money"}, {"model": "llama-3.1-8b", "price": "1e99"},
], ids=repr)  # fmt: skip
def test_bad_values_are_refused_with_a_remedy(given: dict[str, str]) -> None:
    with pytest.raises(CorralError) as caught:
        planned(**given)
    assert caught.value.remedy


def test_facts_are_read_again_when_they_are_old() -> None:
    now, reads = [0.0], []
    kept = FactCache(lambda: now[0])
    for at in (0.0, 59.0, 61.0):
        now[0] = at
        kept.get("x", lambda: reads.append(now[0]))
    assert reads == [0.0, 61.0]


def test_a_failed_read_is_not_kept() -> None:
    kept = FactCache(float)

    def fail() -> None:
        raise UsageError("no.", "")

    for _ in range(2):
        with pytest.raises(UsageError):
            kept.get("x", fail)


def test_the_engine_of_a_profile_chooses_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `corral plan --on` does: an older vLLM counts memory otherwise."""
    (tmp_path / "venv/lib/python3.12/site-packages/vllm-0.26.0.dist-info").mkdir(parents=True)
    profiles = tmp_path / "config/corral/profiles"
    profiles.mkdir(parents=True)
    (profiles / "old.toml").write_text(f'[runtime]\nname = "venv"\npath = "{tmp_path}/venv"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    asked = {"model": "llama-3.1-8b", "kind": "H200", "count": "1", "context": "8192"}

    def tokens(**more: str) -> float:
        found = planned(**asked, **more)
        return next(float(one["value"]) for one in found["figures"] if one["name"] == "KV cache")

    assert tokens(profile="old") == pytest.approx(919_824, rel=0.002)
    assert tokens() < 0.995 * tokens(profile="old")
    rows = alternatives(read_question({**asked, "profile": "old"}, FactCache(float)))
    assert tokens(profile="old") in [row["kv_tokens"] for row in rows]


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "²", "9" * 30, "0x10", "1_000", "201"])
def test_whole_numbers_of_a_query_are_checked_in_one_place(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        whole_number({"count": text}, "count", 1, 200)
    assert "count cannot be" in caught.value.message
    assert caught.value.remedy == "Give a whole number from 1 to 200."


def test_numbers_that_are_left_out_are_none() -> None:
    assert whole_number({"at": " "}, "at") is None
    assert whole_number({"at": " 007 "}, "at") == 7
    assert real_number({}, "price") is None
    for text in ("nan", "inf", "x"):
        with pytest.raises(UsageError):
            real_number({"price": text}, "price")


def test_the_form_offers_models_and_hardware() -> None:
    found = plan_choices(FactCache(float))
    assert "llama-3.1-8b" in found["models"]
    assert {"H100-SXM", "T4"} <= {kind["name"] for kind in found["kinds"]}
    assert found["here"]["label"]


def test_this_machine_without_a_gpu_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of a CPU machine's storage: the plan says so by leaving it out."""
    from corral.plan.hardware.inventory import Inventory

    here = Inventory(None, 1, 1, 8 << 30, cpu_cores=4, host_memory_bytes=16 << 30, host_available_bytes=8 << 30,
                     source="probed")  # fmt: skip
    monkeypatch.setattr("corral.console.plans.probe", lambda: here)
    found = planned(model="smollm2", goal="balanced")
    assert found["fits"]
    assert not found["memory"]["per_gpu"]
    assert [part["name"] for part in found["memory"]["parts"] if not part["because"]] == []
    assert [one["name"] for one in found["figures"] if not one["because"]] == []


def test_a_reader_cannot_tell_which_folders_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> NoReturn:
        raise NotFoundError(f"the hub has no {name!r}.", "Name another.")

    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("corral.plan.models.hub.read_repository", absent)
    for there, not_there in (
        (str(tmp_path / "here"), str(tmp_path / "gone")),
        ("here/model/", "gone/model/"),
        ("here/model", "gone/model"),
        ("./here", "./gone"),
        ("~", "~nobody"),
    ):
        told = set()
        for name in (there, not_there):
            with pytest.raises(NotFoundError) as refused:
                read_question({"model": name}, FactCache(float), read_only=True)
            told.add(refused.value.message.replace(repr(name), ""))
        assert len(told) == 1
    assert read_question({"model": "llama-3.1-8b", "kind": "H100-SXM"}, FactCache(float), read_only=True).facts

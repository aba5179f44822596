"""Several replicas: one engine or several servers, and why."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from corral.base.errors import UsageError
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import Inventory, parse_gpus
from corral.plan.models.facts import read_facts
from corral.plan.need import ReplicaForm, advise, divided
from tests.unit.conftest import in_process

DENSE = read_facts("llama-3.1-8b", offline=True)
EXPERTS = replace(DENSE, experts=8, experts_per_token=2)


def test_a_dense_model_gets_servers_of_its_own() -> None:
    advice = advise(DENSE, parse_gpus("8xH100"), Goal(concurrency=100), {}, None, 4)
    assert advice.form is ReplicaForm.SERVERS
    assert "dense" in advice.because
    assert advice.plan.inventory.gpus == 2
    assert advice.plan.parallel.data == 1
    assert advice.plan.goal.concurrency == 25


def test_experts_stay_in_one_engine_where_it_fits() -> None:
    advice = advise(EXPERTS, parse_gpus("8xH100"), Goal(), {}, None, 4)
    assert advice.form is ReplicaForm.ENGINE
    assert advice.plan.parallel.data == 4
    assert "8 experts" in advice.because
    assert advise(EXPERTS, Inventory(None, 1, 1, 0, 8, 64 << 30, 64 << 30), Goal(), {}, None, 2).form == "servers"


def test_hardware_is_divided_as_a_fleet_divides_it() -> None:
    assert divided(parse_gpus("8xH100x4"), 2).nodes == 2
    assert divided(parse_gpus("8xH100x4"), 8).gpus == 4
    assert divided(parse_gpus("8xH100"), 3).gpus == 2
    cpu = Inventory(None, 1, 1, 0, 8, 64 << 30, 32 << 30)
    assert (divided(cpu, 4).cpu_cores, divided(cpu, 4).host_available_bytes) == (2, 8 << 30)
    with pytest.raises(UsageError, match="a GPU belongs to one server"):
        divided(parse_gpus("2xH100"), 3)


def test_the_command_says_which_and_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = in_process(capsys, "plan", "llama-3.1-8b", "--offline", "--gpus", "8xH100")
    code, out, _ = run("--replicas", "4")
    assert code == 0
    assert out.startswith("4 servers behind one address, because it is a dense model")
    assert "corral up llama-3.1-8b --replicas 4" in out
    code, out, _ = run("--replicas", "4", "--json")
    assert json.loads(out)["form"] == "servers"
    code, _, err = run("--replicas", "9")
    assert code == 2
    assert "Ask for at most 8" in err

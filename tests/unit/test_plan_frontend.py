"""How many API server processes a plan asks for, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corral.plan.choose import make_plan
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import read_facts

FLAG = "--api-server-count"


def planned(model, gpus, cores=0, concurrency=None, **fixed):
    inventory = replace(parse_gpus(gpus), cpu_cores=cores)
    goal = Goal(concurrency=concurrency, prompt_tokens=128, output_tokens=128)
    return make_plan(read_facts(model), inventory, goal, fixed)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(0, 4), (2, 1), (4, 1), (8, 3), (16, 6), (192, 6)],
    ids=["nobody counted", "two", "four", "eight", "sixteen", "many"],
)
def test_as_many_as_the_gpu_needs_and_the_cores_allow(cores, expected):
    plan = planned("llama-3.1-8b", "1xH200", cores)
    assert plan.settings.api_servers == expected
    assert (FLAG in plan.engine_args) == (expected > 1)


def test_a_load_that_one_process_carries_gets_one():
    plan = planned("llama-3.1-8b", "1xH200", 16, concurrency=16)
    assert plan.settings.api_servers == 1
    assert FLAG not in plan.engine_args


def test_replicas_keep_the_engines_own_default():
    plan = planned("llama-3.1-8b", "8xH100", 192)
    assert plan.parallel.data == plan.settings.api_servers == 8
    assert FLAG not in plan.engine_args


def test_over_nodes_there_is_one():
    inventory = replace(parse_gpus("8xH100"), nodes=2, cpu_cores=192)
    plan = make_plan(read_facts("llama-3.1-405b"), inventory)
    assert plan.parallel.replica_gpus == 16
    assert plan.settings.api_servers == 1


def test_what_is_set_stays_and_has_its_reason():
    plan = planned("llama-3.1-8b", "1xH200", 16, api_servers=2)
    assert plan.engine_args[plan.engine_args.index(FLAG) + 1] == "2"
    (reason,) = [row for row in plan.reasons if row.field == "api_servers"]
    assert reason.because.startswith("as set; one process on 16 cores streams")

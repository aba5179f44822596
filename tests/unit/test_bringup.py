"""Choosing without being told: which model, which engine, which checkpoint."""

from __future__ import annotations

import types
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import DoesNotFitError, UsageError
from corral.deploy.launch.links import Node, Ports
from corral.deploy.lifecycle.decision import DeployRequest, decide
from corral.deploy.lifecycle.staging import Staging, bring_model
from corral.deploy.targets.base import AgentsStatus, ChosenPorts, NoOptions, Target
from corral.deploy.targets.ssh import SshOptions, SshTarget
from corral.plan.hardware import inventory as hardware
from corral.plan.hardware.survey import NodeFacts
from corral.plan.models.store import ModelSource
from tests.unit.conftest import Silent


class Folder:
    """A deployment that nobody stopped."""

    def __init__(self, path: Path) -> None:
        self.stop, self.record, self.staging = path / "stop", path / "record", path / "staging.jsonl"
        self.record.touch()


class Elsewhere(Target):
    """A target with the hardware it is given; nothing can be started on it."""

    name = "elsewhere"

    def __init__(self, gpus: str | None) -> None:
        super().__init__(NoOptions())
        cpu = hardware.Inventory(
            None, 1, 1, 0, cpu_cores=8, host_memory_bytes=64 << 30, host_available_bytes=60 << 30
        )
        self.hardware = hardware.parse_gpus(gpus) if gpus else cpu

    def nodes(self) -> tuple[Node, ...]:
        return (Node("node"),)

    def inventory(self) -> hardware.Inventory:
        return self.hardware

    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        return ChosenPorts(Ports(wanted or 8000))

    def start(self, spec: object, folder: object) -> None:
        raise AssertionError

    def agents(self, folder: object) -> AgentsStatus:
        return AgentsStatus(False)

    def stop(self, folder: object, launch_id: str, grace_s: float) -> bool:
        return True


@pytest.mark.parametrize(
    ("gpus", "model", "flavour"),
    [
        (None, "smollm2", "cpu"),
        ("1xL4", "llama-3.1-8b-instruct", "cuda"),
        ("4xH100", "llama-3.1-70b-instruct", "cuda"),
        ("8xH100", "llama-3.1-405b-instruct-fp8", "cuda"),
        ("8xH200", "llama-3.1-405b-instruct", "cuda"),
    ],
)
def test_the_largest_model_that_fits(gpus: str | None, model: str, flavour: str) -> None:
    decision = decide(DeployRequest(), Elsewhere(gpus))
    assert decision.source.name == model
    assert decision.flavour == flavour
    assert decision.plan.fits


def test_a_quantised_twin_is_served_under_the_name_that_was_asked_for() -> None:
    decision = decide(DeployRequest(model="llama-3.1-405b"), Elsewhere("8xH100"))
    assert decision.plan.precision.how == "checkpoint"
    assert decision.source.repo == decision.plan.checkpoint == "meta-llama/Llama-3.1-405B-FP8"
    assert decision.served_name == decision.name == "llama-3.1-405b"


def test_what_does_not_fit_is_refused_with_the_nearest_that_would() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        decide(DeployRequest(model="llama-3.1-405b"), Elsewhere("1xH100"))
    assert "does not fit" in caught.value.message
    assert "What would" in caught.value.remedy


def test_flavours() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        decide(DeployRequest(flavour="cuda"), Elsewhere(None))
    with pytest.raises(UsageError, match="no engine flavour"):
        decide(DeployRequest(flavour="tpu"), Elsewhere(None))


def test_a_target_has_at_most_a_dozen_members_to_write() -> None:
    assert Target.__abstractmethods__ == {
        "nodes", "inventory", "choose_ports", "start", "agents", "stop"
    }  # fmt: skip


class OverSsh(Elsewhere, SshTarget):
    """Hosts whose hardware is known without asking them."""

    found: str | None = None

    def __init__(self, *hosts: str) -> None:
        SshTarget.__init__(self, SshOptions(hosts, home="/home"))
        self.hardware = hardware.parse_gpus("8xH100x2")

    def facts(self) -> dict[str, NodeFacts]:
        return {}

    def find_model(self, source: ModelSource, least_bytes: int) -> str | None:
        return self.found


def test_a_model_of_the_hub_goes_straight_to_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = OverSsh("node00", "node01")
    decision = decide(DeployRequest(model="llama-3.1-405b"), target)
    staging = Staging(Silent(), Folder(tmp_path), {})  # type: ignore[arg-type]
    orders = []

    def pull(order: Any, report: Any, ssh: Any) -> Any:
        orders.append(order)
        return types.SimpleNamespace(failed=(), folder=order.to)

    monkeypatch.setattr("corral.deploy.transfer.pull.pull", pull)
    assert bring_model(decision, target, staging) == "/home/models/llama-3.1-405b"
    assert orders[0].hosts == target.chosen.hosts
    target.found = "/home/models/there"  # brought by an earlier `corral pull`: nothing moves
    assert bring_model(decision, target, staging) == "/home/models/there"
    assert len(orders) == 1

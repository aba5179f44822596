"""Choosing without being told: which model, which engine, which checkpoint."""

from __future__ import annotations

import types
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import DoesNotFitError, UsageError
from corral.deploy.launch.links import Node, Ports
from corral.deploy.lifecycle import bringup
from corral.deploy.lifecycle.staging import Staging
from corral.deploy.targets.base import AgentsStatus, ChosenPorts, Declared
from corral.plan.hardware import inventory as hardware
from tests.unit.conftest import Silent


class Folder:
    """A deployment that nobody stopped."""

    def __init__(self, path: Path) -> None:
        self.stop, self.record, self.staging = path / "stop", path / "record", path / "staging.jsonl"
        self.record.touch()


class Elsewhere(Declared):
    """A target with the hardware it is given; nothing can be started on it."""

    hosts: tuple[str, ...] = ()
    found: str | None = None

    name = "elsewhere"

    def __init__(self, gpus: str | None) -> None:
        cpu = hardware.Inventory(
            None, 1, 1, 0, cpu_cores=8, host_memory_bytes=64 << 30, host_available_bytes=60 << 30
        )
        self.hardware = hardware.parse_gpus(gpus) if gpus else cpu

    def options(self) -> dict[str, object]:
        return {}

    def prepare(self) -> list[str]:
        return []

    def nodes(self) -> tuple[Node, ...]:
        return (Node("node"),)

    def inventory(self) -> hardware.Inventory:
        return self.hardware

    def home(self) -> str:
        return "/home"

    def node_folder(self, folder: object, launch_id: str) -> Any:
        return folder

    def default_bind(self, expose: bool = False) -> str:
        return "127.0.0.1"

    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        return ChosenPorts(Ports(wanted or 8000))

    def base_url(self, bind: str, ports: Ports) -> str:
        return f"http://{bind}:{ports.serve}/v1"

    def place(self, path: object, progress: object) -> str:
        return str(path)

    def fetching_hosts(self) -> tuple[str, ...]:
        return self.hosts

    def find_model(self, name: str, repo: str, at_least_bytes: int) -> str | None:
        return self.found

    def verify(self, checks: object) -> None:
        pass

    def refresh(self, folder: object) -> None:
        pass

    def forward(self, folder: object) -> None:
        return None

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
    decision = bringup.decide(bringup.DeployRequest(), Elsewhere(gpus))
    assert decision.source.name == model
    assert decision.flavour == flavour
    assert decision.plan.fits


def test_a_quantised_twin_is_served_under_the_name_that_was_asked_for() -> None:
    decision = bringup.decide(bringup.DeployRequest(model="llama-3.1-405b"), Elsewhere("8xH100"))
    assert decision.plan.precision.how == "checkpoint"
    assert decision.source.repo == decision.plan.checkpoint == "meta-llama/Llama-3.1-405B-FP8"
    assert decision.served_name == decision.name == "llama-3.1-405b"


def test_what_does_not_fit_is_refused_with_the_nearest_that_would() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        bringup.decide(bringup.DeployRequest(model="llama-3.1-405b"), Elsewhere("1xH100"))
    assert "does not fit" in caught.value.message
    assert "What would" in caught.value.remedy


def test_flavours() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        bringup.decide(bringup.DeployRequest(flavour="cuda"), Elsewhere(None))
    with pytest.raises(UsageError, match="no engine flavour"):
        bringup.decide(bringup.DeployRequest(flavour="tpu"), Elsewhere(None))


def test_a_model_of_the_hub_goes_straight_to_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = Elsewhere("8xH100x2")
    target.hosts = ("node00", "node01")
    decision = bringup.decide(bringup.DeployRequest(model="llama-3.1-405b"), target)
    staging = Staging(Silent(), Folder(tmp_path), {})  # type: ignore[arg-type]
    orders = []

    def pull(order: Any, report: Any, ssh: Any) -> Any:
        orders.append(order)
        return types.SimpleNamespace(failed=(), folder=order.to)

    monkeypatch.setattr("corral.deploy.transfer.pull.pull", pull)
    assert bringup._bring_model(decision, target, staging) == "/home/models/llama-3.1-405b"
    assert orders[0].hosts == target.hosts
    target.found = "/home/models/there"  # brought by an earlier `corral pull`: nothing moves
    assert bringup._bring_model(decision, target, staging) == "/home/models/there"
    assert len(orders) == 1

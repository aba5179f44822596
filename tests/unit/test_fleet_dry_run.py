"""What `corral up --dry-run` shows: a summary; of a fleet, each member's own part of one machine."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.deploy.targets.local import LocalTarget
from corral.plan.hardware.inventory import Inventory, parse_gpus
from tests.tiny_llama import make_tiny_llama
from tests.unit.conftest import in_process
from tests.until import free_port

GIB = 1 << 30
CPU = Inventory(None, 1, 1, 0, 8, 32 * GIB, 30 * GIB)


def shown(
    found: Inventory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> list[Any]:
    """The members' launches on such a machine."""
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(LocalTarget, "inventory", lambda _: found)
    model = str(make_tiny_llama(tmp_path / "tiny"))
    run = in_process(
        capsys, "up", model, "--name", "herd", "--context", "128", "--replicas", "4", "--dry-run", "--json"
    )
    code, out, err = run()
    assert code == 0, err
    launches: list[Any] = json.loads(out)
    assert [one["deployment"] for one in launches] == [f"herd-{number}" for number in range(1, 5)]
    return launches


def test_members_on_one_machine_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(parse_gpus("8xH100"), host_memory_bytes=256 * GIB, host_available_bytes=250 * GIB, cpu_cores=64)
    launches = shown(machine, monkeypatch, tmp_path, capsys)
    seen = [one["ranks"][0]["env"]["CUDA_VISIBLE_DEVICES"] for one in launches]
    assert seen == ["0,1", "2,3", "4,5", "6,7"]
    assert len({one["base_url"] for one in launches}) == 4  # as their starts would take them, one after the other


def test_members_on_one_machine_have_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    launches = shown(CPU, monkeypatch, tmp_path, capsys)
    seen = [one["ranks"][0]["env"]["VLLM_CPU_OMP_THREADS_BIND"] for one in launches]
    assert seen == ["0,1", "2,3", "4,5", "6,7"]
    assert len({one["base_url"] for one in launches}) == 4  # as their starts would take them, one after the other


def test_a_dry_run_reads_as_a_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, plan, address, ports, files and command, in 80 columns but for paths; the whole launch as JSON."""
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(LocalTarget, "inventory", lambda _: CPU)
    model, port = str(make_tiny_llama(tmp_path / "tiny")), free_port()
    run = in_process(capsys, "up", model, "--name", "one", "--context", "128", "--port", str(port), "--dry-run")
    code, out, err = run("--env", "MY_TOKEN=hush-hush", "--", "--seed", "7")
    assert code == 0, err
    spec = json.loads(run("--json", "--env", "MY_TOKEN=hush-hush", "--", "--seed", "7")[1])
    rows = dict(re.findall(r"^  (\S[a-z ]{0,11}?) {2,}(\S.*)$", out, re.MULTILINE))
    assert rows["address"] == spec["base_url"] == f"http://127.0.0.1:{port}/v1"
    assert rows["ports"] == f"{port} for requests"
    assert rows["files"].startswith(str(tmp_path / "home"))
    assert {"model", "context", "memory", "engine", "runs on", "start"} <= rows.keys()
    assert shlex.join(spec["ranks"][0]["argv"]) in " ".join(out.split())
    assert "hush-hush" not in out
    assert not (tmp_path / "home" / "deployments").exists()


def test_a_dry_run_of_a_fleet_reads_as_a_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(LocalTarget, "inventory", lambda _: CPU)
    model = str(make_tiny_llama(tmp_path / "tiny"))
    code, out, err = in_process(capsys, "up", model, "--name", "herd", "--replicas", "2", "--dry-run")()
    assert code == 0, err
    assert out.startswith("herd-1: what would be started")
    assert "  herd-2       the same on" in out

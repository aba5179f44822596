"""GPU kinds, `--gpus` texts, and what this machine is."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from corral.base.errors import UsageError
from corral.plan.candidate import over_nodes
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Parallel
from corral.plan.hardware import inventory as hardware
from corral.plan.hardware.inventory import GPUS, LINKS, find_gpu, parse_gpus, probe
from corral.plan.hardware.probe import Seen, cpu_facts, gpu_facts
from corral.plan.models.facts import read_facts


@pytest.mark.parametrize(
    ("text", "kind", "inside", "nodes"),
    [
        ("8xH100", "H100-SXM", 8, 1),
        ("H100", "H100-SXM", 1, 1),
        ("8xH100x2", "H100-SXM", 8, 2),
        (" 4 x a100-80gb ", "A100-80", 4, 1),
        ("2×L40S", "L40S", 2, 1),
        ("RTX4090", "RTX-4090", 1, 1),
        ("4xRTX-4090", "RTX-4090", 4, 1),
        ("4xrtx 5090x3", "RTX-5090", 4, 3),
        ("8xMI300X", "MI300X", 8, 1),
        ("8xNVIDIA H100 80GB HBM3", "H100-SXM", 8, 1),
        ("1xTesla V100-SXM2-32GB", "V100-32", 1, 1),
    ],
)
def test_gpus_are_read(text, kind, inside, nodes):
    inventory = parse_gpus(text)
    assert (inventory.gpu, inventory.gpus_per_node, inventory.nodes) == (kind, inside, nodes)
    assert inventory.memory_bytes_per_gpu == GPUS[kind].memory_bytes


@pytest.mark.parametrize(
    ("text", "nodes", "words"),
    [
        ("-8xH100", None, "-8 is not a possible number of GPUs"),
        ("0xH100", None, "0 is not a possible number of GPUs"),
        ("8xH100", 0, "0 is not a possible number of nodes"),
        ("8xH100", -2, "-2 is not a possible number of nodes"),
        ("8xH100x2", 3, "says 2 nodes and --nodes says 3"),
        ("8xH1000", None, "'H1000' is not a kind of GPU"),
        ("8xBanana", None, "'Banana' is not a kind of GPU"),
        ("8", None, "does not name GPUs"),
        ("", None, "does not name GPUs"),
        ("8x", None, "does not name GPUs"),
        ("1000000xH100", None, "1000000 is not a possible number"),
    ],
)
def test_bad_gpus_get_one_sentence(text, nodes, words):
    with pytest.raises(UsageError) as caught:
        parse_gpus(text, nodes)
    assert words in caught.value.message
    assert caught.value.remedy


def test_unknown_kind_is_answered_with_known_ones():
    with pytest.raises(UsageError) as caught:
        find_gpu("H10O")
    assert "H100-SXM" in caught.value.remedy


def test_unknown_link():
    with pytest.raises(UsageError, match="not a link"):
        parse_gpus("8xH100", 2, "string")
    assert parse_gpus("8xH100", 2, "ib-hdr").link == "ib-hdr"
    assert all(link.gb_s_per_gpu > 0 and link.latency_s > 0 for link in LINKS.values())


def test_table_is_sane():
    for gpu in GPUS.values():
        assert 10 < gpu.memory_gib < 300
        assert gpu.bandwidth_gb_s > 250
        assert gpu.box_gb >= gpu.memory_gib
        assert gpu.fp8_tflops in (0, pytest.approx(2 * gpu.bf16_tflops, rel=0.03))
        assert all(name == name.lower() for name in gpu.driver_names)
        assert find_gpu(gpu.kind) is gpu
        assert all(find_gpu(name) is gpu for name in gpu.driver_names)


@pytest.mark.parametrize(
    ("kind", "box"),
    [("H100-SXM", 80), ("H100-NVL", 94), ("H20", 96), ("H200", 141), ("GH200-144", 144), ("B200", 192), ("B300", 288),
     ("MI300X", 192), ("MI325X", 256), ("T4", 16), ("RTX-PRO-6000", 96), ("A10", 24), ("L40S", 48)],
)  # fmt: skip
def test_size_on_the_box(kind, box):
    assert GPUS[kind].box_gb == box


def test_nvlink_joins_the_nodes_of_a_rack():
    trays = parse_gpus("4xGB200", nodes=2)
    assert trays.joined == 8
    assert not over_nodes(Parallel(8), trays)
    assert parse_gpus("4xGB200", nodes=36).joined == 72
    assert over_nodes(Parallel(16), parse_gpus("8xB200", nodes=2))


def test_tensor_ranks_of_a_rack_do_not_wait_for_the_network():
    model = read_facts("llama-3.1-405b")

    def one_stream(gpus):
        return make_plan(model, parse_gpus(gpus, nodes=2), Goal(), {"tensor": 8}).speed.decode_tokens_per_s or 0.0

    assert one_stream("4xGB200") > 1.1 * one_stream("4xB200") > 0


def _root(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def test_memory_without_limits(tmp_path):
    _, total, available = cpu_facts(_root(tmp_path, {"proc/meminfo": MEMINFO}))
    assert (total, available) == (16_000_000 << 10, 8_000_000 << 10)


def test_cgroup_limits_apply(tmp_path):
    files = {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": str(4 << 30),
             "sys/fs/cgroup/memory.current": str(1 << 30), "sys/fs/cgroup/cpu.max": "150000 100000"}  # fmt: skip
    cores, total, available = cpu_facts(_root(tmp_path, files))
    assert (total, available) == (4 << 30, 3 << 30)
    assert cores == min(2, len(os.sched_getaffinity(0)))


def test_unlimited_cgroup_is_no_limit(tmp_path):
    files = {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}
    assert cpu_facts(_root(tmp_path, files | {"sys/fs/cgroup/cpu.max": "max 100000"}))[1] == 16_000_000 << 10


def test_smi_is_read_and_visible_devices_count(monkeypatch):
    rows = "NVIDIA H100 80GB HBM3, 81559, 560.35\n" * 4
    monkeypatch.setattr("corral.plan.hardware.probe.shutil.which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("corral.plan.hardware.probe._from_nvml", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0, stdout=rows))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (gpu_facts() or Seen("", 0, 0, "")).count == 4
    inventory = probe()
    assert (inventory.gpu, inventory.gpus_per_node) == ("H100-SXM", 4)
    assert inventory.memory_bytes_per_gpu == GPUS["H100-SXM"].memory_bytes  # what CUDA reports, not NVML
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert (gpu_facts() or Seen("", 0, 0, "")).count == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_facts() is None


@pytest.mark.parametrize("outcome", [SimpleNamespace(returncode=9, stdout=""), OSError("no"),
                                     SimpleNamespace(returncode=0, stdout="garbage\n")])  # fmt: skip
def test_broken_smi_means_no_gpu(monkeypatch, outcome):
    def run(*args, **kwargs):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("corral.plan.hardware.probe.shutil.which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("corral.plan.hardware.probe._from_nvml", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_facts() is None


def test_gpu_outside_the_table_keeps_its_name_and_memory(monkeypatch):
    monkeypatch.setattr("corral.plan.hardware.probe.gpu_facts", lambda: Seen("NVIDIA Z9000", 2, 50 << 30, "999"))
    inventory = hardware.probe()
    assert (inventory.gpu, inventory.gpus_per_node, inventory.memory_bytes_per_gpu) == ("NVIDIA Z9000", 2, 50 << 30)
    assert inventory.kind is None


def test_machine_without_gpu(monkeypatch):
    monkeypatch.setattr("corral.plan.hardware.probe.gpu_facts", lambda: None)
    inventory = hardware.probe()
    assert inventory.gpu is None
    assert inventory.cpu_cores >= 1
    assert 0 < inventory.host_available_bytes <= inventory.host_memory_bytes

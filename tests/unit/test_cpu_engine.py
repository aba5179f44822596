"""The CPU engine's launcher without an engine: which OpenMP library, which cores, which environment."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ENGINE_SIDE = Path(__file__).parent.parent.parent / "src" / "corral" / "engines" / "engine_side"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of the package as the engine's environment would."""
    monkeypatch.syspath_prepend(str(ENGINE_SIDE))
    yield lambda name: importlib.import_module(f"corral_cpu_engine.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "corral_cpu_engine"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("machine", "intel", "gnu", "wanted", "chosen"),
    [
        ("x86_64", "/i", "/g", "", ("intel", "/i")),
        ("x86_64", None, "/g", "", "no libiomp5.so"),
        ("x86_64", "/i", "/g", "gnu", ("gnu", "/g")),
        ("x86_64", "/i", None, "gnu", "no gnu OpenMP"),
        ("aarch64", None, "/g", "", ("gnu", "/g")),
        ("aarch64", "/i", "/g", "intel", ("intel", "/i")),
        ("aarch64", None, None, "", "no libgomp.so"),
        ("riscv64", None, "/g", "", "not Linux on x86-64 or AArch64"),
        ("x86_64", "/i", "/g", "llvm", "neither intel nor gnu"),
    ],
)
def test_the_library_is_the_one_its_wheels_bring(
    engine: Any, machine: str, intel: str | None, gnu: str | None, wanted: str, chosen: tuple[str, str] | str
) -> None:
    found = engine("openmp").choose(machine, intel, gnu, wanted)
    assert (found.kind, found.path) == chosen if isinstance(chosen, tuple) else chosen in found


@pytest.mark.parametrize("place", ["torch.libs/libgomp-a49a47f9.so.1.0.0", "torch/lib/libgomp.so.1"])
def test_torchs_own_library_is_found_in_either_place(engine: Any, place: str, tmp_path: Path) -> None:
    assert engine("openmp").find_gnu(str(tmp_path)) is None
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).touch()
    assert engine("openmp").find_gnu(str(tmp_path)) == str(tmp_path / place)


def test_gnus_threads_are_bound_before_it_is_loaded(engine: Any) -> None:
    openmp = engine("openmp")
    gnu, intel = openmp.OpenMP("gnu", "/t/libgomp.so.1"), openmp.OpenMP("intel", "/t/libiomp5.so")
    env = openmp.environment(gnu, {"LD_PRELOAD": "/x/libtcmalloc.so"}, "0-3,8")
    assert env["LD_PRELOAD"] == "/t/libgomp.so.1:/x/libtcmalloc.so"
    assert (env["GOMP_CPU_AFFINITY"], env["OMP_NUM_THREADS"]) == ("0-3 8", "1")
    env = openmp.environment(intel, {}, "0-3,8")
    assert env == {"LD_PRELOAD": "/t/libiomp5.so", "OMP_NUM_THREADS": "1"}  # it reads its cores after the fork
    assert "GOMP_CPU_AFFINITY" not in openmp.environment(gnu, {}, "auto")


@pytest.mark.parametrize("present", ["/usr/lib/libiomp5.so", "/usr/lib/libomp.so", "/usr/lib/libgomp.so.1"])
def test_an_openmp_the_user_loads_is_left_alone(engine: Any, present: str) -> None:
    openmp = engine("openmp")
    assert "LD_PRELOAD" not in openmp.environment(openmp.OpenMP("gnu", "/t/libgomp.so"), {"LD_PRELOAD": present}, "0")


def test_the_server_gets_its_cores_back(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    openmp, before = engine("openmp"), os.sched_getaffinity(0)
    for name, value in openmp.environment(openmp.OpenMP("gnu", "/t/libgomp.so.1"), {}, "0").items():
        monkeypatch.setenv(name, value)
    try:
        os.sched_setaffinity(0, {min(before)})  # what the library does when it is loaded
        openmp.unbind()
        assert os.sched_getaffinity(0) == before
        assert "GOMP_CPU_AFFINITY" not in os.environ
        os.sched_setaffinity(0, {min(before)})
        openmp.unbind()  # nothing to give back: nothing happens
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_all_cores_of_a_small_machine_and_one_left_free_on_a_large_one(engine: Any) -> None:
    openmp = engine("openmp")

    def machine(count: int, threads: int = 1, nodes: int = 1) -> list[Any]:
        each = count // nodes
        return [
            openmp.Cpu(core + count * thread, f"c{core}", core // each)
            for thread in range(threads)
            for core in range(count)
        ]

    assert openmp.small_machine(machine(2)) == "0,1"
    assert openmp.small_machine(machine(2, threads=2)) == "2,3"  # one thread of each core
    assert openmp.small_machine(machine(4)) == "0,1,2,3"
    assert openmp.small_machine(machine(8)) is None
    assert openmp.small_machine(machine(4, nodes=2)) is None
    assert openmp.first_node(machine(8)) == "0,1,2,3,4,5,6"
    assert openmp.first_node(machine(8, nodes=2)) == "0,1,2"
    assert openmp.first_node(machine(1)) == "0"
    nothing: tuple[Any, ...] = (None, [])
    for unknown in nothing:
        assert openmp.small_machine(unknown) is None
        assert openmp.first_node(unknown) is None


def test_the_launcher_spells_out_cores_only_where_it_must(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, openmp = engine("launch"), engine("openmp")
    large = [openmp.Cpu(number, str(number), 0) for number in range(8)]
    monkeypatch.setattr(openmp, "allowed_cpus", lambda: large)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert launch.bound_cores(openmp.OpenMP("intel", "/i")) == "auto"
    assert launch.bound_cores(openmp.OpenMP("gnu", "/g")) == "0,1,2,3,4,5,6"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "2-3")
    assert launch.bound_cores(openmp.OpenMP("gnu", "/g")) == "2-3"
    env = launch.fork_environment(openmp.OpenMP("gnu", "/g/libgomp.so.1"))
    assert env["GOMP_CPU_AFFINITY"] == env["VLLM_CPU_OMP_THREADS_BIND"] == "2-3"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_the_measure_runs_with_the_engines_threads(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, openmp = engine("measure"), engine("openmp")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-2,5")
    env = measure.environment(openmp.OpenMP("intel", "/i/libiomp5.so"))
    assert env["OMP_NUM_THREADS"] == "4"
    assert env["KMP_AFFINITY"].endswith("proclist=[0,1,2,5]")
    env = measure.environment(openmp.OpenMP("gnu", "/g/libgomp.so.1"))
    assert (env["OMP_NUM_THREADS"], env["GOMP_CPU_AFFINITY"]) == ("4", "0-2 5")

"""The engines' locks: every platform and Python, every file by its hash."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from corral.base.errors import EngineError, UsageError
from corral.engines import locks
from tests.unit.conftest import Corral


def test_both_engines_are_locked_on_both_architectures_for_three_pythons() -> None:
    rows = locks.locked()
    every = {(f, a, p) for f in locks.FLAVOURS for a in ("x86_64", "aarch64") for p in ("3.11", "3.12", "3.13")}
    assert {(row.flavour, row.platform, row.python) for row in rows} == every
    assert not [row for row in rows if row.missing]


def test_a_lock_that_changed_since_it_was_checked_counts_as_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = locks.lock_text
    monkeypatch.setattr(locks, "lock_text", lambda flavour: real(flavour) + ("#" if flavour == "cpu" else ""))
    assert {row.flavour for row in locks.locked()} == {"cuda"}


@pytest.mark.parametrize("flavour", locks.FLAVOURS)
def test_every_package_has_hashes(flavour: str) -> None:
    entries = locks.lock_text(flavour).replace("\\\n", " ").splitlines()
    assert len(entries) > 100
    for entry in entries:
        assert re.search(r"==\S+.*--hash=sha256:[0-9a-f]{64}", entry), entry


def test_lm_eval_is_locked_without_pytorch() -> None:
    entries = locks.lock_text(locks.HARNESS).replace("\\\n", " ").splitlines()
    assert f"lm-eval=={locks.VERSIONS[locks.HARNESS]} " in "\n".join(entries)
    for entry in entries:
        assert re.search(r"==\S+.*--hash=sha256:[0-9a-f]{64}", entry), entry
        assert not entry.startswith(("torch", "transformers", "nvidia"))


def test_an_engine_nobody_locked_is_answered_with_those_that_are() -> None:
    for flavour, version in (("rocm", "0.32.0"), ("cpu", "0.1.0"), ("../x", "1")):
        with pytest.raises(UsageError, match="there is no engine"):
            locks.lock_text(flavour, version)


@pytest.mark.parametrize("platform", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_torchs_cpu_wheel_is_locked_by_file(platform: str, python: str) -> None:
    line = locks.torch_cpu().lock_for(platform, python)
    assert re.fullmatch(r"torch==2\.13\.0\+cpu --hash=sha256:[0-9a-f]{64}\n", line)
    digest = line.strip().rpartition(":")[2]
    (file,) = [file for file, value in locks.torch_cpu().sha256.items() if value == digest]
    assert platform in file
    assert f"cp{python.replace('.', '')}-" in file


def test_an_unlocked_torch_is_refused_with_what_is_locked() -> None:
    for platform, python in (("ppc64le", "3.11"), ("x86_64", "3.10")):
        with pytest.raises(EngineError, match="not locked") as caught:
            locks.torch_cpu().lock_for(platform, python)
        assert "3.11, 3.12, 3.13, 3.14" in caught.value.remedy


def test_engine_check_tells_what_is_locked_without_an_engine(corral: Corral, tmp_path: object) -> None:
    done = corral("engine", "check", CORRAL_HOME=str(tmp_path))
    assert done.code == 0, done.err
    assert "No engine is installed" in done.out
    assert re.search(r"cuda-0\.32\.0 +aarch64 +3\.12", done.out)
    told = corral("engine", "check", "--json", CORRAL_HOME=str(tmp_path)).json()
    for flavour in locks.FLAVOURS:
        for platform in ("x86_64", "aarch64"):
            pythons = {
                row["python"] for row in told["locked"] if (row["flavour"], row["platform"]) == (flavour, platform)
            }
            assert {"3.11", "3.12", "3.13"} <= pythons, (flavour, platform)
    assert "vllm" not in told


def python_with_pip(path: Path, code: int) -> str:
    path.write_text(f"#!/bin/sh\necho \"global.find-links='/opt/wheels'\"\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_the_sources_of_packages_are_found_without_a_pip_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`uv tool install` makes environments without pip; there may be one below."""
    monkeypatch.setattr(sys, "executable", python_with_pip(tmp_path / "own", 1))
    monkeypatch.setattr(sys, "_base_executable", python_with_pip(tmp_path / "below", 0), raising=False)
    assert locks.read_sources.__wrapped__().find_links == ("/opt/wheels",)
    python_with_pip(tmp_path / "below", 1)
    monkeypatch.setenv("PIP_FIND_LINKS", "/mnt/wheels")
    assert locks.read_sources.__wrapped__().find_links == ("/mnt/wheels",)

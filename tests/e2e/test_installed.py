"""Corral as a user installs it: a wheel built from the checkout, in an environment that has nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import corral
from tests.conftest import ROOT

UV = (sys.executable, "-m", "uv")
VERSIONS = "import corral as c, importlib.metadata as m; print(m.version('corral-llm'), c.__version__, c.__file__)"


def run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    run(*UV, "build", "--quiet", "--wheel", "--out-dir", place, ROOT)
    (built,) = place.glob("*.whl")
    return built


def test_the_wheel_has_the_distributions_name_and_all_data(wheel: Path) -> None:
    assert wheel.name.startswith(f"corral_llm-{corral.__version__}-")
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = {path.relative_to(source).as_posix() for path in (source / "corral").rglob("*") if path.is_file()}
    assert {name for name in wanted if "__pycache__" not in name} <= packed


def test_a_clean_environment_has_the_command(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    run(*UV, "venv", "--quiet", "--python", sys.executable, home)
    run(*UV, "pip", "install", "--quiet", "--python", home / "bin" / "python", wheel)
    assert run(home / "bin" / "corral", "--version") == f"corral {corral.__version__}\n"
    dist, module, file = run(home / "bin" / "python", "-I", "-c", VERSIONS).split()
    assert dist == module == corral.__version__
    assert Path(file).is_relative_to(home)
    assert "llama-3.1-405b" in run(home / "bin" / "corral", "models", "--all")


def test_as_a_tool_from_the_checkout(tmp_path: Path) -> None:
    """`uv tool install .`, as the README says."""
    env = ("env", f"UV_TOOL_DIR={tmp_path}/tools", f"UV_TOOL_BIN_DIR={tmp_path}/bin")
    run(*env, *UV, "tool", "install", "--quiet", "--python", sys.executable, ROOT)
    assert run(tmp_path / "bin" / "corral", "--version") == f"corral {corral.__version__}\n"

"""What travels: a file as it is; a package as one file that a plain Python runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from corral.bundle import bundle

SOURCE = Path(__file__).parent.parent.parent / "src" / "corral"
PACKAGES = ["node/agent", "node/courier"]


def run(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "bundled.py").write_text(text)
    command = [sys.executable, "-I", str(folder / "bundled.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=30)


def test_a_file_travels_as_it_is() -> None:
    assert bundle("node/guard.py") == (SOURCE / "node" / "guard.py").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_part_arrives_unchanged(package: str) -> None:
    found = {}
    for node in ast.parse(bundle(package), feature_version=(3, 8)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            found[ast.literal_eval(node.targets[0].slice)] = ast.literal_eval(node.value)
    name = f"corral_{Path(package).name}"
    sources = {path.stem: path.read_text() for path in (SOURCE / package).glob("*.py")}
    assert found == {name if stem == "__init__" else f"{name}.{stem}": text for stem, text in sources.items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_it_runs_alone_and_leaves_nothing(package: str, tmp_path: Path) -> None:
    done = run(bundle(package), tmp_path, "nonsense", "and", "more")
    assert done.returncode == 2, done.stderr
    assert not done.stderr.startswith("Traceback")
    assert [path.name for path in tmp_path.iterdir()] == ["bundled.py"]


def test_a_failure_shows_the_line_of_its_part(tmp_path: Path) -> None:
    done = run(bundle("node/agent"), tmp_path, "run", "absent.json")
    assert "corral_agent/keeper.py" in done.stderr
    assert "FileNotFoundError" in done.stderr

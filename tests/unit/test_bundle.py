"""What travels: a file as it is; a package as one file that a plain Python runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from corral.base import bundle as bundling
from corral.base.bundle import bundle

SOURCE = Path(__file__).parent.parent.parent / "src" / "corral"
PACKAGES = ["node/agent", "node/courier"]
BUNDLES = [*PACKAGES, "node/survey", "node/remote.py", "node/slurm_start.py", "node/ray_rank.py"]


def run(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "bundled.py").write_text(text)
    command = [sys.executable, "-I", str(folder / "bundled.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)


def sources(text: str) -> dict[str, str]:
    found = {}
    for node in ast.parse(text, feature_version=(3, 8)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            found[ast.literal_eval(node.targets[0].slice)] = ast.literal_eval(node.value)
    return found


@pytest.mark.parametrize("resource", ["node/guard.py", "node/versions.py", "engines/engine_side/list_flags.py"])
def test_a_file_that_needs_no_other_travels_as_it_is(resource: str) -> None:
    assert bundle(resource) == (SOURCE / resource).read_text()


@pytest.mark.parametrize("resource", BUNDLES)
def test_every_part_arrives_unchanged_and_no_other_part(resource: str) -> None:
    found = sources(bundle(resource))
    for name, text in found.items():
        path = SOURCE / "node" / "/".join(name.split(".")[1:])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.read_text() == text
    if (SOURCE / resource).is_dir():
        own = {path.stem for path in (SOURCE / resource).glob("*.py")} - {"__init__"}
        prefix = f"corral_node.{Path(resource).name}"
        assert {name for name in found if name.startswith(f"{prefix}.")} == {f"{prefix}.{stem}" for stem in own}
    others = {Path(other).stem for other in BUNDLES} - {Path(resource).stem}
    assert not [name for name in found if name.split(".")[1:2] and name.split(".")[1] in others]


@pytest.mark.parametrize("package", PACKAGES)
def test_it_runs_alone_and_leaves_nothing(package: str, tmp_path: Path) -> None:
    done = run(bundle(package), tmp_path, "nonsense", "and", "more")
    assert done.returncode == 2, done.stderr
    assert not done.stderr.startswith("Traceback")
    assert [path.name for path in tmp_path.iterdir()] == ["bundled.py"]


def test_a_failure_shows_the_line_of_its_part(tmp_path: Path) -> None:
    done = run(bundle("node/agent"), tmp_path, "run", "absent.json")
    assert "corral_node/agent/__main__.py" in done.stderr
    assert "FileNotFoundError" in done.stderr


def test_the_imports_that_travel_are_those_that_python_reads() -> None:
    """Read as text when it is bundled; held here against Python's own reading."""
    for name, file in bundling._files().items():
        package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        wanted = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
                wanted |= {base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)}
        assert set(bundling._imported(name)) == wanted & bundling._files().keys(), name


def test_many_hosts_are_served_at_once() -> None:
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda _: bundling.bundle.__wrapped__("node/agent"), range(64)))
    assert len(set(texts)) == 1

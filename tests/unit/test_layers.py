"""A module imports only from rows below its own; the node's files import nothing of corral."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "src" / "corral"

# row -> modules; a module may import from its own row or lower ones
ROWS: list[list[str]] = [
    ["errors", "record", "state", "home", "processes", "interruption", "files", "events", "shell", "ssh", "folder",
     "profile", "bundle", "pip_configuration", "engine_flags", "endpoint", "architecture", "catalogue", "hub",
     "weights", "model", "hardware", "probe", "fake", "alarm", "request_errors", "reply", "wire", "pool"],
    ["slurm", "plan", "engines", "diagnosis", "survey", "fabric", "couriers", "transfer_plan",
     "spread"],
    ["runtimes", "links", "launch", "mirror", "model_store"],
    ["targets"],
    ["deployment", "chain", "tunnel", "client", "resolve"],
    ["bringup", "keep", "doctor", "pull", "proxy",
     "batch", "bench", "sampling", "fanout", "engine_metrics", "token_bytes", "token_view", "likelihood",
     "score", "score_job", "row_files", "llm", "session", "conversation", "top"],
    ["report"],
    ["cli", "__main__", "__init__"],
]  # fmt: skip
STANDALONE = ["node", "engine_side"]


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """First names below `corral` that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            parts = node.module.split(".")
            if parts[0] == "corral":
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("corral.")}
    return found


def row_of(name: str) -> int:
    for number, row in enumerate(ROWS):
        if name in row:
            return number
    raise AssertionError(f"{name} has no row: add it to ROWS where it belongs")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    top = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if top in STANDALONE:
        assert not imported(path), f"{path.name} runs without corral"
        return
    for name in imported(path):
        if name == "__version__":
            continue
        assert row_of(name) <= row_of(top), f"{top} (row {row_of(top)}) imports {name} (row {row_of(name)})"


def test_targets_do_not_import_each_other() -> None:
    for path in (SOURCE / "targets").glob("*.py"):
        text = path.read_text()
        others = [
            other.stem
            for other in (SOURCE / "targets").glob("*.py")
            if other.stem not in ("base", "__init__", path.stem)
        ]
        assert not any(f"corral.targets.{other} " in text for other in others)


NODE_FILES = sorted((SOURCE / "node").rglob("*.py"))


@pytest.mark.parametrize("path", NODE_FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_nodes_files_need_only_the_standard_library(path: Path) -> None:
    package = path.parent != SOURCE / "node"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert package, "only the parts of a package travel together"
            assert node.level == 1, "a package travels without what is above it"
            assert not node.module or (path.parent / f"{node.module}.py").is_file()
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("path", NODE_FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_nodes_files_are_python_38(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


def test_no_module_is_named_for_nothing() -> None:
    for path in modules():
        assert path.stem not in {"utils", "util", "helpers", "common", "manager", "misc"}

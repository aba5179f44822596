"""A module imports only from rows below its own; the node's files import nothing of corral."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from corral.targets.base import TARGETS

SOURCE = Path(__file__).parent.parent.parent / "src" / "corral"

# The only modules that lie loose at the root. A new noun gets a package, or a place in one.
GROUND = [
    "errors",
    "record",
    "wording",
    "home",
    "processes",
    "interruption",
    "files",
    "shell",
    "ssh",
    "bundle",
    "alarm",
    "untrusted",
    "lock",
]

# row -> packages; a package imports from rows below its own, never from a neighbour
ROWS: list[list[str]] = [
    GROUND,
    ["http1"],
    ["client", "deployment", "engines", "fake"],
    ["hardware", "models", "runtimes"],
    ["plan", "slurm", "transfer", "doctor"],
    ["launch"],
    ["targets"],
    ["lifecycle", "profile"],
    ["proxy", "batch", "fleet"],
    ["score", "bench", "gateway"],
    ["llm", "report"],
    ["tune", "simulate"],
    ["console"],
    ["cli"],
]
STANDALONE = ["node", "engine_side"]
# what travels to the nodes and serves Corral itself as well: one answer on both sides
SHARED = ["node.adapters", "node.agent.processes", "node.exposition", "node.files", "node.identity",
          "node.load_figures", "node.ports", "node.row_socket", "node.states", "node.tcp_table"]  # fmt: skip
DOORS = ["__init__", "__main__"]  # the package's own face: may name anything


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted name below `corral`."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in modules()}


@dataclass(frozen=True)
class Parsed:
    """What is asked of a file."""

    imported: set[str]  # modules of corral, anywhere in it, by their dotted names below `corral`
    classes: list[str]
    long: list[str]  # functions of more than 40 lines


@cache  # hundreds of tests ask, and parsing takes longer than what they do
def parsed(path: Path) -> Parsed:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{name_of(path)}.{one.name}" for one in functions if (one.end_lineno or 0) - one.lineno >= 40]
    return Parsed(_imported(nodes), classes, long)


def imported(path: Path) -> set[str]:
    return parsed(path).imported


def _imported(nodes: list[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            first, _, below = node.module.partition(".")
            if first == "corral":
                whole = {f"{below}.{alias.name}".lstrip(".") for alias in node.names}
                found |= {name if name in NAMES else below for name in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("corral.") for alias in node.names if alias.name.startswith("corral.")}
    return found - {""}


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
    elif top not in DOORS:
        for name in {one.split(".")[0] for one in imported(path) - set(SHARED)} - {top}:
            below = row_of(name) < row_of(top) or {name, top} <= set(GROUND)
            assert below, f"{top} (row {row_of(top)}) imports {name} (row {row_of(name)})"


def test_only_the_ground_lies_loose() -> None:
    assert sorted(path.stem for path in SOURCE.glob("*.py")) == sorted([*GROUND, *DOORS])


def refuse_circles(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "a circle of imports: " + " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(graph.get(name, set())):
                walk(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        if name not in DOORS:
            walk(name, ())


def test_no_circle_of_imports() -> None:
    """Neither between packages nor inside one, imports within functions included."""
    graph = {
        name_of(path): imported(path) for path in modules() if path.relative_to(SOURCE).parts[0] not in STANDALONE
    }
    refuse_circles(graph)


def test_no_circle_between_the_parts_of_batch() -> None:
    """Its subpackages, and the modules that tie them, each count as one."""
    graph: dict[str, set[str]] = {}
    for path in (SOURCE / "batch").rglob("*.py"):
        part = path.relative_to(SOURCE / "batch").parts[0].removesuffix(".py")
        if part not in DOORS:
            others = {name.split(".")[1] for name in imported(path) if name.startswith("batch.")}
            graph.setdefault(part, set()).update(others - {part})
    assert {"core", "input", "sharing", "service", "jobs"} <= graph.keys()
    assert not graph["core"], "the core knows nothing of what stands on it"
    refuse_circles(graph)


def test_targets_do_not_import_each_other() -> None:
    homes = {place.partition(":")[0].removeprefix("corral.") for place in TARGETS.values()}
    assert {"targets.local", "targets.ssh", "targets.slurm"} <= homes
    for path in (SOURCE / "targets").rglob("*.py"):
        own = ".".join(name_of(path).split(".")[:2])
        assert not imported(path) & (homes - {own}), path


NODE_FILES = sorted((SOURCE / "node").rglob("*.py"))


@pytest.mark.parametrize("path", NODE_FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_nodes_files_need_only_the_standard_library(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = path.parents[node.level - 1]
            assert above.is_relative_to(SOURCE / "node"), "nothing above travels"
            assert not node.module or (above / f"{node.module}.py").is_file()
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


def test_a_class_name_stands_for_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in modules():
        if path.relative_to(SOURCE).parts[0] not in STANDALONE:
            for name in parsed(path).classes:
                homes.setdefault(name, []).append(name_of(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_long_functions_stay_few() -> None:
    """Past 40 lines a function needs a reason: a list of fields or of options is one. The number only falls."""
    long = [name for path in modules() for name in parsed(path).long]
    assert len(long) <= 8, long

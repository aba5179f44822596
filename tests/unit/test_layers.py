"""A module imports only from rows below its own; the node's files import nothing of corral."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from corral.deploy.targets.keys import TARGETS
from tests.conftest import ROOT

SOURCE = ROOT / "src" / "corral"

# From top to bottom; a room imports only from rooms below it.
ROOMS = ["cli", "console", "lab", "use", "serve", "deploy", "plan", "engines", "fake", "client", "base", "node"]

# The packages inside a room, from top to bottom; those of one row do not import each other. "." is the room's own
# modules.
PARTS: dict[str, list[list[str]]] = {
    "lab": [["report"], ["tune", "simulate"], ["eval"], ["bench"]],
    "use": [["llm"], ["score"], ["batch"]],
    "serve": [["gateway", "resolve"], ["fleet"], ["."]],
    "deploy": [["lifecycle", "profile"], ["targets"], ["launch"], ["slurm", "transfer", "doctor"], ["deployment"]],
    "plan": [["."], ["models", "hardware"]],
    "engines": [["runtimes"], ["."]],
}
STANDALONE = ["node", "engines.engine_side"]  # run where there is no corral
NOT_FOR_USE = {"client", "engines", "plan", "node", "base"}  # nothing in these rooms imports the fake server
# what travels to the nodes and serves Corral itself as well: one answer on both sides
SHARED = ["node.exposition", "node.files", "node.network", "node.processes", "node.row_socket", "node.sockets",
          "node.states"]  # fmt: skip
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


def room_of(name: str) -> int:
    """The higher the number, the lower the room."""
    top = name.split(".")[0]
    assert top in ROOMS, f"{top} is no room: a new noun gets a package or a module in one of {ROOMS}"
    return ROOMS.index(top)


def is_standalone(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in STANDALONE)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    name = name_of(path)
    if is_standalone(name):
        assert not imported(path), f"{path.name} runs without corral"
    elif path.parent != SOURCE:
        for other in imported(path) - set(SHARED):
            top, below = name.split(".")[0], other.split(".")[0]
            assert below == top or room_of(name) < room_of(other), f"{name} imports {other}"
            assert below != "fake" or top not in NOT_FOR_USE, f"{name} imports {other}"


def part_of(name: str, room: str) -> str:
    """The package inside the room that a module belongs to."""
    parts = name.split(".")
    packages = {one for row in PARTS[room] for one in row}
    return parts[1] if len(parts) > 1 and parts[1] in packages else "."


@pytest.mark.parametrize("room", PARTS)
def test_the_parts_of_a_room_have_an_order(room: str) -> None:
    rows = {part: number for number, row in enumerate(PARTS[room]) for part in row}
    for path in (SOURCE / room).rglob("*.py"):
        name = name_of(path)
        own = part_of(name, room)
        if is_standalone(name) or own not in rows:
            continue
        for other in imported(path):
            if other.split(".")[0] == room and (part := part_of(other, room)) != own:
                assert rows[own] < rows[part], f"{name} imports {other}"


def test_nothing_lies_beside_the_rooms() -> None:
    assert sorted(path.stem for path in SOURCE.glob("*.py")) == sorted(DOORS)
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ROOMS)


def test_the_readme_shows_every_room_and_its_packages() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The tree")[2]
    shown = re.findall(r"^ {2,4}([a-z_]+)/  ", tree.partition("tests/unit/")[0], re.MULTILINE)
    packages = [path.parent.name for room in ROOMS for path in sorted((SOURCE / room).glob("*/__init__.py"))]
    assert sorted(shown) == sorted([*ROOMS, *packages])


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
    graph = {name_of(path): imported(path) for path in modules() if not is_standalone(name_of(path))}
    refuse_circles(graph)


def relatively_imported(path: Path) -> set[str]:
    """The modules of `node` that one of them imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].relative_to(SOURCE)
            module = ".".join([*folder.parts, *([node.module] if node.module else [])])
            whole = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name if name in NAMES else module for name in whole}
    return found - {name_of(path)}


def test_no_circle_of_imports_on_the_nodes() -> None:
    refuse_circles({name_of(path): relatively_imported(path) for path in (SOURCE / "node").rglob("*.py")})


def test_no_circle_between_the_parts_of_batch() -> None:
    """Its subpackages, and the modules that tie them, each count as one."""
    graph: dict[str, set[str]] = {}
    for path in (SOURCE / "use" / "batch").rglob("*.py"):
        part = path.relative_to(SOURCE / "use" / "batch").parts[0].removesuffix(".py")
        if part not in DOORS:
            others = {name.split(".")[2] for name in imported(path) if name.startswith("use.batch.")}
            graph.setdefault(part, set()).update(others - {part})
    assert {"core", "input", "service", "jobs", "parts", "shared"} <= graph.keys()
    assert not graph["core"], "the core knows nothing of what stands on it"
    refuse_circles(graph)


def test_targets_do_not_import_each_other() -> None:
    homes = {place.partition(":")[0].removeprefix("corral.") for place in TARGETS.values()}
    assert {"deploy.targets.local", "deploy.targets.ssh", "deploy.targets.slurm"} <= homes
    for path in (SOURCE / "deploy" / "targets").rglob("*.py"):
        own = ".".join(name_of(path).split(".")[:3])
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
        if not is_standalone(name_of(path)):
            for name in parsed(path).classes:
                homes.setdefault(name, []).append(name_of(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_long_functions_stay_few() -> None:
    """Past 40 lines a function needs a reason: a list of fields or of options is one. The number only falls."""
    long = [name for path in modules() for name in parsed(path).long]
    assert len(long) <= 8, long

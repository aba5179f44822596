"""Modules of `corral.node` as one text that runs by itself on another machine.

A start places one file, which is complete or absent and which any Python can run. A module that imports no other is
sent as it is. For every other one, and for a package, the text is `node/module_loader.py`, then the sources of all
modules of `node` that it needs, as readable strings, then a call of its `start`. Modules of `node` import each other
relatively, and nothing else of Corral. Their package is called `corral_node` there, and `corral.node` here.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

PACKAGE = "corral_node"
QUOTES = "'''"  # the sources themselves write double ones
# read as text: parsing in several threads at once fails in CPython 3.11 ("AST constructor recursion depth mismatch")
_RELATIVE = re.compile(r"^[ \t]*from[ \t]+(\.+)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)", re.MULTILINE)


@functools.cache
def bundle(resource: str) -> str:
    """The text of a file inside the corral package, or of a package of them, as one file that runs."""
    file = resources.files("corral") / resource
    entry = resource.removeprefix("node/").removesuffix(".py")
    if file.is_file() and (not resource.startswith("node/") or not list(_imported(entry))):
        return file.read_text(encoding="utf-8")
    start = entry if file.is_file() else f"{entry}.__main__"
    lines = [_files()["module_loader"].read_text(encoding="utf-8"), "SOURCES = {}"]
    for name in sorted(_needed(start)):
        text = _files()[name].read_text(encoding="utf-8")
        lines.append(f"SOURCES[{f'{PACKAGE}.{name}'.rstrip('.')!r}] = {_quoted(text, name)}")
    return "\n".join([*lines, f"start({f'{PACKAGE}.{start}'!r}, SOURCES)", ""])


@functools.cache
def _files() -> dict[str, Traversable]:
    """Every module of `node` by its dotted name there; a package by its name, `node` itself by the empty one."""

    def walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
        for entry in folder.iterdir():
            if entry.is_dir() and (entry / "__init__.py").is_file():
                yield from walk(entry, f"{prefix}{entry.name}.")
            elif entry.name.endswith(".py"):
                yield f"{prefix}{entry.name.removesuffix('.py')}".removesuffix("__init__").rstrip("."), entry

    return dict(walk(resources.files("corral") / "node", ""))


def _needed(entry: str) -> set[str]:
    """A module of `node`, the packages around it, and all that any of them imports."""
    found: set[str] = set()
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [name.rpartition(".")[0], *_imported(name)]
    return found


def _imported(name: str) -> Iterator[str]:
    """The modules of `node` that a module names in its relative imports."""
    file = _files()[name]
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for dots, module, names in _RELATIVE.findall(file.read_text(encoding="utf-8")):
        above = package[: len(package) - len(dots) + 1]
        base = ".".join([*above, *([module] if module else [])])
        yield from {base, *(f"{base}.{one}".lstrip(".") for one in re.findall(r"\w+", names))} & _files().keys()


def _quoted(text: str, name: str) -> str:
    if QUOTES in text:
        raise ValueError(f"{name} contains {QUOTES}, and cannot be sent")
    return f"r{QUOTES}{text}{QUOTES}"


if __name__ == "__main__":  # python3 -m corral.base.bundle RESOURCE FILE
    Path(sys.argv[2]).write_text(bundle(sys.argv[1]), encoding="utf-8")

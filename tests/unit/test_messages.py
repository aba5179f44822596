"""Every message with its remedy in one file, to be read as a whole: tests/unit/golden/messages.txt.

After a change of wording run CORRAL_WRITE_MESSAGES=1 pytest tests/unit/test_messages.py, and read the difference.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from corral import errors
from tests.conftest import ROOT

SOURCE = ROOT / "src" / "corral"
KEPT = ROOT / "tests" / "unit" / "golden" / "messages.txt"
BASES = {name for name in errors.__all__ if name.endswith("Error")}


def error_classes(trees: dict[Path, ast.Module]) -> set[str]:
    """Names of all classes below CorralError, wherever they are."""
    known = set(BASES) | {"BadParameter", "ClickException"}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:
        more = {one.name for one in classes for base in one.bases if _last(base) in known} - known
        if not more:
            return known
        known |= more


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def words(node: ast.expr) -> str:
    """A text as it stands in the source; what is put in at run time is shown as {…}."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return words(node.value) if isinstance(node.value, ast.IfExp) else _name(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left) + words(node.right)
    if isinstance(node, ast.IfExp):
        return f"{words(node.body)} | {words(node.orelse)}"
    return _name(node)


def _name(node: ast.expr) -> str:
    """What is put in, where it has a name: how Python writes more than that depends on its version."""
    return "{" + (ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else "…") + "}"


def messages() -> Iterator[str]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    known = error_classes(trees)
    for path, tree in trees.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last(node.func) in known]
        for call in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
            if call.args and not isinstance(call.args[0], ast.Starred):
                remedy = f"\n    → {words(call.args[1])}" if len(call.args) > 1 else ""
                yield f"{path.relative_to(SOURCE)} {_last(call.func)}\n    {words(call.args[0])}{remedy}"


def test_every_message_is_in_the_file_for_reading() -> None:
    found = "\n".join(messages()) + "\n"
    if os.environ.get("CORRAL_WRITE_MESSAGES"):
        KEPT.write_text(found, encoding="utf-8")
    assert KEPT.read_text(encoding="utf-8") == found, "read the new messages, then write the file anew (see above)"

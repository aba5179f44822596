"""Every message of Corral with its remedy, by file: `python tools/list_messages.py`. For reading them all in one go.

An error is a call of a class whose name ends in `Error` with a text and a remedy; findings of the doctor and rows of
the diagnosis table count too. Values that are filled in show as {…}.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "corral"
SPEAKERS = ("ok", "warn", "fail", "Finding", "Diagnosis", "Signature", "UsageError", "ClickException", "tell", "note")


@dataclass(frozen=True)
class Message:
    """What is said where, and what to do about it."""

    file: str
    line: int
    kind: str
    text: str
    remedy: str


def spoken(node: ast.expr | None) -> str | None:
    """The text of a string expression, with {…} for what is filled in; None when it is not text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(spoken(part) or "{…}" for part in parts)
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            return (spoken(left) or "{…}") + (spoken(right) or "{…}")
        case ast.IfExp(body=body, orelse=other):
            return f"{spoken(body) or '{…}'} | {spoken(other) or '{…}'}"
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)))):
            return text
    return None


def messages(path: Path) -> Iterator[Message]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
        if not (name.endswith("Error") or name in SPEAKERS):
            continue
        texts = [text for argument in node.args if (text := spoken(argument)) is not None]
        texts += [text for keyword in node.keywords if (text := spoken(keyword.value)) is not None]
        if texts and " " in texts[0]:
            file = str(path.relative_to(SOURCE))
            yield Message(file, node.lineno, name, texts[0], " // ".join(texts[1:]))


def all_messages() -> list[Message]:
    return [message for path in sorted(SOURCE.rglob("*.py")) for message in messages(path)]


if __name__ == "__main__":
    file = ""
    for message in all_messages():
        if message.file != file:
            file = message.file
            sys.stdout.write(f"\n{file}\n")
        remedy = f"\n            → {message.remedy}" if message.remedy else ""
        sys.stdout.write(f"  {message.line:>4}  {message.kind}: {message.text}{remedy}\n")

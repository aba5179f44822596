"""Everything that is said to people, in one file to be read as a whole: tests/unit/golden/messages.txt.

After a change of wording run CORRAL_WRITE_MESSAGES=1 pytest tests/unit/test_messages.py, and read the difference.
Collected are errors with their remedies, what is said while something runs (notes, findings of the doctor, diagnoses,
answers of the batch service), tables of sentences, and sentences that functions return.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from corral.base import errors
from tests.conftest import ROOT

SOURCE = ROOT / "src" / "corral"
KEPT = ROOT / "tests" / "unit" / "golden" / "messages.txt"
BASES = {name for name in vars(errors) if name.endswith("Error")}
SPEAKERS = {
    "Diagnosis", "Finding", "Lack", "Refusal", "Signature", "_line", "explain", "fail", "fatal", "note", "ok", "say",
    "tell", "warning",
}  # fmt: skip
MACHINES = ("engines/engine_side", "fake", "lab/report")  # what these make is read by programs, or shown as a page


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


SPOKEN_NAMES = {"cause", "hint", "look", "message", "remedy", "said", "text", "why", "words"}
NO_PROSE = re.compile(
    r"""\\[bswSd"]|\(\?|\(\.|\[\^|\[\w+\]\w|\w\|\w|\$["{(\w]|</?\w+>|/dev/null|^import |^corral\.\w"""
)


def is_prose(text: str) -> bool:
    """Three words or more with spaces between them, which are neither a pattern nor a script."""
    own = re.sub(r"\{[^{}]*\}", "{}", text).strip()
    return len(re.findall(r"(?:^|[\s(`])[A-Za-z][a-z']+\b", own)) >= 3 and not NO_PROSE.search(own)


def prose(nodes: Sequence[ast.expr]) -> list[str]:
    texts = (words(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp))
    return [text for text in texts if is_prose(text)]


def _nested(node: ast.expr) -> Iterator[list[str]]:
    """Rows of a table: the texts of each tuple or call in it that holds no further one."""
    inner = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.Tuple | ast.List | ast.Dict)]
    if inner:
        for one in inner:
            yield from _nested(one)
    elif isinstance(node, ast.Dict):
        yield from ([text] for text in prose(node.values))
    elif isinstance(node, ast.Tuple | ast.List):
        yield prose(node.elts)
    else:
        yield prose([node])


def spoken(node: ast.AST, errors: set[str]) -> Iterator[tuple[str, list[str]]]:
    """What a call, a table or a return says: its kind, and the sentences in order."""
    match node:
        case ast.Call(func=func, args=[first, *rest]) if _last(func) in errors:
            if not isinstance(first, ast.Starred):
                yield _last(func), [words(one) for one in (first, *rest[:1])]
        case ast.Call(func=func, args=args, keywords=keywords) if _last(func) in SPEAKERS:
            yield _last(func), prose([*args, *(keyword.value for keyword in keywords)])
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            if value is not None and name.lstrip("_").isupper():
                yield from ((name, row) for row in _nested(value))
            elif value is not None and name in SPOKEN_NAMES:
                yield name, prose([value])
        case ast.Return(value=ast.expr() as value):
            yield "returned", prose([value])


@cache
def messages() -> tuple[str, ...]:
    """All of them; the source is read once, for it takes seconds."""
    return tuple(_messages())


def parsed() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


@cache
def known_errors() -> set[str]:
    return error_classes(parsed())


def _messages() -> Iterator[str]:
    trees, known = parsed(), known_errors()
    for path, tree in trees.items():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
        machine = path.relative_to(SOURCE).as_posix().startswith(MACHINES)
        for node in sorted(nodes, key=lambda one: (one.lineno, one.col_offset)):
            for kind, texts in spoken(node, known):
                if texts and (not machine or kind in known):
                    yield f"{path.relative_to(SOURCE)} {kind}\n    " + "\n    → ".join(texts)


def test_every_message_is_in_the_file_for_reading() -> None:
    found = "\n".join(messages()) + "\n"
    if os.environ.get("CORRAL_WRITE_MESSAGES"):
        KEPT.write_text(found, encoding="utf-8")
    assert KEPT.read_text(encoding="utf-8") == found, "read the new messages, then write the file anew (see above)"


# names that keep their capital letter after "corral: "
PROPER = {
    "CORRAL_HOME", "Corral's", "HF_HUB_OFFLINE", "OpenAI", "Parquet", "Ray", "SLURM's",
    "No",  # "No such …": OpenAI's words
}  # fmt: skip
FOREIGN = re.compile(r"\b(anew|thereby|for want of|(?<![Tt]here )is none|signs?|a text\b|texts that|mostly)\b")


def test_errors_begin_like_the_middle_of_a_line_and_end_like_sentences() -> None:
    known = known_errors()
    wrong = []
    for message in messages():
        head, said, *_ = message.split("\n    ")
        first = said.split()[0] if said.split() else ""
        if head.split()[1] in known and first[:1].isupper() and first not in PROPER:
            wrong.append(message)
    assert not wrong, "\n".join(wrong)


def test_no_message_uses_words_that_english_speakers_would_not() -> None:
    odd = [message for message in messages() if FOREIGN.search(message)]
    assert not odd, "\n".join(odd)

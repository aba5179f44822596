"""Prompts longer than the context, found before they are sent: counted by the model's own tokenizer.

A running server is asked. Where none runs yet, the tokenizer on disk is used inside the engine's environment; where
either is missing nothing is counted, and the server will refuse what is too long, row by row.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from subprocess import DEVNULL, PIPE, SubprocessError, run
from typing import Any

import msgspec

from corral.base.errors import CorralError
from corral.client.client import Client
from corral.client.client import run as run_loop
from corral.client.endpoint import Endpoint, ModelServer
from corral.client.sampling import ANSWER_TOKENS
from corral.use.batch.core.table import BAD, RowReader
from corral.use.batch.input.check import RowProblem, Scanned
from corral.use.batch.input.recipe import Recipe, asked_tokens

_AT_ONCE = 32
_GROUP = 4096
_COUNT_S = 600

Question = Mapping[str, Any]  # {"prompt": …} or {"messages": …}
Counter = Callable[[Sequence[Question]], Sequence[int]]  # their tokens; 0 where it cannot be told


def mark_too_long(scanned: Scanned[Recipe], counter: Counter, context: int) -> None:
    """Mark rows whose tokens, with those they ask for, exceed the context."""
    table = scanned.table
    for rows, parsed in _groups(scanned):
        counts = counter([_question(body) for _, body in parsed])
        for row, (identity, body), tokens in zip(rows, parsed, counts, strict=True):
            wanted = asked_tokens(body)
            if tokens and tokens + max(1, wanted) > context and not table.flags[row]:
                text = f"has {tokens} tokens{_asks(wanted) if tokens < context else ''}; the context holds {context}"
                table.flags[row] = BAD
                scanned.problems.add(RowProblem(row, table.lines[row], text, identity))


def _asks(wanted: int) -> str:
    if not wanted:
        return ""
    unsaid = " (--max-tokens says for how many)" if wanted == ANSWER_TOKENS else ""
    return f" and asks for {wanted}{unsaid}"


def _groups(scanned: Scanned[Recipe]) -> Iterator[tuple[list[int], list[tuple[str, dict[str, Any]]]]]:
    """The rows in question with their ids and bodies, some at a time."""
    reader, table = RowReader(scanned.table), scanned.table
    try:
        for start in range(0, len(scanned.long_rows), _GROUP):
            rows = scanned.long_rows[start : start + _GROUP]
            parsed = (scanned.recipe.read(reader.raw(row), table.lines[row]) for row in rows)
            yield rows, [(one.id, one.body) for one in parsed]
    finally:
        reader.close()


def _question(body: Mapping[str, Any]) -> Question:
    return {"messages": body["messages"]} if "messages" in body else {"prompt": body["prompt"]}


# A server


def server_counter(server: ModelServer) -> Counter | None:
    """Asks a server; None while it is away."""
    endpoint = server.find()
    return None if endpoint is None else lambda questions: run_loop(_ask(endpoint, questions))


async def _ask(endpoint: Endpoint, questions: Sequence[Question]) -> Sequence[int]:
    found: list[int] = []
    async with Client(endpoint, stall_s=60) as client:
        for start in range(0, len(questions), _AT_ONCE):
            found += await asyncio.gather(*(_tokens(client, one) for one in questions[start : start + _AT_ONCE]))
    return found


async def _tokens(client: Client, question: Question) -> int:
    try:
        page = await client.page("/tokenize", {"model": client.endpoint.model, **question}, timeout_s=60)
        return int(page.json()["count"]) if page.status == 200 else 0
    except (CorralError, KeyError, TypeError, ValueError):
        return 0


# A tokenizer on disk


def engine_counter(python: str, model: Path) -> Counter:
    """Uses the tokenizer of a model folder in an engine's environment."""

    def count(questions: Sequence[Question]) -> Sequence[int]:
        script = resources.files("corral") / "engines" / "engine_side" / "count_tokens.py"
        with tempfile.TemporaryFile() as asked:  # a pipe both ways could fill up on either side
            for one in questions:
                asked.write(msgspec.json.encode(one) + b"\n")
            asked.seek(0)
            try:
                done = run([python, str(script), str(model)], stdin=asked, stdout=PIPE, stderr=DEVNULL,
                           timeout=_COUNT_S, check=False)  # fmt: skip
                found = [int(line) for line in done.stdout.split()]
            except (OSError, ValueError, SubprocessError):
                found = []
        return found if len(found) == len(questions) else [0] * len(questions)

    return count

"""Prompts longer than the context, found before they are sent: counted by the server's own tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from corral.batch.check import Problem, Scanned
from corral.batch.fleet import Place
from corral.batch.recipe import Parsed
from corral.batch.table import BAD, RowReader
from corral.client import Client, run
from corral.endpoint import Endpoint
from corral.errors import CorralError

__all__ = ["mark_too_long"]

_AT_ONCE = 32


def mark_too_long(scanned: Scanned, place: Place, context: int) -> None:
    """Mark rows whose tokens, with those they ask for, exceed the context; does nothing while the server is away."""
    endpoint = place.find()
    if endpoint is None or not scanned.long_rows:
        return
    counts = run(_count(endpoint, scanned))
    table = scanned.table
    for row, (tokens, wanted) in zip(scanned.long_rows, counts, strict=True):
        if tokens + max(1, wanted) > context and not table.flags[row]:
            asks = f" and asks for {wanted}" if wanted else ""
            text = f"has {tokens} tokens{asks}; the context holds {context}"
            table.flags[row] = BAD
            identity = scanned.recipe.read(_raw(scanned, row), table.lines[row]).id
            scanned.problems.add(Problem(row, table.lines[row], text, identity))


def _raw(scanned: Scanned, row: int) -> bytes:
    reader = RowReader(scanned.table)
    try:
        return reader.raw(row)
    finally:
        reader.close()


async def _count(endpoint: Endpoint, scanned: Scanned) -> Sequence[tuple[int, int]]:
    """Prompt tokens and wanted tokens of every row in question."""
    reader, table = RowReader(scanned.table), scanned.table
    found: list[tuple[int, int]] = []
    async with Client(endpoint, stall_s=60) as client:
        for start in range(0, len(scanned.long_rows), _AT_ONCE):
            rows = scanned.long_rows[start : start + _AT_ONCE]
            parsed = [scanned.recipe.read(reader.raw(row), table.lines[row]) for row in rows]
            found += await asyncio.gather(*(_tokens(client, one) for one in parsed))
    reader.close()
    return found


async def _tokens(client: Client, parsed: Parsed) -> tuple[int, int]:
    body = parsed.body
    wanted = int(body.get("max_tokens") or body.get("max_completion_tokens") or 0)
    ask = {"messages": body["messages"]} if "messages" in body else {"prompt": body["prompt"]}
    try:
        page = await client.page("/tokenize", {"model": client.endpoint.model, **ask}, timeout_s=60)
        return (int(page.json()["count"]) if page.status == 200 else 0), wanted
    except (CorralError, KeyError, TypeError, ValueError):
        return 0, wanted

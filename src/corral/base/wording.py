"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"

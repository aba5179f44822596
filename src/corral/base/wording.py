"""Numbers in sentences."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"

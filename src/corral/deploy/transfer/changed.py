"""A source that is written to while it is copied: one error, with what changed and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.base.errors import ConflictError


class ChangedSourceError(ConflictError):
    """Nothing more of it is sent."""


def changed_source(where: str, event: Mapping[str, Any]) -> ChangedSourceError:
    """The error for what a courier said of its files."""
    more = f" and {event['more']} more" if event["more"] else ""
    return ChangedSourceError(
        f"{where} changed while it was being copied: {_told(event)}{more}.",
        "Wait until nothing writes there any more, then run the same command again: files that have arrived whole "
        "are kept.",
        path=event["path"],
    )


def _told(event: Mapping[str, Any]) -> str:
    path, was, now = event["path"], event["was_bytes"], event["now_bytes"]
    if event["how"] == "gone":
        return f"{path} is gone"
    if event["how"] == "new":
        return f"{path} is new"
    return f"{path} had {was:,} bytes and has {now:,}" if was != now else f"{path} was written to"

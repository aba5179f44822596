"""The Live view: load over the last hour."""

from __future__ import annotations

from starlette.routing import BaseRoute

from corral.console.desk import Desk

__all__ = ["routes"]


def routes(_desk: Desk) -> list[BaseRoute]:
    return []

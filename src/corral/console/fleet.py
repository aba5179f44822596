"""The Fleet view: every deployment and how it stands."""

from __future__ import annotations

from starlette.routing import BaseRoute

from corral.console.desk import Desk

__all__ = ["routes"]


def routes(_desk: Desk) -> list[BaseRoute]:
    return []

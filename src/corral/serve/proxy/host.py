"""What a request may use of the server that it passes through."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from corral.serve.proxy.figures import Figures
from corral.serve.proxy.request import Request
from corral.serve.proxy.route import MemberChooser


@dataclass(frozen=True)
class ProxyLimits:
    """How long and how much."""

    hold_s: float = 120.0  # a request waits this long for somebody to be ready
    connect_s: float = 5.0
    read_s: float = 30.0  # for the head of a request, and for its body beyond what a slow line explains
    idle_s: float = 300.0
    connections: int = 4096
    body_bytes: int = 256 << 20
    held_bytes: int = 2 << 30  # of all requests together that may have to be sent again


class Host(Protocol):
    """The server, seen from inside one request."""

    title: str  # how it calls itself in errors
    loop: asyncio.AbstractEventLoop
    limits: ProxyLimits
    figures: Figures
    held_bytes: int
    ending: bool

    def take(self, request: Request, from_here: bool) -> MemberChooser | bytes:
        """Where a request goes, or the whole answer that the server gives itself; `from_here`: from this machine."""

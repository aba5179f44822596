"""The proxy itself: one fixed address, in front of whichever member of a chain is ready.

It holds no key: requests are passed on as they come, and the guard of the server decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from corral.client.http1 import response
from corral.serve.proxy.host import ProxyLimits
from corral.serve.proxy.member import Member
from corral.serve.proxy.members import Members
from corral.serve.proxy.relay_server import RelayServer
from corral.serve.proxy.request import Request
from corral.serve.proxy.route import MemberChooser


class Proxy(RelayServer):
    """One address for one chain."""

    title = "corral proxy"

    def __init__(self, limits: ProxyLimits | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(limits)
        self.members = Members(self.loop, say)

    def every_member(self) -> list[Member]:
        return self.members.all

    def take(self, request: Request, from_here: bool) -> MemberChooser | bytes:
        if request.bare_path != b"/proxy/status":
            return self.members
        if from_here:
            return response(200, json.dumps(self.status()).encode())
        error = {"message": f"{self.title}: this path is for the proxy's own machine", "type": "permission_error",
                 "param": None, "code": 403}  # fmt: skip
        return response(403, json.dumps({"error": error}).encode())

    def status(self) -> dict[str, Any]:
        """What `/proxy/status` shows."""
        self.figures.switch_overs = self.members.switch_overs
        members = [
            {"name": one.name, "state": one.state.value, "url": one.url, "declined": one.declined,
             "running": len(one.active), "text": one.text}
            for one in self.members.all
        ]  # fmt: skip
        current = self.members.current.name if self.members.current else None
        return {"current": current, "members": members, "figures": self.figures.to_json()}

    async def close(self, patience_s: float = 0.0) -> None:
        """Accept nobody any more; running requests have some time to end."""
        await super().close(patience_s)
        self.members.close()
        self.figures.switch_overs = self.members.switch_overs

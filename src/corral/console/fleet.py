"""The Fleet view: every deployment and its status; start, stop, restart; logs and events."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from corral.base.errors import ConflictError, UsageError
from corral.base.record import load_json
from corral.console.commands import line_of
from corral.console.context import ConsoleContext, LatestValue, answer, body_of, events, whole_number
from corral.console.logs import read_journal, read_journals, read_log, read_log_file
from corral.console.starting import choices, form_of, preview, up_argv
from corral.console.statuses import DeploymentRows, Row, restart_argv
from corral.deploy.deployment.folder import DeploymentFolder, open_folder
from corral.deploy.deployment.state import ENDED
from corral.deploy.lifecycle.deployments import Record, status
from corral.serve.fleet.creation import parse_size
from corral.serve.fleet.record import open_fleet
from corral.serve.fleet.status import chosen_fleet
from corral.serve.resolve import resolve

QUIET_S = 15.0  # after which a stream without news sends an empty message


def routes(context: ConsoleContext) -> list[Route]:
    return _Fleet(context).routes()


def changes(before: dict[str, Row], now: dict[str, Row]) -> dict[str, Any] | None:
    """What a page that has `before` needs: rows that are new or changed, and the order where that changed."""
    rows = [row for key, row in now.items() if before.get(key) is not row]
    moved = list(before) != list(now)
    return {"rows": rows, "order": list(now) if moved else None} if rows or moved else None


class _Fleet:
    def __init__(self, context: ConsoleContext) -> None:
        self._context = context
        self._feed: LatestValue[dict[str, Row]] = LatestValue(DeploymentRows().read)

    def routes(self) -> list[Route]:
        return [
            Route("/api/fleet/stream", self.stream),
            Route("/api/fleet/logs", self.logs),
            Route("/api/fleet/events", self.journal),
            Route("/api/fleet/choices", self.choices),
            Route("/api/fleet/plan", self.plan),
            Route("/api/fleet/start", self.start, methods=["POST"]),
            Route("/api/fleet/stop", self.stop, methods=["POST"]),
            Route("/api/fleet/restart", self.restart, methods=["POST"]),
            Route("/api/fleet/scale", self.scale, methods=["POST"]),
            Route("/api/fleet/access", self.access, methods=["POST"]),
        ]

    async def stream(self, _: Request) -> Response:
        return events(self._news())

    async def _news(self) -> AsyncIterator[dict[str, Any]]:
        """All rows first, then those that changed; and an empty message now and then, to find out who has left."""
        known: dict[str, Row] = {}
        sent_s = float("-inf")
        clock = asyncio.get_running_loop().time
        values = self._feed.values()
        try:  # closed at once when the reader leaves, not when it is garbage-collected
            async for rows in values:
                news = changes(known, rows)
                if news is not None or clock() - sent_s > QUIET_S:
                    sent_s = clock()
                    yield {"now_s": self._context.clock(), "order": None, "rows": [], **(news or {})}
                known = rows
        finally:
            await values.aclose()

    async def logs(self, request: Request) -> Response:
        query = request.query_params
        after, rank = whole_number(query, "after"), whole_number(query, "rank") or 0
        if fleet := query.get("fleet"):
            log, word = open_fleet(fleet).keeper_log, query.get("search", "")[:200]
            return answer(await run_in_threadpool(read_log_file, log, word, after))
        folder = open_folder(query.get("name", ""))
        return answer(await run_in_threadpool(read_log, folder, rank, query.get("search", "")[:200], after))

    async def journal(self, request: Request) -> Response:
        if fleet := request.query_params.get("fleet"):
            return answer({"events": await run_in_threadpool(read_journals, [open_fleet(fleet).events])})
        folder = open_folder(request.query_params.get("name", ""))
        return answer({"events": await run_in_threadpool(read_journal, folder)})

    async def choices(self, _: Request) -> Response:
        return answer(await run_in_threadpool(choices))

    async def plan(self, request: Request) -> Response:
        """What the form would start: the line at once, and the plan behind it."""
        query = {name: value for name, value in request.query_params.items() if value and name != "line_only"}
        options = {name: value for name, value in query.items() if name.startswith("-")}
        form = form_of({**{name: query[name] for name in query.keys() - options.keys()}, "options": options})
        line = line_of(up_argv(form))
        if "line_only" in request.query_params:
            return answer({"line": line})
        return answer({"line": line, "plan": await run_in_threadpool(preview, form, self._context.read_only)})

    async def start(self, request: Request) -> Response:
        form = form_of(await body_of(request))
        return answer(self._context.commands.start(up_argv(form)), 202)

    async def stop(self, request: Request) -> Response:
        name = await _name(request)
        if chosen_fleet(name) is None:
            open_folder(name)
        return answer(self._context.commands.start(["down", name]), 202)

    async def restart(self, request: Request) -> Response:
        folder = open_folder(await _name(request))
        argv, running = await run_in_threadpool(_again, folder)
        return answer(self._context.commands.start(*([["down", folder.name]] if running else []), argv), 202)

    async def scale(self, request: Request) -> Response:
        body = await body_of(request)
        replicas = str(body.get("replicas", ""))
        parse_size(replicas)
        return answer(self._context.commands.start(["scale", open_fleet(_name_in(body)).name, replicas]), 202)

    async def access(self, request: Request) -> Response:
        """What a client needs, with the key: posted for, so that no reader of `--read-only` gets it."""
        endpoint = await run_in_threadpool(resolve, await _name(request))
        url, key = f"{endpoint.root}/v1", endpoint.key() or ""
        body = json.dumps({"model": endpoint.model, "messages": [{"role": "user", "content": "Hello"}]})
        headers = [*(["-H", f"Authorization: Bearer {key}"] if key else []), "-H", "Content-Type: application/json"]
        curl = shlex.join(["curl", f"{url}/chat/completions", *headers, "-d", body])
        known = {"url": url, "model": endpoint.model, "key": key, "curl": curl}
        return answer(known)


async def _name(request: Request) -> str:
    return _name_in(await body_of(request))


def _name_in(body: dict[str, Any]) -> str:
    name = body.get("name")
    if not isinstance(name, str) or not name or name.startswith("-"):
        raise UsageError(f"{str(name)[:80]!r} names no deployment.", "Give its name.")
    return name


def _again(folder: DeploymentFolder) -> tuple[list[str], bool]:
    """The arguments that start a deployment again, and whether it still runs."""
    argv = restart_argv(load_json(Record, folder.record))
    if argv is None:
        raise ConflictError(
            f"how {folder.name!r} was started is not known as a command.",
            "Start it again as it was started, or stop it and start one from the form.",
        )
    return argv, status(folder).state not in ENDED

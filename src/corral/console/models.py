"""The Models view: the catalogue and what is on disk, whether it fits this machine or a profile's, and downloads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from corral.base.errors import NotFoundError
from corral.base.record import to_json
from corral.base.ssh import asking_no_node
from corral.console.commands import line_of
from corral.console.context import ConsoleContext, answer, body_of
from corral.console.plans import REPOSITORY, FactCache
from corral.deploy.profile.merging import hardware_of_plan
from corral.deploy.profile.profile import all_profiles, load_profile
from corral.plan.hardware.inventory import Inventory, probe
from corral.plan.model_list import ListedModel, known_models, with_disk
from corral.plan.models import catalogue
from corral.plan.models.facts import facts_from_entry
from corral.plan.models.store import ShelvedModel, cached_bytes, is_whole, on_disk

SHOWN = 20  # downloads


def routes(context: ConsoleContext) -> list[BaseRoute]:
    return _Models(context).routes()


def pull_argv(values: Mapping[str, Any]) -> list[str]:
    """The arguments of `corral` that download a model: a known name or a repository; a page names no folder."""
    name, profile = values.get("name"), values.get("on")
    if not isinstance(name, str) or not (REPOSITORY.fullmatch(name) or catalogue.find(name)):
        raise NotFoundError(f"no model is called {str(name)[:80]!r}.", "Choose one of the list, or write owner/name.")
    if not profile:
        return ["pull", name]
    return ["pull", name, "--on", load_profile(str(profile)).name]


class _Models:
    def __init__(self, context: ConsoleContext) -> None:
        self._context = context
        self._facts = FactCache(context.clock)
        self._pulled: dict[str, tuple[str, bool]] = {}  # command -> model, and whether it comes to this machine

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/api/models", self.models, methods=["GET"]),
            Route("/api/models/line", self.line, methods=["GET"]),
            Route("/api/models/downloads", self.downloads, methods=["GET"]),
            Route("/api/models/pull", self.pull, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return answer(await run_in_threadpool(self._listed, request.query_params.get("on", "")))

    def _listed(self, profile: str) -> dict[str, Any]:
        with asking_no_node():
            here: Inventory = self._facts.get("here", probe)
            hardware = hardware_of_plan(load_profile(profile), None, None, None) if profile else here
        known: list[ListedModel] = self._facts.get((profile, hardware.label), lambda: known_models(hardware))
        rows = with_disk(known, on_disk(), self._is_whole)
        return {
            "models": [self._row(one) for one in rows],
            "hardware": hardware.label,
            "profiles": [one.name for one in all_profiles() if not one.error],
        }

    def _is_whole(self, model: ShelvedModel) -> bool:
        whole: bool = self._facts.get((model.path, model.stored_bytes), lambda: is_whole(model))
        return whole

    def _row(self, model: ListedModel) -> dict[str, Any]:
        """Where a model lies is told to the owner only."""
        row: dict[str, Any] = to_json(model)
        here = bool(row.pop("path"))
        return {**row, "here": here, **({} if self._context.read_only else {"path": model.path})}

    async def line(self, request: Request) -> Response:
        return answer({"line": line_of(pull_argv(request.query_params))})

    async def pull(self, request: Request) -> Response:
        body = await body_of(request)
        argv = pull_argv(body)
        command = self._context.commands.start(argv)
        self._pulled[command.id] = (argv[1], len(argv) == 2)
        return answer(command, 202)

    async def downloads(self, _: Request) -> Response:
        return answer({"downloads": await run_in_threadpool(self._downloads)})

    def _downloads(self) -> list[dict[str, Any]]:
        """Downloads that this console began, newest first."""
        living = {one.id for one in self._context.commands.all()}
        self._pulled = {id: one for id, one in self._pulled.items() if id in living}
        return [self._download(id, *one) for id, one in list(reversed(self._pulled.items()))[:SHOWN]]

    def _download(self, id: str, name: str, is_here: bool) -> dict[str, Any]:
        """How far one is: by what the hub's cache has of a model whose size is known."""
        command, entry = self._context.commands.read(id), catalogue.find(name)
        known = is_here and command.exit_code is None and entry is not None
        return {
            "id": id,
            "name": name,
            "line": command.line,
            "exit_code": command.exit_code,
            "text": command.output[-1] if command.output else "",
            "bytes": cached_bytes(entry.repo) if known and entry else None,
            "total": facts_from_entry(entry).weights_bytes if known and entry else None,
        }

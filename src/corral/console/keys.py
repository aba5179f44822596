"""The Keys view: clients' keys of the gateways by name, their limits and use; making and revoking one.

A key is made here and not by a command in the background, whose output is kept in a file: only the answer to the
request holds the secret. A reader of `--read-only` learns nothing of other clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from corral.base.errors import AccessError, NotFoundError, UsageError
from corral.console.commands import line_of
from corral.console.context import ConsoleContext, answer, body_of, whole_number
from corral.serve.fleet.record import all_fleets, held_gateways
from corral.serve.gateway.keys import add_key, read_keys
from corral.serve.gateway.usage import KeyUse, used_by_keys

LONGEST_FIELD = 2000


def routes(context: ConsoleContext) -> list[BaseRoute]:
    async def keys(_: Request) -> Response:
        _refuse_viewer(context)
        return answer(await run_in_threadpool(_keys))

    async def line(request: Request) -> Response:
        _refuse_viewer(context)
        return answer({"line": line_of(add_argv(_given(request.query_params)))})

    async def add(request: Request) -> Response:
        given = _given(await body_of(request))
        return answer({"name": given["name"], "key": await run_in_threadpool(lambda: add_key(**given))}, 201)

    async def remove(request: Request) -> Response:
        name = str((await body_of(request)).get("name"))
        if name not in (one.name for one in read_keys()):
            raise NotFoundError(f"there is no key called {name[:80]!r}.", "Load the page again.")
        return answer(context.commands.start(remove_argv(name)), 202)

    return [
        Route("/api/keys", keys, methods=["GET"]),
        Route("/api/keys/line", line, methods=["GET"]),
        Route("/api/keys/add", add, methods=["POST"]),
        Route("/api/keys/remove", remove, methods=["POST"]),
    ]


def has_gateways() -> bool:
    """Whether the view concerns the owner of this home."""
    return bool(read_keys() or all_fleets())


def _refuse_viewer(context: ConsoleContext) -> None:
    if context.read_only:
        raise AccessError("this console only shows, and names no clients: it runs with --read-only.",
                          "Use the command line: corral gateway key list.")  # fmt: skip


def _keys() -> dict[str, Any]:
    used = used_by_keys()
    rows = [
        {"name": one.name, "created_s": one.created_s, "rpm": one.rpm, "tpm": one.tpm, "models": one.models,
         "remove": line_of(remove_argv(one.name)), **used.get(one.name, KeyUse()).to_json()}
        for one in read_keys()
    ]  # fmt: skip
    gateways = {address.url for folder in all_fleets() for address in held_gateways(folder).values()}
    return {"keys": rows, "gateways": sorted(gateways)}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The form's fields, checked as the command line checks them."""
    fields = {name: values.get(name) or "" for name in ("name", "rpm", "tpm", "models")}
    if any(not isinstance(value, str) or len(value) > LONGEST_FIELD for value in fields.values()):
        raise UsageError("a field is not text, or too long.", "Shorten it.")
    if not fields["name"].strip():
        raise UsageError("the key has no name.", "Give the name of the client that will use it.")
    limits = {name: whole_number(fields, name, least=1) for name in ("rpm", "tpm")}
    models = tuple(name.strip() for name in fields["models"].split(",") if name.strip())
    return {"name": fields["name"].strip(), **limits, "models": models}


def add_argv(given: Mapping[str, Any]) -> list[str]:
    """The arguments of `corral` that make the same key."""
    options = [(f"--{name}", str(given[name])) for name in ("rpm", "tpm") if given[name]]
    options += [("--models", ",".join(given["models"]))] if given["models"] else []
    return ["gateway", "key", "add", *(word for pair in options for word in pair), *_word(given["name"])]


def remove_argv(name: str) -> list[str]:
    return ["gateway", "key", "remove", *_word(name)]


def _word(name: str) -> list[str]:
    """A name that begins with a dash is no option."""
    return ["--", name] if name.startswith("-") else [name]

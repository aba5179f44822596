"""Options that several verbs share: which server, and every sampling parameter, made from its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from corral.base.files import read_text
from corral.client.sampling import PARAMETERS, STRUCTURED, parse_assignments

F = TypeVar("F", bound=Callable[..., Any])
_KINDS: dict[str, Any] = {"int": int, "float": float, "text": str, "texts": str, "ints": int}


def deployment_argument(command: F) -> F:
    """[NAME]: the deployment that the verb is about; it may be left out when there is only one."""
    return click.argument("name", required=False)(command)


def endpoint_options(command: F) -> F:
    """--deployment and what `server_options` has: for verbs whose object is something else, an input for example."""
    help_text = "Deployment to use (default: the only one that is ready)."
    return click.option("--deployment", "-d", "name", metavar="NAME", help=help_text)(server_options(command))


def server_options(command: F) -> F:
    """--url, --key-file, --model: any server."""
    for option in reversed(
        (
            click.option("--url", help="Address of any OpenAI-compatible server (default: OPENAI_BASE_URL if set)."),
            click.option("--key-file", metavar="FILE", help="File with its key (default: OPENAI_API_KEY if set)."),
            click.option("--model", metavar="NAME", help="Served model, when the server has several."),
        )
    ):
        command = option(command)
    return command


def sampling_options(command: F) -> F:
    """One option for each sampling parameter, then the forms of structured answers, then --param."""
    command = click.option("--param", "extra", multiple=True, metavar="NAME=VALUE",
                           help="Any other field of the request, sent as it is; repeatable.")(command)  # fmt: skip
    for name, (_, text) in reversed(STRUCTURED.items()):
        flag = "--" + name.replace("_", "-")
        many = name == "choice"
        hint = (
            " (@FILE reads it from a file)" if name in ("json_schema", "grammar") else "; repeatable" if many else ""
        )
        command = click.option(flag, name, multiple=many, help=text.rstrip(".") + hint + ".", metavar="TEXT")(command)
    for parameter in reversed(PARAMETERS.values()):
        flag = "--" + parameter.name.replace("_", "-")
        names = ["-n", flag] if parameter.name == "n" else [flag]
        text = parameter.help + (f"  [{parameter.range_text}]" if _is_worth_saying(parameter.range_text) else "")
        if parameter.kind == "flag":
            command = click.option(f"{flag}/--no-{flag[2:]}", parameter.name, default=None, help=text)(command)
        else:
            many = parameter.kind in ("texts", "ints")
            command = click.option(
                *names,
                parameter.name,
                type=_KINDS[parameter.kind],
                multiple=many,
                help=text,
                metavar=_meta(parameter.kind),
            )(command)
    return command


def _is_worth_saying(text: str) -> bool:
    return bool(text) and "9.2" not in text  # the range of 64-bit numbers is nobody's concern


def _meta(kind: str) -> str:
    return {"int": "N", "ints": "ID", "float": "X"}.get(kind, "TEXT")


def taken_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters among a command's options, as `corral.use.llm.llm` takes them."""
    found = {name: value for name in PARAMETERS if (value := given.get(name)) not in (None, ())}
    for name in STRUCTURED:
        value = given.get(name)
        if value not in (None, ()):
            found[name] = list(value) if name == "choice" else _read(value) if name != "regex" else value
    if given.get("extra"):
        found["extra"] = parse_assignments(given["extra"])
    return found


def _read(value: str) -> str:
    return read_text(value[1:]) if value.startswith("@") else value

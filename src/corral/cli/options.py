"""Options that several verbs share, each declared once, and the types of their values.

Every target's own options come from its declaration, under a heading of their own. A flag that only one target has
decides for that target; one that several have (an interface between nodes) decides nothing, and goes to whichever is
chosen by others or by the profile. Sampling options come from the table of parameters. Whatever an option needs is
imported with it, so that a verb with few options starts quickly.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from corral.base.errors import AccessError, UnreachableError, UsageError
from corral.base.files import read_text
from corral.cli.help_pages import GroupedOption

if TYPE_CHECKING:
    from corral.deploy.targets.keys import Flag

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = r"(\d+(?:\.\d+)?)(ms|[hms])"
WRITTEN = r"(?=.)(\d+(\.\d+)?h)?\s*(\d+(\.\d+)?m(?!s))?\s*(\d+(\.\d+)?s)?\s*(\d+(\.\d+)?ms)?"


class Duration(click.ParamType[float]):
    """Seconds, from `90s`, `40m`, `1h30m` or `1.5`; a number alone is in `unit`."""

    name = "duration"

    def __init__(self, at_least_s: float = 0.0, unit: str = "s") -> None:
        self.at_least_s = at_least_s
        self.unit = unit

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        seconds = self._seconds(value.strip())
        if seconds is None:
            self.fail(f"{value!r} is not a duration: write 90s, 40m or 1h30m.", param, ctx)
        if seconds < self.at_least_s:
            self.fail(f"{value!r} is too short: at least {self.at_least_s:g} s.", param, ctx)
        return seconds

    def _seconds(self, text: str) -> float | None:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text) * SECONDS[self.unit]
        if not re.fullmatch(WRITTEN, text):
            return None
        return sum(float(number) * SECONDS[unit] for number, unit in re.findall(PART, text))


class TokenCount(click.ParamType[int]):
    """A number of tokens, at least 1: 32768, or 32k."""

    name = "tokens"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from corral.plan.contract import token_count

        return value if isinstance(value, int) else token_count(value)


class Origins(click.ParamType[tuple[str, ...]]):
    """Origins of web pages, with commas between them: https://chat.example.org, http://localhost:3000, or *."""

    name = "origins"

    def convert(
        self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if not isinstance(value, str):
            return value
        origins = tuple(filter(None, (one.strip().rstrip("/") for one in value.split(","))))
        for origin in origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s\"'*@]+", origin):
                self.fail(f"{origin!r} is not an origin: write https://chat.example.org, or * for all.", param, ctx)
        return origins


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator, in this order on the help page."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def json_option(help_text: str = "The same as one JSON document.") -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def profile_option(help_text: str = "Where to run (`corral profile list`).") -> Callable[[F], F]:
    """--on, or CORRAL_PROFILE."""
    return click.option("--on", "on", metavar="PROFILE", envvar="CORRAL_PROFILE", help=help_text)


def fixed_option(name: str = "fixed", note: str = " (see `corral plan`)") -> Callable[[F], F]:
    """--set: a field of the plan."""
    return click.option(
        "--set", name, multiple=True, metavar="KEY=VALUE", help=f"Fix one field of the plan{note}; repeatable."
    )


context_option = click.option(
    "--context", type=TokenCount(), help="Longest request in tokens: 32768, or 32k (default: the plan's choice)."
)
price_option = click.option(
    "--price", type=click.FloatRange(min=0, min_open=True), metavar="MONEY", help="Price of one GPU for one hour."
)
env_option = click.option(
    "--env", "extra_env", multiple=True, metavar="NAME=VALUE", help="Environment variable for the engine."
)


def runtime_options(command: F) -> F:
    """--runtime and --runtime-option."""
    from corral.engines.runtimes.base import RUNTIMES

    runtime = click.option(
        "--runtime",
        type=click.Choice(list(RUNTIMES)),
        help="How vLLM is installed where it runs (default: managed; see docs/runtimes.md).",
    )
    option = click.option(
        "--runtime-option",
        "runtime_options",
        multiple=True,
        metavar="KEY=VALUE",
        help="Option of that runtime: image=…, env=…, path=…; lists as mounts='[\"/data\"]'.",
    )
    return runtime(option(command))


def deployment_argument(command: F) -> F:
    """[NAME]: the deployment that the verb is about; it may be left out when there is only one."""
    return click.argument("name", required=False)(command)


server_options = together(
    click.option("--url", help="Address of any OpenAI-compatible server (default: OPENAI_BASE_URL if set)."),
    click.option("--key-file", metavar="FILE", help="File with its key (default: OPENAI_API_KEY if set)."),
    click.option("--model", metavar="NAME", help="Served model, when the server has several."),
)
endpoint_options = together(
    click.option(
        "--deployment", "-d", "name", metavar="NAME", help="Deployment to use (default: the only one that is ready)."
    ),
    server_options,
)


PREFIX = "target_option_"  # of the parameters, so that no other option has their name


def _flags() -> dict[str, tuple[Flag, tuple[str, ...]]]:
    """Every flag of every target once, by its name, and the targets that have it."""
    from corral.deploy.targets.keys import TARGETS, target_class

    found: dict[str, tuple[Flag, tuple[str, ...]]] = {}
    for target in TARGETS:
        for flag in target_class(target).FLAGS:
            known = found.get(flag.name, (flag, ()))
            found[flag.name] = (known[0], (*known[1], target))
    return found


def target_options(command: F) -> F:
    """All flags of all targets."""
    from corral.deploy.targets.keys import target_class

    for flag, targets in reversed(_flags().values()):
        command = click.option(
            flag.name,
            PREFIX + flag.name.strip("-").replace("-", "_"),
            cls=GroupedOption,
            heading="Options for " + " and ".join(target_class(target).TITLE or target for target in targets),
            type=click.IntRange(min=flag.least) if flag.least is not None else str,
            multiple=not flag.option,
            metavar=flag.metavar,
            help=flag.help,
        )(command)
    return command


def chosen_target(given: Mapping[str, Any], on: str | None) -> tuple[str | None, dict[str, object]]:
    """The target that the command line names, None for the profile's; and options for it."""
    set_flags = {name: value for name, value in given.items() if name.startswith(PREFIX) and value not in (None, ())}
    flags = {PREFIX + name.strip("-").replace("-", "_"): row for name, row in _flags().items()}
    options: dict[str, object] = {}
    deciding: dict[str, str] = {}  # target -> the flag that decides for it
    for name, value in set_flags.items():
        flag, targets = flags[name]
        if not flag.option:
            options |= {pair.partition("=")[0]: pair.partition("=")[2] or True for pair in value}
        else:
            read = flag.typed or flag.read
            options[flag.option] = read(value) if read else value
        if len(targets) == 1:
            deciding.setdefault(targets[0], flag.name)
    if len(deciding) > 1:
        one, other = list(deciding.items())[:2]
        raise UsageError(f"{one[1]} is for {one[0]}, {other[1]} for {other[0]}.", "Leave one of them out.")
    if options and not deciding and on is None:
        named = ", ".join(flags[name][0].name for name in set_flags)
        raise UsageError(f"{named} is for several nodes.", "Say which: --hosts, --nodes, or a profile with --on.")
    return next(iter(deciding), None), options


_KINDS: dict[str, Any] = {"int": int, "float": float, "text": str, "texts": str, "ints": int}


def sampling_options(command: F) -> F:
    """One option for each sampling parameter, then the forms of structured answers, then --param."""
    from corral.client.sampling import PARAMETERS, STRUCTURED

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
        text = parameter.help + (f"  [{parameter.range_text}]" if _shows_range(parameter.range_text) else "")
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


def _shows_range(text: str) -> bool:
    return bool(text) and "9.2" not in text  # the range of 64-bit numbers helps nobody


def _meta(kind: str) -> str:
    return {"int": "N", "ints": "ID", "float": "X"}.get(kind, "TEXT")


def taken_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters among a command's options, as `corral.use.llm.llm` takes them."""
    from corral.client.sampling import PARAMETERS, STRUCTURED, parse_assignments

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


def with_token(work: Callable[[], T]) -> T:
    """Do the work; where the hub wants a token and there is none, ask for it at the terminal and do it again."""
    try:
        return work()
    except AccessError as error:
        repo = error.details.get("needs_token")
        if not repo or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        _ask_token(repo)
    return work()


def _ask_token(repo: str) -> None:
    """Ask for a token, unseen, try it, and keep it; one that the hub refuses is not kept."""
    import getpass

    from corral.plan.models.hub import check_repository, checked_token, keep_token

    click.echo(
        f"{repo} is gated. Request access at https://huggingface.co/{repo}, and make a token with the right to read\n"
        "at https://huggingface.co/settings/tokens.",
        err=True,
    )
    try:
        token = checked_token(getpass.getpass("Token (not shown while you type or paste it): "))
    except EOFError:
        token = checked_token("")
    with contextlib.suppress(UnreachableError):  # the nodes may reach what this machine does not
        check_repository(repo, token)
    click.echo(f"kept in {keep_token(token)}", err=True)

"""`corral gateway NAME...`: one address for fleets and deployments; `corral gateway key`: its clients' keys."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import click

from corral.base.errors import UsageError
from corral.base.wording import counted
from corral.cli.help_pages import DefaultVerbGroup, WholeGroup
from corral.cli.options import Origins
from corral.lab.report.screen import print_json, print_table, since
from corral.serve.gateway.keys import add_key, read_keys, remove_key
from corral.serve.gateway.pages import summary
from corral.serve.gateway.policies import POLICIES
from corral.serve.gateway.process import GatewayProcess, gateway_process, run_gateway, successor_process
from corral.serve.gateway.url_member import FORM, UrlMember
from corral.serve.gateway.usage import KeyUse, used_by_keys
from corral.serve.gateway.watcher import Source, open_source

NO_CLIENTS = "its clients need keys: `corral gateway key add NAME` makes one"
HELP = {"help_option_names": ["-h", "--help"]}


@click.group(cls=DefaultVerbGroup, default="serve", context_settings=HELP)
def command() -> None:
    """Give fleets and deployments one address: `corral gateway NAME...`.

    Each request goes to the model that it names, and there to the server that has most of its prompt cached and the
    least to do. `--member` adds servers that Corral did not start. Clients send the key of the fleet or deployment,
    or their own (`corral gateway key add`). Ctrl-C stops it.
    """


@command.command(context_settings=HELP)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--member",
    "members",
    metavar=FORM,
    multiple=True,
    help="A server that Corral did not start: any OpenAI-compatible address, the models that it gets requests for,"
    " and the file with its key; repeatable.",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Port (default: the one it had before, or a free one).")
@click.option("--bind", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--route",
    type=click.Choice(list(POLICIES)),
    help="How a server is chosen.  [default: as the fleet says, or prefix]",
)
@click.option(
    "--allowed-origins",
    metavar="ORIGIN,…",
    type=Origins(),
    default=(),
    help="Pages that may use it from a browser, beside those of its fleets (default: none).",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Take the place of the gateway that runs: it gives its address to this one, answers its clients, and ends.",
)
@click.option("--while-open", is_flag=True, hidden=True)  # of a fleet's own gateway: it ends with the fleet
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON when it ends.")
def serve(
    names: tuple[str, ...],
    members: tuple[str, ...],
    port: int | None,
    bind: str,
    route: str | None,
    allowed_origins: tuple[str, ...],
    take_over: bool,
    while_open: bool,
    as_json: bool,
) -> None:
    """Serve the fleets and deployments NAME... behind one address until Ctrl-C, and servers at other addresses."""
    if not names and not members:
        raise UsageError("no server was named.", "Name fleets or deployments, or give --member URL,model=NAME.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{twice!r} was given twice.", "Give each fleet or deployment once.")
    sources = [open_source(name) for name in names]
    urls = tuple(map(UrlMember.parse, members))
    if len({one.name for one in urls}) < len(urls):
        raise UsageError("--member gives one address twice.", "Give it once, with model=NAME for each of its models.")
    if take_over and port is not None:
        raise UsageError("--take-over keeps the port, but --port was given.", "Leave one of them out.")
    if take_over:
        process = successor_process(sources, route or _route_of(sources), only_own=while_open)
    else:
        process = gateway_process(sources, bind, port, route or _route_of(sources))
        process = replace(process, while_open=while_open)
    serve_until_signal(replace(process, origins=allowed_origins, urls=urls), as_json)


def serve_until_signal(process: GatewayProcess, as_json: bool) -> None:
    """Run a gateway, print its address, and its figures when it ends."""

    def ready(url: str) -> None:
        click.echo(f"{url}/v1  (Ctrl-C ends it)", err=True)
        if not process.sources:
            clients = counted(len(read_keys()), "client")
            click.echo(f"{clients} may use it: `corral gateway key list`" if read_keys() else NO_CLIENTS, err=True)
            return
        key = shlex.quote(process.sources[0].key_file())
        click.echo(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=$(cat {key})", err=as_json)

    say = (lambda _: None) if as_json else (lambda text: click.echo(f"corral: {text}", err=True))
    figures = run_gateway(process, ready, say)
    if as_json:
        print_json(figures.to_json())
    else:
        click.echo("\n" + summary(figures), err=True)


def _route_of(sources: list[Source]) -> str:
    """The policy that the fleets ask for, where they agree."""
    wanted = {one.route() for one in sources if one.fleet is not None}
    return wanted.pop() if len(wanted) == 1 else "prefix"


@command.group(cls=WholeGroup, context_settings=HELP)
def key() -> None:
    """Manage clients' keys; they are valid at every gateway of this CORRAL_HOME."""


@key.command("add", context_settings=HELP)
@click.argument("name")
@click.option("--rpm", type=click.IntRange(min=1), metavar="N", help="At most N requests per minute.")
@click.option("--tpm", type=click.IntRange(min=1), metavar="N", help="At most N tokens per minute, answers included.")
@click.option("--models", metavar="NAME,...", help="Only for these models, fleets or deployments.")
@click.option("--json", "as_json", is_flag=True, help="Print the key and its limits as JSON.")
def add(name: str, rpm: int | None, tpm: int | None, models: str | None, as_json: bool) -> None:
    """Make a key for the client NAME and print it. It is shown only once: just its hash is kept."""
    wanted = tuple(name.strip() for name in (models or "").split(",") if name.strip())
    if models is not None and not wanted:
        raise UsageError(f"--models {models!r} names no model.", "Separate names with commas, or leave it out.")
    made = add_key(name, rpm, tpm, wanted)
    if as_json:
        print_json({"name": name, "key": made, "rpm": rpm, "tpm": tpm, "models": list(wanted)})
        return
    click.echo(f"the key for {name}, shown only this once; gateways accept it within seconds:", err=True)
    click.echo(made)


@key.command("list", context_settings=HELP)
@click.option("--json", "as_json", is_flag=True, help="Print the keys as JSON.")
def list_keys(as_json: bool) -> None:
    """List clients' keys, their limits, and what each has used at the running gateways."""
    used = used_by_keys()
    rows = [
        {"name": one.name, "created_s": one.created_s, "rpm": one.rpm, "tpm": one.tpm, "models": list(one.models),
         **used.get(one.name, KeyUse()).to_json()}
        for one in read_keys()
    ]  # fmt: skip
    if as_json:
        print_json({"keys": rows})
    elif rows:
        headings = ["NAME", "MADE", "REQUESTS/MIN", "TOKENS/MIN", "ANSWERED", "LIMITED", "TOKENS", "MODELS"]
        print_table(headings, [_row(row) for row in rows])
    else:
        click.echo("There are no client keys. `corral gateway key add NAME` makes one.", err=True)


def _row(row: dict[str, Any]) -> list[str]:
    limits = [f"{row[name]:,}" if row[name] else "-" for name in ("rpm", "tpm")]
    tokens = row["prompt_tokens"] + row["output_tokens"]
    counts = [f"{count:,}" for count in (row["answered"], row["limited"], tokens)]
    return [row["name"], since(row["created_s"]), *limits, *counts, ", ".join(row["models"]) or "all"]


@key.command(context_settings=HELP)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print what was removed as JSON.")
def remove(name: str, as_json: bool) -> None:
    """Remove the key NAME; gateways refuse it within seconds."""
    remove_key(name)
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"removed the key {name}", err=True)

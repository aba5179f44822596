"""`corral proxy NAME`: one address that stays, in front of a deployment and its successors."""

from __future__ import annotations

import click

from corral.cli.gateway import serve_until_signal
from corral.cli.options import Duration, deployment_argument
from corral.serve.fleet.chain import choose_folder
from corral.serve.gateway.process import proxy_process
from corral.serve.gateway.relay import GatewayLimits


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@deployment_argument
@click.option("--port", type=click.IntRange(1, 65535), help="Port (default: the one it had before, or a free one).")
@click.option("--bind", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--hold", "hold_s", type=Duration(), default=120, show_default=True, metavar="TIME",
              help="How long a request waits while no server is ready.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON when it ends.")
def command(name: str | None, port: int | None, bind: str, hold_s: float, as_json: bool) -> None:
    """Give NAME and its successors one address: new requests go to the newest server that is ready.

    Running requests finish where they began; a server that drains or refuses before it answered is no error. Clients
    send the deployment's key as ever. Ctrl-C ends it and prints what went through.
    """
    serve_until_signal(proxy_process(choose_folder(name), bind, port, GatewayLimits(hold_s=hold_s)), as_json)

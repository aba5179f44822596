"""The command line: one file per verb, loaded only when its verb is used, one error boundary.

Human text goes to stderr, data to stdout; `--json` wherever a program might read.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from corral import __version__
from corral.base.errors import INTERRUPTED, CorralError, DataError, UnreachableError, UsageError
from corral.base.home import refuse_foreign_home, watch_home
from corral.base.record import nearest
from corral.base.untrusted import plain, plain_json

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


# verb -> (module:attribute, one line for `corral --help`)
VERBS: dict[str, tuple[str, str]] = {
    "up": ("corral.cli.up:command", "Serve a model: install, fetch, start, watch until it answers."),
    "ps": ("corral.cli.ps:command", "Deployments and fleets, and their states."),
    "status": (
        "corral.cli.status:command",
        "One deployment in full: state, reason, endpoint, what the engine reported.",
    ),
    "logs": ("corral.cli.logs:command", "The engine's own log."),
    "events": ("corral.cli.events:command", "The journal: what happened, and when."),
    "wait": ("corral.cli.wait:command", "Wait until a deployment is ready."),
    "down": ("corral.cli.down:command", "Stop a deployment and leave nothing behind."),
    "chat": ("corral.cli.chat:command", "Talk with a model in the terminal."),
    "complete": ("corral.cli.complete:command", "Continue a prompt; show the probabilities of its tokens."),
    "console": ("corral.cli.console:command", "Everything on one page in the browser; a playground, plans and runs."),
    "top": ("corral.cli.top:command", "Live load: running, waiting, KV use, tokens per second."),
    "adapter": ("corral.cli.adapter:command", "LoRA adapters of a running deployment: add, list, remove."),
    "env": ("corral.cli.env:command", "Address and key as environment variables, for `eval`."),
    "batch": ("corral.cli.batch:command", "Run a file of prompts through a model; nothing is lost."),
    "score": ("corral.cli.score:command", "Likelihoods of texts, continuations and choices; resumable."),
    "eval": ("corral.cli.eval:command", "Tasks of lm-eval on a served model; resumable; two models compared."),
    "embed": ("corral.cli.embed:embed", "Vectors of a file's texts; resumable, also as Parquet."),
    "rerank": ("corral.cli.embed:rerank", "Documents of a file's rows ranked by a query; resumable."),
    "plan": ("corral.cli.plan:command", "Will it fit, how to split it, how fast will it be, and why."),
    "doctor": ("corral.cli.doctor:command", "What would go wrong on these nodes, with a remedy each."),
    "models": ("corral.cli.models:command", "Models by name: on disk, gated, and which fit this machine."),
    "pull": ("corral.cli.pull:command", "Bring a model's files to this machine, or onto nodes; resumable."),
    "engine": ("corral.cli.engine:command", "Installed engines: list, install, check, remove."),
    "profile": ("corral.cli.profile:command", "Places to run, by name: init, list, show, check, trust."),
    "slurm": ("corral.cli.slurm:command", "What a SLURM cluster has; the script of a deployment."),
    "tunnel": ("corral.cli.tunnel:command", "Bring the endpoint of a deployment elsewhere to this machine."),
    "scale": ("corral.cli.scale:command", "Give a fleet another number of members."),
    "fleet": ("corral.cli.fleet:command", "Fleets of several servers: keep one running, simulate its scaling."),
    "service": ("corral.cli.service:command", "Keepers of fleets and chains that come back after a boot."),
    "gateway": ("corral.cli.gateway:command", "One address for fleets and deployments; keys of its clients."),
    "proxy": ("corral.cli.proxy:command", "One address that stays, while servers behind it come and go."),
    "renew": ("corral.cli.renew:command", "Submit successors of a job before its time limit (see `up --renew`)."),
    "bench": ("corral.cli.bench:command", "Measure a served model, and how far it is from the limit."),
    "tune": ("corral.cli.tune:command", "Find vLLM's best settings for a workload, by measuring."),
    "simulate": ("corral.cli.simulate:command", "How a load would go on how many GPUs, and how sure that is."),
    "fake-server": ("corral.cli.fake_server:command", "A server with set pace and faults, for tests."),
}
# the verb with which a part of `corral --help` begins -> its heading
PARTS = {
    "up": "Serve a model",
    "chat": "Use it",
    "batch": "Many prompts",
    "plan": "Plan and prepare",
    "profile": "Clusters",
    "scale": "Several servers behind one address",
    "bench": "Measure",
}


# verbs of other tools
OTHER_VERBS = {
    "serve": "`corral up`",
    "start": "`corral up`",
    "launch": "`corral up`",
    "run": "`corral up MODEL`, `corral complete` or `corral batch`",
    "list": "`corral ps`",
    "ls": "`corral ps`",
    "stop": "`corral down`",
    "rm": "`corral down --purge`",
    "kill": "`corral down`",
    "delete": "`corral down --purge` or `corral models remove`",
    "remove": "`corral down --purge` or `corral models remove`",
    "deploy": "`corral up`",
    "show": "`corral status`",
    "info": "`corral status`",
    "install": "`corral engine install`",
    "help": "`corral --help`",
    "download": "`corral pull`",
    "generate": "`corral complete`",
    "ask": "`corral chat`",
    "keep": "`corral renew`",
}


class VerbGroup(click.Group):
    """A group that imports a verb's module only when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        command.name = cmd_name
        if ctx.resilient_parsing:  # for completion in a shell
            from corral.cli.completion import offer

            offer(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The verbs, without importing them."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(verb, help=text) for verb, (_, text) in VERBS.items() if verb.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            guesses = OTHER_VERBS.get(args[0]) or ", ".join(
                f"`corral {verb}`" for verb in nearest(args[0], list(VERBS))
            )
            hint = f" Did you mean {guesses}?" if guesses else " `corral --help` lists the verbs."
            raise click.UsageError(f"there is no verb {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        heading = ""
        parts: dict[str, list[tuple[str, str]]] = {}
        for verb, (_, summary) in VERBS.items():
            heading = PARTS.get(verb) or heading
            parts.setdefault(heading, []).append((verb, summary))
        for heading, rows in parts.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


@click.command(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="corral %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def root(debug: bool) -> None:
    """Corral serves open models with vLLM on the hardware you have.

    Begin with `corral up`; then `corral chat` or `corral console`. `corral VERB --help` has the options of a verb.
    """
    if debug:
        os.environ["CORRAL_DEBUG"] = "1"
    watch_home(lambda text: click.echo(f"corral: {text} …", err=True))
    refuse_foreign_home()


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with a documented code."""
    args = sys.argv[1:] if argv is None else argv
    colour = False if os.environ.get("NO_COLOR") else None  # as no-color.org asks; None: on a terminal
    try:
        code: Any = root.main(args=args, prog_name="corral", standalone_mode=False, color=colour, obj=tuple(args))
    except CorralError as error:
        if os.environ.get("CORRAL_DEBUG"):
            raise
        _report(error, as_json="--json" in args)
        sys.exit(error.exit_code)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        if os.environ.get("CORRAL_DEBUG"):
            raise
        refusal = _refusal(error)
        _report(refusal, as_json="--json" in args)
        sys.exit(refusal.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        sys.exit(2)
    except click.ClickException as error:
        _report_usage(error, as_json="--json" in args)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        if os.environ.get("CORRAL_DEBUG"):
            raise
        click.echo("corral: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if os.environ.get("CORRAL_DEBUG"):
            raise
        kind = f"{type(error).__name__}: {error}"
        _report(CorralError(f"an unexpected error: {kind}", "Please report it, with the output of `corral --debug`."),
                as_json="--json" in args)  # fmt: skip
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _refusal(error: OSError) -> CorralError:
    """A file that cannot be read or written, or else a connection that broke."""
    where = f": {error.filename}" if error.filename else ""
    if isinstance(error, ConnectionError | TimeoutError):
        return UnreachableError(f"{error.strerror or error}{where}.", "Try again later.")
    return DataError(f"{error.strerror or error}{where}.", "Check the path, its permissions and free space.")


def _report_usage(error: click.ClickException, as_json: bool) -> None:
    context = getattr(error, "ctx", None)
    remedy = f"`{context.command_path} --help` lists its options." if context else ""
    if as_json:
        _print_json(UsageError(error.format_message(), remedy))
    error.show()


def _print_json(error: CorralError) -> None:
    from corral.lab.report.screen import tell

    tell(json.dumps(plain_json(error.to_json()), ensure_ascii=False))


def _report(error: CorralError, as_json: bool) -> None:
    """Print an error with its remedy, and the last lines of the log where it has some."""
    from corral.lab.report.screen import explain_error, tell  # if the reader has left, the exit code stays

    if as_json:
        _print_json(error)
    explain_error(error)
    if tail := error.details.get("log_tail"):
        tell(click.style("\n  last lines of the log:", dim=True), err=True)
        for line in tail:
            tell(plain(f"  | {line}"), err=True)

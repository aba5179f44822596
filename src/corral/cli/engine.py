"""`corral engine`: the environments that Corral installs vLLM into."""

from __future__ import annotations

import platform
import sys
from typing import Any

import click

from corral.base.errors import ConflictError, UsageError
from corral.base.wording import duration
from corral.cli.help_pages import WholeGroup
from corral.cli.options import json_option
from corral.engines import PINNED_VERSION
from corral.engines import environments as engines
from corral.engines.locks import FLAVOURS, HARNESS, VERSIONS, LockedFor, locked
from corral.lab.report.screen import PhaseScreen, print_json, print_table

FLAVOUR = click.Choice(FLAVOURS)
INSTALLED = click.Choice(tuple(VERSIONS))


@click.group(cls=WholeGroup)
def command() -> None:
    """Engines are vLLM builds in environments of their own: pinned, hash-checked, one per flavour and version."""


@command.command("list")
@json_option()
def list_engines(as_json: bool) -> None:
    """What is installed."""
    engines_here = engines.installed()
    if as_json:
        print_json(engines_here)
    elif not engines_here:
        click.echo(
            "No engines. `corral engine install cpu` (or cuda) installs one; `corral up` does so by itself.", err=True
        )
    else:
        print_table(["ENGINE", "PYTHON", "INSTALLED IN", "PATH"],
                    [[e.name, e.python_version, duration(e.installed_s), e.path] for e in engines_here])  # fmt: skip


@command.command("install")
@click.argument("flavour", type=INSTALLED, required=False)
@click.option("--version", default="", show_default="the pinned one", help="Version of the engine.")
@click.option("--into", metavar="conda:NAME", help="Into a conda environment of your own, made if it is not there.")
@json_option()
def install(flavour: str | None, version: str, into: str | None, as_json: bool) -> None:
    """Install an engine, or lm-eval for `corral eval`; do nothing when it is there.

    With --into (conda:NAME, or conda:/PREFIX) into a conda environment for `--runtime conda`; without a flavour the
    one for GPUs, which login nodes of a cluster mostly lack.
    """
    version = version or VERSIONS[flavour or "cuda"]
    if into is not None:
        if flavour == HARNESS:
            raise UsageError("--into takes an engine, not lm-eval.", f"Name one: {', '.join(FLAVOURS)}.")
        _install_into(into, flavour or "cuda", version, as_json)
        return
    if flavour is None:
        raise UsageError("no engine was named.", f"Name one: {', '.join(FLAVOURS)}.")
    with PhaseScreen(quiet=as_json) as screen:
        screen.phase("installing engine")
        engine = engines.install(flavour, version, screen.detail, screen.note)
    print_json(engine) if as_json else click.echo(f"{engine.name} is installed at {engine.path}")


def _install_into(into: str, flavour: str, version: str, as_json: bool) -> None:
    from corral.engines.conda import install_into_conda

    kind, separator, env = into.partition(":")
    if kind != "conda" or not separator:
        raise UsageError(f"--into cannot be {into!r}.", "Write conda:NAME, or conda:/PREFIX.")
    with PhaseScreen(quiet=as_json) as screen:
        screen.phase("installing engine")
        conda = install_into_conda(env, flavour, version, screen.detail)
    if as_json:
        print_json(conda)
        return
    click.echo(f"vLLM {conda.version} ({conda.flavour}) is in the conda environment {conda.env}: {conda.prefix}")
    click.echo(f"Use it: corral up MODEL --runtime conda --runtime-option env={conda.env}")


@command.command("check")
@click.argument("flavour", type=FLAVOUR, required=False)
@click.option("--version", default=PINNED_VERSION, show_default=True, help="Version of the engine.")
@json_option()
def check(flavour: str | None, version: str, as_json: bool) -> None:
    """Import an engine in its environment and say what it is made of (default: the one that is installed).

    And for which platforms every file of the engines is locked by its hash; that needs no engine.
    """
    engines_here, rows = engines.installed(), locked()
    wanted = flavour or next((engine.flavour for engine in engines_here if engine.flavour in FLAVOURS), None)
    versions = _imported(wanted, version, as_json) if wanted else {}
    if as_json:
        print_json({**versions, "locked": rows})
        return
    if versions:
        print_table(["PART", "VERSION"], [[name, value or "-"] for name, value in versions.items()])
    else:
        click.echo("No engine is installed: `corral engine install cpu` (or cuda); `corral up` does so by itself.")
    click.echo("\nEvery file is locked by its hash for:")
    print_table(["ENGINE", "PLATFORM", "PYTHON", "PACKAGES", "GLIBC", ""], _locked_rows(rows))


def _imported(flavour: str, version: str, quiet: bool) -> dict[str, Any]:
    """What the engine is made of; importing vLLM takes some ten seconds, in which something must be seen."""
    with PhaseScreen(quiet=quiet) as screen:
        screen.phase("importing vLLM")
        return engines.check(flavour, version)


def _locked_rows(rows: list[LockedFor]) -> list[list[str]]:
    """One row per platform; the last cell says what lacks a locked file, or that it is this machine's."""
    here = (platform.machine(), f"{sys.version_info.major}.{sys.version_info.minor}")

    def remark(row: LockedFor) -> str:
        if row.missing:
            return f"not locked: {', '.join(row.missing)}"
        return "this machine" if (row.platform, row.python) == here else ""

    name = PINNED_VERSION
    return [
        [f"{row.flavour}-{name}", row.platform, row.python, str(row.packages), f"{row.glibc} or later", remark(row)]
        for row in rows
    ]


@command.command("remove")
@click.argument("flavour", type=INSTALLED)
@click.option("--version", default="", show_default="the pinned one", help="Version of the engine.")
@json_option()
def remove(flavour: str, version: str, as_json: bool) -> None:
    """Delete an engine's environment; refused while a deployment runs from it."""
    from corral.deploy.deployment.state import ENDED
    from corral.deploy.lifecycle.deployments import statuses

    version = version or VERSIONS[flavour]
    for status in statuses():
        if status.engine == f"{flavour}-{version}" and status.state not in ENDED:
            raise ConflictError(
                f"{status.name!r} runs from {status.engine}.", f"Stop it first: corral down {status.name}"
            )
    engines.remove(flavour, version)
    print_json({"removed": f"{flavour}-{version}"}) if as_json else click.echo(f"{flavour}-{version} removed")

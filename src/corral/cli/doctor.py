"""`corral doctor`: what would go wrong on these nodes, before anything is started on them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import click

from corral.base.errors import ConflictError, LaunchError, UsageError
from corral.base.files import write_atomic
from corral.base.home import home_dir
from corral.base.record import to_json
from corral.base.ssh import typed_hosts
from corral.cli.help_pages import FormerOption, RenamedOption
from corral.cli.options import Duration, json_option
from corral.deploy.doctor import readiness
from corral.deploy.doctor.examination import Question, examine
from corral.deploy.doctor.finding import Level, Report
from corral.deploy.lifecycle.orphans import find_orphans
from corral.deploy.profile.merging import merged, storage_of
from corral.deploy.profile.profile import load_profile
from corral.deploy.targets.keys import target_class
from corral.engines.runtimes.base import RUNTIMES
from corral.lab.report.doctor import report_lines
from corral.lab.report.screen import PhaseScreen, print_json
from corral.plan.hardware.inventory import recognise
from corral.plan.measured import StorageReading, remember_storage_speed
from corral.plan.places import Storage


@click.command()
@click.argument("model", required=False)
@click.option(
    "--hosts", metavar="A,B,…", help="Nodes, as ssh knows them; @FILE: one per line (default: this machine)."
)
@click.option("--on", "profile", metavar="PROFILE", help="The nodes and runtime of a profile.")
@click.option("--model", "model_before", cls=FormerOption, argument="MODEL")
@click.option("--runtime", type=click.Choice(list(RUNTIMES)),
              help="How vLLM is installed on the nodes (default: managed, or the profile's).")  # fmt: skip
@click.option("--interface", metavar="NAME|NETWORK", help="Interface or network between the nodes (default: found).")
@click.option("--port", "ports", type=click.IntRange(1, 65535), multiple=True, help="Port that must be free.")
@click.option("--quick", is_flag=True, help="Only what `corral up` checks: nothing is measured.")
@click.option("--deadline", "timeout_s", cls=RenamedOption, was="--timeout", type=Duration(5), default=60,
              show_default=True, metavar="TIME", help="The whole examination ends within this.")  # fmt: skip
@click.option("--fix-script", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write the commands that make the nodes ready into FILE, to read and run there.")  # fmt: skip
@click.option("--orphans", is_flag=True, help="List jobs, processes and containers that no deployment owns.")
@json_option("The report as one JSON document.")
def command(
    hosts: str | None,
    profile: str | None,
    model: str | None,
    model_before: str | None,
    runtime: str | None,
    interface: str | None,
    ports: tuple[int, ...],
    quick: bool,
    timeout_s: float,
    fix_script: Path | None,
    orphans: bool,
    as_json: bool,
) -> int:
    """Examine nodes and list what would keep a deployment from working there, with a remedy each.

    MODEL is one that all nodes should see: a folder, a name, or owner/name of the hub.

    Nothing is changed and no process is ended. Exit code 8 when something fatal was found.
    """
    chosen_hosts = typed_hosts(hosts) if hosts else ()
    if orphans:
        _show(find_orphans(chosen_hosts, timeout_s), as_json)
        return 0
    question = Question(model=model or model_before, interface=interface, quick=quick, timeout_s=timeout_s)
    if profile:
        question = _of_profile(question, profile, chosen_hosts)
    question = _with_flags(question, chosen_hosts, ports, runtime)
    with PhaseScreen(quiet=as_json) as screen:
        report = examine(question, screen.phase)
    _remember(report)
    _show(report, as_json)
    if fix_script:
        _write_script(fix_script, readiness.fix_script(report.nodes, question.runtime))
    return LaunchError.exit_code if report.level == Level.FATAL else 0


def _with_flags(question: Question, hosts: tuple[str, ...], ports: tuple[int, ...], runtime: str | None) -> Question:
    if hosts:
        question = dataclasses.replace(question, hosts=hosts)
    if ports:
        question = dataclasses.replace(question, ports=ports, ports_needed=True)
    if runtime and runtime != question.runtime:
        question = dataclasses.replace(question, runtime=runtime, runtime_options={})
    repeated = sorted({host for host in question.hosts if question.hosts.count(host) > 1})
    if repeated:
        raise UsageError(f"the host {repeated[0]!r} is named twice.", "Name each node once.")
    return question


def _write_script(path: Path, script: str) -> None:
    """Write the script, unless there is nothing to do; a file that `corral doctor` did not write is not replaced."""
    if not script:
        click.echo(f"nothing to fix by a script: {path} is not written", err=True)
        return
    if path.exists() and readiness.HEADER not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConflictError(f"{path} exists and was not written by `corral doctor`.", "Name another file.")
    write_atomic(path, script, 0o700)
    click.echo(f"{path}: read it, copy it to the node, and run it there: bash {path.name}", err=True)


def _remember(report: Report) -> None:
    """Remember how fast the slowest node reads, for the load times in plans for such nodes."""
    measured = [node for node in report.nodes if node.read_speed and node.read_speed.seconds]
    if not measured:
        return
    slowest = min(measured, key=lambda node: node.read_speed.bytes_per_s if node.read_speed else 0.0)
    assert slowest.read_speed is not None
    gpu = recognise(slowest.gpus[0].name, slowest.gpus[0].memory_bytes)[0] if slowest.gpus else "CPU"
    reading = StorageReading(slowest.read_speed.bytes_per_s / 1e9, slowest.read_speed.file, time.time())
    with contextlib.suppress(OSError):
        remember_storage_speed(home_dir(), gpu, reading)


def _of_profile(question: Question, name: str, hosts: tuple[str, ...]) -> Question:
    """The nodes and the runtime of a profile; one without hosts is refused, never taken for this machine."""
    profile = load_profile(name)
    declared = target_class(profile.target)
    if not declared.NODES_KNOWN:
        remedy = "Its nodes are known only inside a job; on a node, `corral doctor` without --on examines that node."
        raise UsageError(f"the profile {name!r} is for {profile.target}.", remedy)
    request = merged(
        profile, {"target_options": {"hosts": list(hosts)}} if hosts and "hosts" in declared.REQUIRED else {}
    )
    options: dict[str, Any] = request["target_options"]
    return dataclasses.replace(
        question,
        hosts=tuple(options.get("hosts", ())),
        identity=options.get("identity"),
        config=options.get("config"),
        interface=question.interface or options.get("interface"),
        hca=options.get("hca"),
        home=options.get("home"),
        storage=Storage(**storage_of(profile)),
        env=dict(options.get("env", {})),
        runtime=request["runtime"],
        runtime_options=request["runtime_options"],
    )


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        states = {host: report.of(host).value for host in report.hosts}
        print_json({"level": report.level, "states": states, **to_json(report)})
        return
    for line in report_lines(report):
        click.echo(line)

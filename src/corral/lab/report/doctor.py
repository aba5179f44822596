"""The report of `corral doctor`: a row per node, then problems with a remedy each, then what is in order.

Made for 60 columns and more; the same sentence about many nodes is one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from corral.base.wording import counted
from corral.deploy.doctor.finding import Finding, Level, Report
from corral.lab.report.tables import reading_width, table_lines, wrapped
from corral.node.network import some_of
from corral.plan.hardware.inventory import GIB
from corral.plan.hardware.survey import NodeFacts

COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FATAL: "red"}
MOST_ROWS = 40
HEADINGS = ("NODE", "STATE", "PYTHON", "CORES", "MEMORY", "GPUS", "DISK", "ADDRESS")
# on a narrow terminal, in this order
LEFT_OUT_FIRST = ("PYTHON", "CORES", "DISK", "MEMORY", "ADDRESS")
_STATE, _WHAT = 9, 12


def report_lines(report: Report) -> Iterator[str]:
    """The whole report."""
    columns = reading_width()
    yield from _table(report, columns)
    yield ""
    problems = [f for level in (Level.FATAL, Level.WARNING) for f in report.findings if f.level == level]
    for group in _grouped(problems):
        yield from _entry(group, columns, len(report.hosts))
    fine = [finding for finding in report.findings if finding.level == Level.OK]
    if problems and fine:
        yield ""
    for finding in fine:
        yield from _entry([finding], columns, len(report.hosts))
    yield ""
    yield _verdict(report)


def _verdict(report: Report) -> str:
    count = {level: len(_grouped([f for f in report.findings if f.level == level])) for level in Level}
    if report.level == Level.FATAL:
        text = f"{counted(count[Level.FATAL], 'problem')} to fix before anything can start"
    elif report.level == Level.WARNING:
        text = f"this works; {counted(count[Level.WARNING], 'thing')} to look at"
    else:
        text = "all is well"
    return click.style(text, fg=COLOURS[report.level], bold=True) + f"  ({report.seconds:.1f} s)"


def _grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings with the same sentence about several nodes, apart from the node's own name in it."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        plain = finding.text.replace(finding.host, "NODE") if finding.host else finding.text
        groups.setdefault((finding.level, finding.what, plain), []).append(finding)
    return list(groups.values())


def _entry(group: Sequence[Finding], columns: int, nodes: int) -> Iterator[str]:
    first = group[0]
    hosts = [finding.host for finding in group if finding.host]
    text = first.text
    if len(hosts) > 1:
        text = f"{some_of(hosts)}: {text.replace(first.host, 'NODE')}"
    elif hosts and nodes > 1 and first.host not in text:
        text = f"{first.host}: {text}"
    indent = " " * (_STATE + _WHAT)
    lines = wrapped(text, columns, f"{first.level.value:<{_STATE}}{first.what:<{_WHAT}}", indent)
    state = click.style(lines[0][:_STATE], fg=COLOURS[first.level], bold=first.level == Level.FATAL)
    yield from (f"{state}{lines[0][_STATE:]}", *lines[1:])
    if first.remedy:
        remedy = first.remedy.replace(first.host, "NODE") if len(hosts) > 1 else first.remedy
        yield from (click.style(line, dim=True) for line in wrapped(remedy, columns, f"{indent}→ ", f"{indent}  "))
    for line in first.commands:  # to be pasted: never cut
        yield f"    {line}"


def _table(report: Report, columns: int) -> Iterator[str]:
    facts = {node.host: node for node in report.nodes}
    hosts = sorted(report.hosts, key=lambda host: report.of(host) == Level.OK)[:MOST_ROWS]
    hosts = [host for host in report.hosts if host in hosts]
    rows = [_row(host, report, facts.get(host)) for host in hosts]

    def paint(number: int, heading: str, cell: str) -> str:
        return click.style(cell, fg=COLOURS[report.of(hosts[number])]) if heading == "STATE" else cell

    yield from table_lines(HEADINGS, rows, columns=columns, spared=LEFT_OUT_FIRST, paint=paint)
    if len(report.hosts) > len(hosts):
        yield f"… and {len(report.hosts) - len(hosts)} more nodes without a problem"


def _row(host: str, report: Report, node: NodeFacts | None) -> list[str]:
    state = report.of(host).value
    if node is None:
        return [host, state, *["–"] * (len(HEADINGS) - 2)]
    address = report.fabric.addresses.get(host, "–") if report.fabric else "–"
    free = min((disk.free_bytes for disk in node.disks.values()), default=0)
    memory = f"{node.memory_available_bytes / GIB:.0f} of {node.memory_bytes / GIB:.0f} GiB"
    names = sorted({gpu.name.removeprefix("NVIDIA ") for gpu in node.gpus})
    cells = {
        "NODE": host,
        "STATE": state,
        "PYTHON": node.python or "–",
        "CORES": str(node.cores or "–"),
        "MEMORY": memory if node.memory_bytes else "–",
        "GPUS": f"{len(node.gpus)} × {'/'.join(names)}" if names else "none",
        "DISK": f"{free / GIB:.0f} GiB" if node.disks else "–",
        "ADDRESS": address,
    }
    return [cells[heading] for heading in HEADINGS]

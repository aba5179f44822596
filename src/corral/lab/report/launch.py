"""What `corral up --dry-run` says: model, plan, nodes, address, ports, files and command of a launch."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from corral.base.wording import counted, duration
from corral.deploy.launch.render import LaunchSpec
from corral.lab.report.plan import LABEL, row, shape
from corral.lab.report.tables import reading_width
from corral.plan.contract import Plan


def launch_lines(plan: Plan, spec: LaunchSpec) -> Iterator[str]:
    """One deployment; of several ranks the command of the first."""
    columns, head = reading_width(), spec.ranks[0]
    yield f"{click.style(spec.deployment, bold=True)}: what would be started"
    yield ""
    size = f", {spec.weights_bytes / 1e9:.2g} GB" if spec.weights_bytes else ""
    yield from row(
        "model", f"{spec.model}{size}, from {spec.model_path}; clients call it {spec.served_name}", columns
    )
    yield from shape(plan, columns)
    how = f"{spec.engine}, runtime {spec.runtime}, target {spec.target}"
    nodes = list(dict.fromkeys(rank.node for rank in spec.ranks))
    joined = f" ({counted(len(nodes), 'node')}, link {spec.link})" if len(nodes) > 1 else ""
    yield from row("engine", f"vLLM {how}", columns)
    yield from row("runs on", f"{', '.join(nodes)}{joined}", columns)
    if spec.base_url:
        yield from row("address", spec.base_url, columns)
    yield from row("ports", "; ".join(_ports(spec)) or "chosen where it starts", columns)
    yield from _whole("files", f"{Path(head.cwd).parent}: key, log, events", columns)
    if spec.expected:
        phases = ", ".join(f"{name} {duration(one.seconds)}" for name, one in spec.expected.items())
        yield from row(
            "start", f"about {duration(sum(one.seconds for one in spec.expected.values()))}: {phases}", columns
        )
    if spec.script:
        yield from row("job", f"a batch script of {len(spec.script.splitlines())} lines; --shell prints it", columns)
    yield from _whole("command", shlex.join(head.argv), columns)
    if len(spec.ranks) > 1:
        yield from row("", f"and the other {counted(len(spec.ranks) - 1, 'rank')}: --json has each", columns)


def fleet_launch_lines(launches: Sequence[tuple[Plan, LaunchSpec]]) -> Iterator[str]:
    """The first member of a fleet in full, and where the others run."""
    yield from launch_lines(*launches[0])
    yield ""
    for _, spec in launches[1:]:
        nodes = ", ".join(dict.fromkeys(rank.node for rank in spec.ranks))
        yield from row(spec.deployment, f"the same on {nodes}{f' at {spec.base_url}' if spec.base_url else ''}",
                       reading_width())  # fmt: skip


def _ports(spec: LaunchSpec) -> Iterator[str]:
    serving = sorted({rank.serve.port for rank in spec.ranks if rank.serve})
    if serving and serving[0]:
        yield f"{', '.join(map(str, serving))} for requests"
    if spec.gang and spec.gang.port:
        yield f"{spec.gang.port} for heartbeats between the nodes"


def _whole(label: str, text: str, columns: int) -> Iterator[str]:
    """A row in which no word is cut, so that paths can be copied."""
    lines = textwrap.wrap(text, columns - LABEL - 2, break_on_hyphens=False, break_long_words=False)
    for i, line in enumerate(lines):
        yield f"  {'' if i else label:<{LABEL}}{line}"

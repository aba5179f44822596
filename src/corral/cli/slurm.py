"""`corral slurm`: what the cluster has, and what was submitted to it."""

from __future__ import annotations

import click

from corral.base.errors import NotFoundError
from corral.base.wording import duration
from corral.cli.help_pages import WholeGroup
from corral.cli.options import deployment_argument, json_option
from corral.deploy.slurm.cluster import NodeShape, Partition, discover, gpu_kind
from corral.lab.report.screen import print_json, print_table
from corral.serve.fleet.chain import choose_folder


@click.group(cls=WholeGroup)
def command() -> None:
    """What a SLURM cluster has, and the batch scripts of deployments."""


@command.command()
@json_option("All of it as JSON.")
def partitions(as_json: bool) -> None:
    """Partitions: kinds of GPU, nodes, limits, what is idle now."""
    cluster = discover()
    if as_json:
        print_json(cluster)
        return
    headings = [
        "PARTITION",
        "GPUS PER NODE",
        "NODES",
        "IDLE NODES",
        "IDLE GPUS",
        "CPUS",
        "MEMORY",
        "LONGEST",
        "ACCESS",
    ]
    rows = [_row(partition, shape) for partition in cluster.partitions for shape in partition.shapes]
    print_table(headings, rows)


def _row(partition: Partition, shape: NodeShape) -> list[str]:
    longest = duration(partition.max_time_s) if partition.max_time_s else "no limit"
    access = ",".join(partition.accounts) or "all"
    return [
        partition.name + ("*" if partition.default else ""),
        f"{shape.gpus} × {gpu_kind(shape.gpu)}" if shape.gpus else "-",
        f"{shape.usable_nodes} of {shape.nodes}" if shape.usable_nodes < shape.nodes else str(shape.nodes),
        str(shape.idle_nodes),
        str(shape.idle_gpus) if shape.gpus else "-",
        str(shape.cpus),
        f"{shape.memory_mib / 1024:.0f} GiB",
        longest,
        access if partition.open else "closed",
    ]


@command.command()
@deployment_argument
@json_option("The script and where it lies as one JSON document.")
def script(name: str | None, as_json: bool) -> None:
    """Print the batch script of deployment NAME as it was submitted."""
    folder = choose_folder(name)
    if not folder.script.is_file():
        raise NotFoundError(f"{folder.name!r} was not started through SLURM.", "`corral status` says where it runs.")
    text = folder.script.read_text(encoding="utf-8")
    if as_json:
        print_json({"name": folder.name, "path": str(folder.script), "script": text})
    else:
        click.echo(text, nl=False)

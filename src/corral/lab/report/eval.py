"""What people see of evaluations: tables in the terminal, and the page of a comparison."""

from __future__ import annotations

from html import escape

import click

from corral.base.wording import counted, duration
from corral.lab.eval.compare import EvalComparison, MetricChange
from corral.lab.eval.run import EvalOutcome
from corral.lab.report.html import cards, document, table
from corral.lab.report.screen import print_table


def print_outcome(outcome: EvalOutcome, folder: str) -> None:
    """Metrics to stdout; how it went to stderr."""
    rows = []
    for task, result in outcome.tasks.items():
        for key, value in result.metrics.items():
            metric, _, filter_name = key.partition(",")
            error = result.stderr.get(key)
            rows.append([
                task, metric if filter_name == "none" else key, f"{value:.4f}", f"± {error:.4f}" if error else "",
                f"{result.items:,}", str(result.num_fewshot),
            ])  # fmt: skip
    for group, metrics in outcome.groups.items():
        rows += [[group, key.removesuffix(",none"), f"{value:.4f}", "", "", ""] for key, value in metrics.items()]
    print_table(["TASK", "METRIC", "VALUE", "STDERR", "ITEMS", "SHOTS"], rows, left=2)
    asked = f"{counted(outcome.asked, 'request')} in {duration(outcome.wall_s)}"
    tokens = f"{outcome.prompt_tokens:,} prompt tokens, {outcome.output_tokens:,} written"
    click.echo(f"{asked} ({tokens}), {outcome.kept:,} answered before. Items and record: {folder}", err=True)
    if outcome.ignored:
        click.echo(f"Parameters that vLLM does not have were left out: {', '.join(outcome.ignored)}", err=True)


def print_comparison(found: EvalComparison) -> None:
    """A sentence for each metric, then what differs."""
    for change in found.changes:
        click.echo(change.sentence)
    for side, tasks in zip(("first", "second"), found.only, strict=True):
        if tasks:
            click.echo(f"Only the {side} has: {', '.join(tasks)}", err=True)
    if found.differs:
        print_table(["DIFFERS", "FIRST", "SECOND"], [list(row) for row in found.differs], left=3)


_CLASS = {"better": "valid", "worse": "invalid"}


def comparison_page(found: EvalComparison, names: tuple[str, str]) -> str:
    """One HTML file: the intervals, what differs, and the items that changed."""
    title = f"{names[0]} against {names[1]}"
    body = [f"<h1>{escape(title)}</h1>"]
    for change in found.changes:
        body.append(f'<div class="verdict {_CLASS.get(change.verdict, "caution")}">{escape(change.sentence)}</div>')
    heads = ["task", "metric", names[0], names[1], "difference", "95% interval", "items", "better", "worse"]
    body += [cards([("metrics", str(len(found.changes))), ("items that changed", str(_distinct(found)))])]
    body += ["<h2>Metrics</h2>", table(heads, [_row(change) for change in found.changes])]
    if found.differs:
        body += ["<h2>What differs beside</h2>", table(("", *names), found.differs, "facts")]
    body += ["<h2>Items that changed</h2>"]
    for key in dict.fromkeys((item.task, item.metric) for item in found.items):
        moved = [item for item in found.items if (item.task, item.metric) == key]
        rows = [
            (str(i.item), i.prompt, i.target, *i.answers, f"{i.values[0]:.4g} → {i.values[1]:.4g}") for i in moved
        ]
        body.append(f"<h3>{escape(' '.join(key))}: {counted(len(moved), 'item')}</h3>")
        body.append(table(("item", "prompt, its end", "target", *names, "value"), rows, "items"))
    return document(title, body)


def _distinct(found: EvalComparison) -> int:
    return len({(item.task, item.item) for item in found.items})


def _row(change: MetricChange) -> tuple[str, ...]:
    bounds = "–" if change.low is None or change.high is None else f"{change.low:+.4g} to {change.high:+.4g}"
    return (
        change.task, change.metric, f"{change.a:.4g}", f"{change.b:.4g}", f"{change.difference:+.4g}", bounds,
        str(change.items), str(change.better), str(change.worse),
    )  # fmt: skip

"""The table of `corral top`: the most important columns at 60 characters, all but the model at 80, all at 120."""

from __future__ import annotations

from collections.abc import Sequence

import click

from corral.lab.report.tables import cut, table_lines, wrapped
from corral.use.llm.top import Line

WIDE, MEDIUM = 118, 78  # columns from which on there is room for more
HEADINGS = ["NAME", "RUNNING", "WAITING", "KV USE", "TOK/S", "PROMPT TOK/S", "TTFT", "PREFIX HITS", "MODEL"]
SHORT = {"RUNNING": "RUN", "WAITING": "WAIT", "KV USE": "KV", "PROMPT TOK/S": "PROMPT/S", "PREFIX HITS": "HITS"}
NARROW = ["NAME", "RUNNING", "WAITING", "KV USE", "TOK/S", "TTFT"]


def screen_lines(servers: Sequence[Line], columns: int) -> list[str]:
    """The live screen: one row for each server, and below why some have no figures."""
    shown = HEADINGS if columns >= WIDE else HEADINGS[:-1] if columns >= MEDIUM else NARROW
    rows = [[_cells(line, columns)[heading] for heading in shown] for line in servers]
    tail = 1 if shown[-1] == "MODEL" else 0
    lines = [*table_lines([SHORT.get(one, one) for one in shown], rows, 1, tail=tail), "Ctrl-C or q leaves"]
    for line in servers:
        if line.reading is None:
            lines += [click.style(text, fg="red") for text in wrapped(f"{line.name}: {line.problem}", columns - 1)]
    return lines


def _cells(line: Line, columns: int) -> dict[str, str]:
    cells = dict(zip(HEADINGS, row_of(line), strict=True))
    if line.reading is None:
        cells = dict.fromkeys(HEADINGS, "") | {"NAME": line.name}
    elif columns >= WIDE and line.reading.kv_use is not None:
        cells["KV USE"] = f"{_bar(line.reading.kv_use)} {cells['KV USE']}"
    widest = {"NAME": 24 if columns >= MEDIUM else 16, "MODEL": 25}
    return {heading: cut(cell, widest.get(heading, columns)) for heading, cell in cells.items()}


def _bar(share: float, width: int = 10) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def row_of(line: Line) -> list[str]:
    """One server as a row under `HEADINGS`."""
    if line.reading is None:
        return [line.name, "-", "-", "-", "-", "-", "-", "-", line.problem]
    reading, load = line.reading, line.load
    return [
        line.name,
        "-" if reading.running is None else str(reading.running),
        "-" if reading.waiting is None else str(reading.waiting),
        "-" if reading.kv_use is None else f"{reading.kv_use:.1%}",
        _number(load.generated_tokens_per_s if load else None),
        _number(load.prompt_tokens_per_s if load else None),
        "-" if load is None or load.ttft_s is None else f"{load.ttft_s * 1000:,.0f} ms",
        "-" if load is None or load.prefix_hit_share is None else f"{load.prefix_hit_share:.0%}",
        line.model,
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"

"""Plans for people: a screenful that reads at a glance, in 80 columns or more."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from corral.base.wording import counted, duration
from corral.deploy.profile.drafting import up_command, vllm_command
from corral.deploy.profile.merging import PlanRequest
from corral.deploy.profile.profile import Profile
from corral.lab.report import tables
from corral.lab.report.tables import reading_width
from corral.plan.candidate import Candidate, over_nodes
from corral.plan.contract import Plan
from corral.plan.hardware.inventory import GIB, Gpu
from corral.plan.measured import Differences
from corral.plan.precision import Form
from corral.plan.reasons import load_words
from corral.plan.speed import significant

if TYPE_CHECKING:
    from corral.plan.need import Cell, Need, ReplicaAdvice, TableRow

LABEL = 13
_MOST_REFUSED = 5  # of what cannot run, shown
_BAR = (("weights", "█"), ("activations", "▓"), ("graphs", "▒"), ("overhead", "▒"), ("KV cache", "░"))


def about(value: float | None) -> str:
    """A prediction in the two digits it can claim, or a dash."""
    if value is None:
        return "–"
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def seconds(value: float | None) -> str:
    """A predicted time in the two digits it can claim, or a dash."""
    return "–" if value is None else duration(significant(value, 2))


def replica_lines(advice: ReplicaAdvice) -> list[str]:
    """How several replicas run, and why."""
    from corral.plan.need import ReplicaForm

    whole = advice.form is ReplicaForm.ENGINE
    servers = f"{advice.replicas} servers behind one address"
    what = f"{advice.replicas} replicas in one engine (DP {advice.replicas})" if whole else servers
    text = f"{what}, because {advice.because}. The plan of {'it' if whole else 'each'}:"
    return textwrap.wrap(text, reading_width())


def row(label: str, text: str, columns: int) -> list[str]:
    """A label, and a text that is wrapped beside it."""
    wrapped = textwrap.wrap(text, columns - LABEL - 2, break_on_hyphens=False) or [""]
    return [f"  {label:<{LABEL}}{wrapped[0]}", *(" " * (LABEL + 2) + line for line in wrapped[1:])]


def _because(plan: Plan, field: str) -> str:
    return next((r.because for r in plan.reasons if r.field == field), "")


def _memory_bar(plan: Plan, columns: int) -> str:
    m = plan.memory
    total = plan.inventory.memory_bytes_per_gpu or m.budget_bytes_per_gpu
    weights = m.weights_bytes_per_gpu + m.draft_bytes_per_gpu
    sizes = (weights, m.activation_bytes_per_gpu, m.counted_graph_bytes, m.overhead_bytes_per_gpu,
             m.kv_cache_bytes_per_gpu)  # fmt: skip
    room = min(60, columns - LABEL - 2)
    bar = "".join(block * round(room * size / total) for (_, block), size in zip(_BAR, sizes, strict=True))
    return bar[:room].ljust(room, "·")


def _memory_text(plan: Plan) -> str:
    m = plan.memory
    parts = [f"weights {m.weights_bytes_per_gpu / GIB:.1f}"]
    if m.draft_bytes_per_gpu:
        parts.append(f"draft {m.draft_bytes_per_gpu / GIB:.1f}")
    parts.append(f"activations {m.activation_bytes_per_gpu / GIB:.1f}")
    if m.counted_graph_bytes:
        parts.append(f"graphs {m.counted_graph_bytes / GIB:.1f}")
    rest = "not used" if plan.model.encoder else "KV cache"
    parts += [f"overhead {m.overhead_bytes_per_gpu / GIB:.1f}", f"{rest} {m.kv_cache_bytes_per_gpu / GIB:.1f}"]
    of = "free" if plan.inventory.gpu is None else "usable"
    return f"{' + '.join(parts)} of {m.budget_bytes_per_gpu / GIB:.1f} GiB {of}"


def plan_lines(
    plan: Plan, model: str, asked: PlanRequest, profile: Profile | None = None, replicas: int = 1
) -> Iterator[str]:
    """The plan, top to bottom: verdict, split, memory, speed, what else was considered, how to start it."""
    columns = reading_width()
    colour = "yellow" if plan.barely else "green" if plan.fits else "red"
    verdict = click.style(plan.verdict, fg=colour, bold=True)
    yield f"{click.style(plan.model.name, bold=True)} on {plan.inventory.label}: {verdict}"
    yield ""
    if not plan.fits or plan.barely:
        yield from row("why", plan.reason, columns)
    if plan.barely:
        yield from _nearest(plan, columns)
        yield ""
    if plan.verdict != "cannot run as asked":
        yield from shape(plan, columns)
    if plan.fits:
        yield from _numbers(plan, columns)
    for warning in plan.warnings:
        yield from row("warning", warning, columns)
    for note in plan.notes:
        yield from row("note", note, columns)
    if plan.rejected:
        yield ""
        for i, other in enumerate(plan.rejected[:5]):
            yield from row("" if i else "not taken", f"{other.what}: {other.because}", columns)
        if len(plan.rejected) > 5:
            yield from row("", f"… and {len(plan.rejected) - 5} more: --explain, --compare", columns)
    if plan.nearest and not plan.barely:
        yield ""
        yield from _nearest(plan, columns)
    if plan.fits:
        yield ""
        start = up_command(plan, model, asked, profile, replicas)
        yield f"  {'start it':<{LABEL}}{start}"  # not wrapped: made to be copied
        yield f"  {'or by hand':<{LABEL}}{vllm_command(plan, asked.rest)}"


def _nearest(plan: Plan, columns: int) -> Iterator[str]:
    """What would fit, with the options to give; beside a plan that barely fits also what it gains."""
    heading = {"does not fit": "would fit", "barely fits": "better"}.get(plan.verdict, "would run")
    now = plan.speed.throughput_tokens_per_s
    for i, near in enumerate(plan.nearest):
        text, speed = near.what, near.throughput_tokens_per_s
        if plan.barely:
            times = f" and {speed / now:.1f} × the tokens/s" if speed and now else ""
            text += f": a context of {near.max_model_len:,}{times}"
        yield from row("" if i else heading, f"{text}  ({near.change})", columns)


def shape(plan: Plan, columns: int) -> Iterator[str]:
    """Precision, split, context and memory: of the plan, or of what came nearest to fitting."""
    if plan.precision.how != "native" or plan.precision.weights != plan.model.dtype or plan.inventory.gpu is None:
        yield from row("weights", f"{plan.precision.weights}: {_because(plan, 'precision.weights')}", columns)
    if plan.inventory.gpu:
        yield from row("split", f"{plan.parallel} · {_because(plan, _deciding(plan))}", columns)
    yield from row("context", f"{plan.max_model_len:,} tokens · {_because(plan, 'max_model_len')}", columns)
    per = "memory/GPU" if plan.inventory.gpu else "memory"
    yield from row(per, _memory_text(plan), columns)
    yield " " * (LABEL + 2) + click.style(_memory_bar(plan, columns), fg="cyan")


def _deciding(plan: Plan) -> str:
    if plan.parallel.data > 1:
        return "parallel.data"
    wide = over_nodes(plan.parallel, plan.inventory) or not plan.fits
    return "parallel.pipeline" if plan.parallel.pipeline > 1 and not wide else "parallel.tensor"


def _numbers(plan: Plan, columns: int) -> Iterator[str]:
    m, s = plan.memory, plan.speed
    replicas = f", {m.kv_cache_tokens_per_replica:,} in each replica" if plan.parallel.data > 1 else ""
    if plan.model.encoder:
        yield from row("KV cache", "none: it reads a text at once and keeps nothing of it", columns)
        yield from row("speed", plan.speed.basis, columns)
        return
    yield from row("KV cache", f"{m.kv_cache_tokens:,} tokens{replicas}", columns)
    if s.decode_tokens_per_s is None:
        known = "unknown: nothing is known of this GPU's bandwidth" if plan.model.writes else s.basis
        yield from row("speed", known, columns)
        return
    yield from row("one stream", f"about {about(s.decode_tokens_per_s)} tokens/s", columns)
    together = f"about {about(s.throughput_tokens_per_s)} tokens/s at {counted(s.concurrency, 'request')}"
    yield from row("together", f"{together} of {s.prompt_tokens} + {s.output_tokens} tokens", columns)
    yield from row("first token", f"about {seconds(s.ttft_s)} after {s.prompt_tokens} prompt tokens, alone", columns)
    words = f": {load_words(s)}" if s.storage_gb_s else ""
    yield from row("load", f"about {seconds(s.load_s)}{words}", columns)
    yield from row("basis", s.basis, columns)
    if plan.cost.per_hour is not None:
        million = plan.cost.per_million_tokens
        each = f", {million:.2f} per million output tokens when busy" if million else ""
        yield from row("cost", f"{plan.cost.per_hour:.2f} per hour{each}", columns)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    yield from tables.table_lines(headings, rows, left, tables.room())


def comparison_lines(rows: Sequence[tuple[Form, Candidate]], most: int = 20) -> Iterator[str]:
    """Alternatives side by side, best first; the last column says why a row cannot run."""
    runs = [c for _, c in rows if not c.problem]
    table = [
        (
            str(c.parallel).replace(" × ", "·"),
            _bits(c),
            f"{c.max_model_len:,}",
            f"{c.memory.kv_cache_tokens:,}",
            about(c.speed.decode_tokens_per_s),
            about(c.speed.throughput_tokens_per_s),
            f"{c.memory.weights_bytes_per_gpu / GIB:.1f}",
        )
        for c in runs[:most]
    ]
    yield from _table(("split", "weights", "context", "KV tokens", "1 stream", "together", "GiB/GPU"), table, left=2)
    if len(runs) > most:
        yield f"… and {len(runs) - most} more that run (--json has all)"
    refused = [c for _, c in rows if c.problem]
    if refused:
        yield ""
        yield f"{len(refused)} do not run:"
    for c in refused[:_MOST_REFUSED]:
        text = f"{c.parallel} in {_bits(c)}: {c.problem}"
        yield from textwrap.wrap(text, reading_width(), initial_indent="  ", subsequent_indent="    ")
    if len(refused) > _MOST_REFUSED:
        yield f"  … and {len(refused) - _MOST_REFUSED} more (--json has all)"


def _bits(candidate: Candidate) -> str:
    return f"{candidate.precision.weights}{'+kv8' if candidate.precision.kv != 'auto' else ''}"


def need_lines(rows: Sequence[Need], notes: Sequence[str] = ()) -> Iterator[str]:
    """Smallest inventories; `on paper` is bytes over the size on the box. Notes follow, each once."""
    table = [
        (
            row.gpu,
            row.weights,
            str(row.by_arithmetic),
            str(row.gpus) if row.gpus else ">128",
            (f"{row.nodes} × {row.gpus_per_node}" if row.nodes > 1 else str(row.gpus_per_node)) if row.gpus else "–",
            f"{row.kv_cache_tokens:,}" if row.gpus else "–",
            row.layout or "–",
        )
        for row in rows
    ]
    yield from _table(("GPU", "weights", "on paper", "runs on", "nodes", "KV tokens", "as"), table, left=2)
    yield from _notes([*(row.note for row in rows if row.note), *notes])


def table_lines(rows: Sequence[TableRow], gpu: Gpu) -> Iterator[str]:
    """Two tables: what models weigh, and how many GPUs hold them, on paper and in truth."""
    yield "Weights in GB as guides count them (parameters × bits), and the KV cache of one request in GiB"
    yield ""
    widths = [cell.weights for cell in rows[0].cells]
    yield from _table(
        ("model", *widths, "KV cache", "tokens", "KV heads"),
        [
            (
                r.model,
                *(_gigabytes(c.nominal_gb) for c in r.cells),
                f"{r.kv_gib:.2f}",
                f"{r.context:,}",
                str(r.kv_heads),
            )
            for r in rows
        ],
    )
    yield ""
    yield f"{gpu.kind} ({gpu.box_gb} GB each) for bf16 weights alone; for both on paper, and the fewest that run it"
    yield ""
    counted = [(r.model, _for_weights(r.cells[0], gpu), *(_gpus(c) for c in r.cells)) for r in rows]
    yield from _table(("model", "weights", *widths), counted, left=5)
    yield from _notes([note for row in rows for note in row.notes])


def _for_weights(cell: Cell, gpu: Gpu) -> str:
    """As guides count: weights divided by what is written on the box."""
    return f"≥ {math.ceil(cell.nominal_gb / gpu.box_gb)}"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    """Each once, below a table; further lines of one are indented, so that one sees where the next begins."""
    for number, note in enumerate(dict.fromkeys(notes)):
        if number == 0:
            yield ""
        yield from textwrap.wrap(note, reading_width(), subsequent_indent="  ")


def _gigabytes(size: float) -> str:
    return f"{size:.0f}" if size >= 10 else f"{size:.1g}" if size < 1 else f"{size:.2g}"


def _gpus(cell: Cell) -> str:
    runs = f"{cell.gpus} as {cell.layout}" if cell.gpus else "none of up to 128"
    return f"{cell.boxes:.2f}: {runs}"


def lesson_lines(lessons: Sequence[Differences]) -> Iterator[str]:
    """What earlier deployments taught."""
    if not lessons:
        yield "Nothing learned yet: no deployment was compared with its plan."
        return
    table = []
    for lesson in lessons:
        off = {row.name: f"{row.percent:+.1f}%" for row in lesson.rows}
        missing = "–" if lesson.missing_gib is None else f"{lesson.missing_gib:+.2f}"
        cells = [off.get(name, "–") for name in ("weights_gib", "graph_gib", "kv_tokens", "load_s")]
        table.append((lesson.gpu, lesson.engine_version or "?", lesson.model, lesson.weights, *cells, missing))
    heads = ("GPU", "vLLM", "model", "weights", "weights off", "graphs off", "KV off", "load off", "GiB missing")
    yield from _table(heads, table, left=4)

"""What a batch prints: one live line on a terminal, plain lines elsewhere, JSON lines for programs, a summary."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections import Counter, deque
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from corral.base.wording import duration
from corral.lab.report import tables
from corral.lab.report.screen import PhaseScreen, print_json, since, tell

if TYPE_CHECKING:
    from corral.use.batch.batch import BatchResult
    from corral.use.batch.core.runner import Counts, Runner
    from corral.use.batch.inspect import BatchStatus, Checked
    from corral.use.batch.jobs import SubmittedBatch

PROGRESS_EVERY_S, WAITING_EVERY_S = 5.0, 60.0  # a line where there is no terminal


class Screen:
    """Listens to a batch and shows how it goes."""

    def __init__(self, as_json: bool, output: str) -> None:
        self._json, self._output = as_json, output
        self._live = sys.stderr.isatty() and not as_json
        self.phases = PhaseScreen(quiet=as_json)
        self._began = time.monotonic()
        self._shown_at = self._began - 4.0
        self._drawn = False
        self._seen: deque[tuple[float, int, int, int]] = deque(maxlen=100)  # time, rows, prompt and output tokens

    def __enter__(self) -> Screen:
        self.phases.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()
        self.phases.__exit__(kind, error, trace)

    def note(self, kind: str, text: str) -> None:
        self._clear()
        if self._json:
            tell(json.dumps({"event": kind, "text": text}, ensure_ascii=False))
        elif kind != "done":
            tell(f"[{time.monotonic() - self._began:7.1f} s] {kind}: {text}", err=True)

    def tick(self, counts: Counts, runner: Runner) -> None:
        now = time.monotonic()
        plain_s = WAITING_EVERY_S if runner.waiting_for else PROGRESS_EVERY_S
        if now - self._shown_at < (0.2 if self._live else 1.0 if self._json else plain_s):
            return
        self._shown_at = now
        done = counts.before + counts.fine + counts.failed  # other runners' too
        self._seen.append((now, done, counts.prompt_tokens, counts.output_tokens))
        values = self._values(counts, runner)
        if self._json:
            tell(json.dumps({"event": "progress", **values}))
        elif self._live:
            width = shutil.get_terminal_size().columns - 1
            tell(f"\r\033[2K{progress_line(values, width)}", err=True, nl=False)
            self._drawn = True
        else:
            tell(f"[{now - self._began:7.1f} s] {progress_line(values)}", err=True)

    def summary(self, result: BatchResult) -> None:
        if self._json:
            tell(json.dumps({"event": "summary", **result.to_json()}, ensure_ascii=False))
            return
        _print_summary(result)

    def _values(self, counts: Counts, runner: Runner) -> dict[str, Any]:
        first, last = self._seen[0], self._seen[-1]
        span = last[0] - first[0]
        rate = [(b - a) / span if span > 0.5 else 0.0 for a, b in zip(first[1:], last[1:], strict=True)]
        kv = [lane.reading.kv_use or 0.0 for lane in runner.lanes if lane.reading and lane.up]
        return {
            "rows": counts.rows,
            "done": counts.before + counts.fine + counts.failed,
            "failed": counts.failed,
            "left": counts.left,
            "in_flight": counts.in_flight,
            "limit": counts.limit,
            "retries": counts.retries,
            "rows_per_s": round(rate[0], 2),
            "prompt_tokens_per_s": round(rate[1], 1),
            "output_tokens_per_s": round(rate[2], 1),
            "eta_s": round(counts.left / rate[0], 1) if rate[0] else None,
            "kv_use": round(max(kv), 3) if kv else None,
            "waiting_for": runner.waiting_for or None,
        }

    def _clear(self) -> None:
        if self._drawn:
            tell("\r\033[2K", err=True, nl=False)
            self._drawn = False


def progress_line(v: dict[str, Any], width: int | None = None) -> str:
    """The progress in one line, the most important first; a narrow terminal leaves out the rest."""
    share = 100 * v["done"] / v["rows"] if v["rows"] else 100
    parts = [f"{v['done']:,}/{v['rows']:,} rows ({share:.0f}%)"]
    if v["eta_s"] is not None:
        parts.append(f"{duration(v['eta_s'])} left")
    if v["failed"]:
        parts.append(f"{v['failed']:,} failed")
    if v["waiting_for"]:
        return ", ".join([*parts, f"waiting: {v['waiting_for']}"])[:width]
    parts.append(f"{v['in_flight']} under way")
    if v["rows_per_s"]:
        parts.append(f"{v['rows_per_s']:,.1f} rows/s")
        parts.append(f"{v['output_tokens_per_s']:,.0f} tok/s out")
        parts.append(f"{v['prompt_tokens_per_s']:,.0f} in")
    if v["kv_use"] is not None:
        parts.append(f"KV {100 * v['kv_use']:.0f}%")
    if v["retries"]:
        parts.append(f"{v['retries']:,} retries")
    if width is None:
        return ", ".join(parts)
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 2 <= width:
            line += f", {part}"
    return line[:width]


def _print_summary(result: BatchResult) -> None:
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    tell("\n".join(summary_lines(result, columns)), err=True)


def summary_lines(result: BatchResult, columns: int | None) -> list[str]:
    """How a run ended."""
    s = result.summary
    done = s.before + s.fine + s.failed
    if s.done and not s.fine and not s.failed and s.before:
        return [f"already complete: {s.rows:,} rows in {result.output}"]
    head = f"done: {done:,} of {s.rows:,} rows"
    head = head if s.done else f"{s.state}: {done:,} of {s.rows:,} rows done, {s.left:,} left"
    if s.before:
        head += f" ({s.before:,} from before)" if result.runners == 1 else f" ({s.before:,} by other runs)"
    return [*tables.wrapped(head, columns), *tables.fact_lines(_summary_facts(result), columns, indent="  ")]


def _summary_facts(result: BatchResult) -> list[tuple[str, str]]:
    s = result.summary
    facts = []
    if s.fine or s.failed:
        rate = f"{s.rows_per_s:,.1f} rows/s"
        facts.append(("this run", f"{s.fine:,} answered, {s.failed:,} failed in {duration(s.wall_s)} ({rate})"))
    if s.output_tokens:
        cached = f" ({s.cached_tokens:,} from the prefix cache)" if s.cached_tokens else ""
        rate = f"{s.output_tokens_per_s:,.0f} tok/s"
        facts.append(("tokens", f"{s.prompt_tokens:,} in{cached}, {s.output_tokens:,} out ({rate})"))
    if s.errors:
        facts.append(("errors", ", ".join(f"{name} {count:,}" for name, count in sorted(s.errors.items()))))
    if result.gpu_hours is not None:
        cost = f", cost {result.cost:.2f}" if result.cost is not None else ""
        facts.append(("GPU-hours", f"{result.gpu_hours:.3f} on {result.gpus}{cost}"))
    so_far = " (so far)" if Path(result.output).exists() else " (made at the end)"
    facts.append(("output", result.output + ("" if s.done else so_far)))
    if result.errors:
        facts.append(("failed", result.errors))
    if not s.done:
        facts.append(("continue", tables.tied(f"corral batch resume {shlex.quote(result.output)}")))
    return facts


def print_status(status: BatchStatus, as_json: bool) -> None:
    """The status of a batch."""
    if as_json:
        print_json(status)
        return
    click.echo("\n".join(status_lines(status, tables.room())))


def status_lines(status: BatchStatus, columns: int | None) -> list[str]:
    """The status of a batch, who works on it, and how to continue."""
    who = ", ".join(f"process {one.pid} on {one.host}" for one in status.runners)
    head = f"{status.output}: {status.state}" + (f" ({who})" if who else "")
    facts = tables.fact_lines(_status_facts(status), columns, indent="  ")
    return [*tables.wrapped(head, columns, rest="    "), *facts]


def _status_facts(s: BatchStatus) -> list[tuple[str, str]]:
    done = s.fine + s.failed
    facts = [("rows", f"{done:,} of {s.rows:,} done, {s.failed:,} failed, {s.rows - done:,} left")]
    if s.blocks is not None:
        b = s.blocks
        facts.append(("blocks", f"{b.done:,} of {b.count:,} done, {b.held:,} under way, {b.size:,} rows each"))
    for job in s.jobs:
        if not job.ended or job.reason or job is s.jobs[-1]:
            remedy = f" ({job.remedy})" if job.remedy and not job.ended else ""
            facts.append(("job", job.text.removeprefix("job ") + remedy))
    facts += [("model", s.model), ("input", s.input), ("begun", f"{since(s.created_s)} ago")]
    if s.reason:
        facts.append(("reason", s.reason))
    if s.failed:
        facts.append(("failed", s.errors))
    if not s.runners and not s.done and all(job.over for job in s.jobs):
        facts.append(("continue", tables.tied(f"corral batch resume {shlex.quote(s.output)}")))
    return facts


def print_submitted(queued: SubmittedBatch, as_json: bool) -> None:
    """The jobs that were queued, and how to follow them."""
    if as_json:
        tell(json.dumps({"event": "queued", "jobs": queued.jobs, "rows": queued.rows, "done": queued.done}))
        return
    if queued.done:
        tell(f"already complete: {queued.rows:,} rows in {queued.output}", err=True)
        return
    jobs = f"job {queued.jobs[0]}" if len(queued.jobs) == 1 else f"jobs {', '.join(queued.jobs)}"
    output = shlex.quote(queued.output)
    tell(f"queued: {jobs}, for {queued.rows:,} rows", err=True)
    tell(f"  how far    corral batch status {output}", err=True)
    tell(f"  stop       corral batch cancel {output}", err=True)


def wait_for_jobs(output: str, poll_s: float = 2.0) -> int:
    """Follow a queued batch until it is done, or no job works on it any more."""
    from corral.base.errors import LaunchError
    from corral.use.batch.inspect import inspect

    shown = ""
    while True:
        now = inspect(output)
        done = now.fine + now.failed
        line = f"{now.state}: {done:,} of {now.rows:,} rows" + "".join(f"; {j.text}" for j in now.jobs if not j.ended)
        if line != shown:
            tell(line, err=True)
            shown = line
        if now.done:
            return 1 if now.failed else 0
        if not now.runners and all(job.over for job in now.jobs):
            raise LaunchError(
                f"no job works on {output} any more; {now.rows - done:,} rows are left ({now.reason or now.state}).",
                f"Everything up to here is kept; continue: corral batch resume {shlex.quote(output)}",
            )
        time.sleep(poll_s)


def print_check(checked: Checked, as_json: bool, skip_bad: bool = False) -> None:
    """Every kind of problem of an input, with its first line; an input that a batch would refuse is refused."""
    from corral.base.errors import DataError
    from corral.use.batch.input.check import more_rows

    if as_json:
        print_json(checked)
    else:
        kinds = Counter(problem.text for problem in checked.problems)
        for problem in checked.problems:
            if count := kinds.pop(problem.text, 0):
                click.echo(f"line {problem.line} {problem.text}{more_rows(count)}")
    if checked.problems and skip_bad:
        click.echo(f"{len(checked.problems):,} of {checked.rows:,} rows go to the error file", err=True)
    elif checked.problems:
        raise DataError(
            f"{len(checked.problems)} of {checked.rows} rows cannot be used.",
            "Correct them, or leave them out: `corral batch run` with --skip-bad.",
        )
    elif not as_json:
        click.echo(f"{checked.rows:,} rows, all good ({checked.kind})", err=True)

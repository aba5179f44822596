"""`corral score`: likelihoods of a file's rows, resumable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corral.base.errors import INTERRUPTED, UsageError
from corral.base.wording import counted, duration
from corral.cli.help_pages import FormerOption, RenamedOption
from corral.cli.options import Duration, endpoint_options
from corral.lab.report.screen import print_json

if TYPE_CHECKING:
    from corral.use.batch.core.runner import Counts, Runner


UNFINISHED = 1  # finished, but some rows are in the error file


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 118},
    epilog="More: docs/scoring.md.",
)
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path), required=False)
@click.option("--input", "-i", "named", cls=FormerOption, argument="INPUT", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE",
              help="Results: .jsonl (as they come) or .parquet (at the end, in the input's order).")  # fmt: skip
@endpoint_options
@click.option("--too-long", type=click.Choice(["refuse", "window"]), default="refuse", show_default=True,
              help="Rows longer than the model: refuse them, or score them in windows.")  # fmt: skip
@click.option("--window", type=click.IntRange(min=2), metavar="TOKENS", help="Window length (default: the model's).")
@click.option("--overlap", type=click.IntRange(min=1), default=1, show_default=True, metavar="TOKENS",
              help="Context that a window has at least before what it scores.")  # fmt: skip
@click.option("--prefix", default="auto", show_default=True, metavar="TOKEN",
              help="Token before texts without context: auto (what the tokenizer adds), bos (as lm-eval does),"
                   " none, or e.g. <|endoftext|>.")  # fmt: skip
@click.option("--special-tokens", is_flag=True, help="Let the tokenizer add its BOS before contexts, too.")
@click.option("--per-token", is_flag=True, help="Write each token's log-probability and rank.")
@click.option("--top", type=click.IntRange(0, 1000), default=0, show_default=True, metavar="K",
              help="The K likeliest tokens at each place, too (implies --per-token).")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(min=1), default=64, show_default=True, help="Rows at once.")
@click.option("--memory-gib", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True,
              help="What prompt log-probabilities may take on the server at once.")  # fmt: skip
@click.option("--vocabulary", type=click.IntRange(min=1), default=128256, show_default=True, metavar="TOKENS",
              help="Size of the model's vocabulary, for that bound.")  # fmt: skip
@click.option("--patience", "patience_s", type=Duration(), default=600, show_default=True,
              metavar="TIME", help="How long to wait for a server that is away.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Also wait for a deployment that has ended, until it is started again.")
@click.option("--skip-bad", is_flag=True, help="Send bad rows to the error file and score the others.")
@click.option("--force", cls=RenamedOption, was="--restart", is_flag=True,
              help="Accept another model or other settings than at the start, and start over.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(output: Path, patience_s: float, force: bool, as_json: bool, **given: Any) -> int:
    """Score rows of INPUT: {"id", "text"}, {"id", "context", "continuation"} or {"id", "context", "choices": […]}.

    INPUT is .jsonl, .json, .csv, .tsv or .parquet, the text forms also as .gz or .zst.

    The same command again continues after any interruption. Exit codes are those of `corral batch`: 0 every row has a
    result; 1 finished, some rows are in OUTPUT.errors.jsonl with their reason; 10 the input is bad; 130 interrupted.
    """
    from corral.serve.resolve import resolve_server
    from corral.use.batch.core.runner import RunnerSettings
    from corral.use.score.job import check_paths, score_file
    from corral.use.score.likelihood import ScoreOptions

    names = ("too_long", "window", "overlap", "prefix", "special_tokens", "top", "per_token", "concurrency",
             "memory_gib", "vocabulary")  # fmt: skip
    options = ScoreOptions(**{name: given[name] for name in names})
    settings = RunnerSettings(
        concurrency=options.concurrency,
        patience_s=patience_s,
        most_weight=options.tokens_in_flight,
        wait=given["wait"],
    )
    source = _input(given["source"], given["named"])
    check_paths(source, output)
    server, endpoint = resolve_server(given["name"], given["url"], given["key_file"], given["model"])
    progress = _Progress(quiet=as_json)
    try:
        report = score_file(
            [server], endpoint.model, source, output, options, progress,
            settings=settings, skip_bad=given["skip_bad"], force=force,
        )  # fmt: skip
    finally:
        progress.end()
    print_json(report) if as_json else _print_report(report)
    return INTERRUPTED if not report.done else UNFINISHED if report.summary["bad"] else 0


def _input(source: Path | None, named: Path | None) -> Path:
    if (source is None) == (named is None):
        raise UsageError(
            "score takes one input." if source else "there is no input.",
            "For example: corral score rows.jsonl -o s.jsonl",
        )
    path = source or named
    assert path is not None
    return path


class _Progress:
    """Progress in one line on stderr, rewritten on a terminal; and events, a line each."""

    def __init__(self, quiet: bool) -> None:
        self._live, self._quiet, self._shown = sys.stderr.isatty(), quiet, False

    def note(self, kind: str, text: str) -> None:
        if not self._quiet:
            self.end()
            click.echo(f"  {kind}: {text}", err=True)

    def tick(self, counts: Counts, _: Runner) -> None:
        if self._live and not self._quiet:
            self._shown = True
            bad = f", {counts.failed} bad" if counts.failed else ""
            sys.stderr.write(f"\r\033[2Kscored {counts.rows - counts.left:,} of {counts.rows:,}{bad}")
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\033[2K")
            sys.stderr.flush()


def _print_report(report: Any) -> None:
    earlier = f", {report.before:,} from before" if report.before else ""
    left = f", {report.left:,} left" if report.left else ""
    click.echo(
        f"scored {counted(report.fine + report.failed, 'row')} in {duration(report.wall_s)}{earlier}{left}", err=True
    )
    totals = report.summary
    for kind, of in totals.get("kinds", {"": totals}).items():
        if "mean_logprob" in of:
            perplexity = "too large" if of["perplexity"] is None else f"{of['perplexity']:.4g}"
            mean = f"mean log-probability {of['mean_logprob']:.4f}"
            name = f"{kind}: " if kind else ""
            click.echo(f"{name}{counted(of['tokens'], 'token')}, {mean}, perplexity {perplexity}", err=True)
    if "accuracy" in totals:
        click.echo(f"accuracy {totals['accuracy']:.1%}, by length {totals['accuracy_norm']:.1%}", err=True)
    if totals["bad"]:
        click.echo(f"{counted(totals['bad'], 'bad row')}, with reasons: {report.errors}", err=True)
    if report.left:
        click.echo("The same command continues.", err=True)
    else:
        click.echo(report.output)

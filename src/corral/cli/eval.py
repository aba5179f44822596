"""`corral eval`: tasks of lm-evaluation-harness on a served model; `corral eval compare`: two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from corral.base.errors import INTERRUPTED, UsageError
from corral.base.files import write_atomic
from corral.cli.batch import server_options, servers_of
from corral.cli.help_pages import DefaultVerbGroup, GroupedCommand
from corral.cli.options import Duration, json_option, together
from corral.lab.report.batch import Screen
from corral.lab.report.screen import PhaseScreen, print_json

HELP = {"help_option_names": ["-h", "--help"]}


@click.group(cls=DefaultVerbGroup, context_settings=HELP, epilog="More: docs/eval.md.")
def command() -> None:
    """Run tasks of lm-evaluation-harness on a served model: `corral eval --tasks corral_capitals`.

    Run the same command again to continue after any interruption; what was answered is not asked again. Without
    --deployment, --url or --start, the running deployment is used.
    """


_task_options = together(
    click.option("--tasks", multiple=True, required=True, metavar="TASK,…",
                 help="Names of lm-eval, of Corral (corral_capitals, corral_calendar), or YAML files; repeatable."),
    click.option("--include-path", "include", multiple=True, type=click.Path(exists=True, file_okay=False),
                 metavar="FOLDER", help="Folder with task files that --tasks may name; repeatable."),
    click.option("--num-fewshot", type=click.IntRange(min=0), metavar="N",
                 help="Examples before every item (default: the task's own number)."),
    click.option("--limit", type=click.FloatRange(min=0, min_open=True), metavar="N",
                 help="Only the first N items of each task; below 1 that share of them."),
    click.option("--chat", is_flag=True, help="Put prompts through the model's chat template."),
    click.option("--multiturn/--no-multiturn", default=True, show_default=True,
                 help="With --chat: examples are earlier turns of the conversation, not one text."),
    click.option("--system", metavar="TEXT", help="System message, or text before every prompt without --chat."),
    click.option("--gen-kwargs", default="", metavar="KEY=VALUE,…",
                 help="For tasks in which the model writes: max_gen_toks=64,temperature=0.7,do_sample=true."),
    click.option("--seeds", default="0,1234,1234,1234", show_default=True, metavar="N[,N,N,N]",
                 help="Seeds of Python, NumPy, PyTorch and of the choice of examples; one number is all four."),
    click.option("--unsafe-code", is_flag=True, help="Allow tasks that run the code which the model writes."),
)  # fmt: skip


@command.command("run", cls=GroupedCommand, context_settings=HELP)
@_task_options
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("results"), show_default=True,
              metavar="FOLDER", help="Results: one folder for one model, any number of tasks.")  # fmt: skip
@server_options
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests at once (default: adapts itself).")
@click.option("--memory-gib", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True,
              help="What prompt log-probabilities may take on the server at once.")  # fmt: skip
@click.option("--patience", "patience_s", type=Duration(), default=600, show_default=True,
              metavar="TIME", help="How long to wait for a server that is away.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Also wait for a deployment that has ended, until it is started again.")
@click.option("--force", is_flag=True, help="Accept another model than the one of the answers here, and start over.")
@json_option("Metrics, model and settings as JSON.")
def run(output: Path, patience_s: float, as_json: bool, **options: Any) -> int:
    """Run tasks; metrics to stdout, everything else into the folder of results.

    Exit codes: 0 the metrics are there; 3 no such task or deployment; 4 the folder has answers of another model; 7 a
    request failed for good, or lm-eval did; 9 the server stayed away; 10 a task's data cannot be read; 130
    interrupted. After all of them the same command continues.
    """
    from corral.lab.eval.run import EvalRequest, run_eval, task_names
    from corral.lab.report.eval import print_outcome
    from corral.use.batch.core.run import Quiet
    from corral.use.batch.core.runner import RunnerSettings
    from corral.use.score.likelihood import ScoreOptions

    score = ScoreOptions(memory_gib=options["memory_gib"])
    runner = RunnerSettings(
        concurrency=options["concurrency"],
        patience_s=patience_s,
        most_weight=score.tokens_in_flight,
        runaway_share=1.0,  # a task needs every answer
        wait=options["wait"],
    )
    request = EvalRequest(
        task_names(options["tasks"]), output, _settings(options), options["include"], score, runner, options["force"]
    )
    python = _harness(as_json)
    screen = Screen(as_json, str(output))
    with screen:
        outcome = run_eval(request, servers_of(options), Quiet() if as_json else screen, screen.phases, python)
    print_json(outcome) if as_json else print_outcome(outcome, str(output))
    return INTERRUPTED if outcome.stopped else 0


def _harness(quiet: bool) -> str:
    """The Python of lm-eval's environment."""
    from corral.lab.eval import harness

    if found := harness.find():
        return found
    with PhaseScreen(quiet=quiet) as phases:
        phases.phase(f"installing lm-eval {harness.VERSION}")
        return harness.install(phases.detail, phases.note)


def _settings(options: dict[str, Any]) -> Any:
    from corral.lab.eval.store import EvalSettings

    parts = options["seeds"].split(",")
    if len(parts) not in (1, 4) or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--seeds cannot be {options['seed']!r}.", "Give one number, or four: 0,1234,1234,1234.")
    seeds = tuple(int(part) for part in (parts if len(parts) == 4 else parts * 4))
    names = ("num_fewshot", "limit", "chat", "multiturn", "system", "gen_kwargs", "unsafe_code")
    return EvalSettings(**{name: options[name] for name in names}, seeds=seeds)


@command.command("compare", context_settings=HELP)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
              help="Write one HTML file, with the items that changed.")  # fmt: skip
@json_option("Differences and changed items as JSON.")
def compare(a: Path, b: Path, output: Path | None, as_json: bool) -> None:
    """What changed from the results in folder A to those in B: each task with a 95% interval, paired by item."""
    from corral.lab.eval.compare import compared
    from corral.lab.report.eval import comparison_page, print_comparison

    found = compared(a, b)
    if output is not None:
        write_atomic(output, comparison_page(found, (a.name or str(a), b.name or str(b))), 0o644)
    if as_json:
        changes = [{**vars(one), "difference": one.difference, "verdict": one.verdict} for one in found.changes]
        print_json({"a": str(a), "b": str(b), "changes": changes, "items": found.items, "differs": found.differs})
    else:
        print_comparison(found)
        if output is not None:
            click.echo(str(output))

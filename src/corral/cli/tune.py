"""`corral tune`: find the settings that serve a workload best, and prove it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from corral.base.errors import ConflictError, UsageError
from corral.base.files import read_text, write_atomic
from corral.base.processes import terminated_as_interrupted
from corral.base.record import dump_json, load_json
from corral.base.wording import duration
from corral.cli.help_pages import DefaultVerbGroup, GroupedCommand, RenamedOption
from corral.cli.options import (
    Duration,
    context_option,
    env_option,
    fixed_option,
    json_option,
    profile_option,
    runtime_options,
    target_options,
)
from corral.cli.up import UpWords, read_words, request_of
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import planned_restart_s
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.decision import DeployRequest, as_planned, sized
from corral.deploy.lifecycle.deployments import Record
from corral.deploy.profile.profile import load_profile
from corral.lab.bench.spec import Spec, Workload, parse_slos
from corral.lab.report import tables
from corral.lab.report.screen import print_json, tell
from corral.lab.report.tune import TrialLines, html_page, sentence, tune_lines
from corral.lab.tune.knobs import knobs_for
from corral.lab.tune.objective import Objective, ObjectiveKind, distance
from corral.lab.tune.parallel_trials import refuse_part, shares_for
from corral.lab.tune.race import Race, RaceResult, verdict
from corral.lab.tune.store import TuneRun, TuneSpec, find_run, new_run, runs_dir
from corral.lab.tune.trials import Trial
from corral.lab.tune.tuner import fitting_knobs, tune
from corral.lab.tune.workload import PRESETS, SEEN, SeenLoad, read_seen, workload_of
from corral.serve.fleet.chain import choose_folder

EXAMPLES = """
corral tune llama-3.1-8b-instruct --workload chat --slo ttft_p99=500ms,tpot_p99=40ms --budget 40m
corral tune llama-3.1-8b-instruct --input-len 512 --output-len 128 --concurrency 256
corral tune last                                # continue after an interruption
corral tune report last -o tune.html
corral up --tuned last
"""
UNDECIDED = 1  # exit code of a run that ended without a result


@click.group(cls=DefaultVerbGroup)
def command() -> None:
    """Find the settings that serve a workload best: `corral tune MODEL --workload chat --budget 40m`.

    Servers are started one after the other with different vLLM settings, measured, and stopped. `corral tune
    RUN` continues a run that was interrupted.
    """


@command.command("run", cls=GroupedCommand, examples=EXAMPLES, headings={
    "The workload": ("--workload", "--input-len", "--output-len", "--chat", "--concurrency", "--request-rate"),
    "The goal": ("--objective", "--slo", "--budget", "--measure"),
    "The server": ("--deployment", "--on", "--side-by-side", "--context", "--set", "--runtime", "--runtime-option",
                   "--env"),
    "Options for ssh": (), "Options for SLURM": (), "Options for ssh and SLURM": (),
    "Output": ("--name", "--json", "--help"),
})  # fmt: skip
@click.argument("model", required=False)
@click.option("-d", "--deployment", metavar="NAME", help="Begin with this deployment's model and options.")
@click.option(
    "--workload", metavar="NAME|FILE",
    help=f"{', '.join(PRESETS)}; a file (a trace, a batch, or prompts); or seen: the last hour of --deployment.",
)  # fmt: skip
@click.option("--input-len", type=click.IntRange(min=1), help="Prompt tokens (without --workload; default: 512).")
@click.option("--output-len", type=click.IntRange(min=1), help="Output tokens (without --workload; default: 128).")
@click.option("--chat", is_flag=True, help="Use the chat endpoint.")
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="Requests at once (default: as many as the plan runs at once)."
)
@click.option("--request-rate", "rate", type=click.FloatRange(min=0, min_open=True), metavar="PER_S",
              help="For --objective latency: requests per second.")  # fmt: skip
@click.option("--objective", "goal", cls=RenamedOption, was="--goal",
              type=click.Choice([one.value for one in ObjectiveKind]),
              help="What to optimise (default: throughput; with --slo, rate).")  # fmt: skip
@click.option("--slo", metavar="SLOS", help="Service level to meet: ttft_p99=500ms,tpot_p99=40ms.")
@click.option(
    "--budget",
    "budget_s",
    type=Duration(1, unit="m"),
    default="40m",
    show_default=True,
    help="Time limit for the whole run.",
)
@click.option("--measure", "measure_s", type=Duration(1), default="15s", show_default=True,
              metavar="TIME", help="Length of the first measurements; later ones are twice as long.")  # fmt: skip
@click.option("--side-by-side", "slots", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Up to N servers at once: as SLURM jobs, on 1/N of the GPUs, or in turns on one.")  # fmt: skip
@profile_option()
@context_option
@fixed_option(note=", which is then not varied")
@runtime_options
@env_option
@click.option("--name", "run_name", default="", help="Name of the run (default: the model and the time).")
@json_option("The result as JSON on stdout.")
@target_options
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def run(model: str | None, run_name: str, as_json: bool, **options: Any) -> int:
    """Tune MODEL, or continue the run of that name. Arguments after `--` are vLLM flags to begin with."""
    if options["deployment"] is not None:
        if model is not None and model.startswith("-"):  # everything after -- is the engine's
            options["engine_args"], model = (model, *options["engine_args"]), None
        if model is not None:
            raise UsageError("a model and --deployment were given.", "Give one of them.")
    elif model is None:
        raise UsageError("no model was named.", "For example: corral tune llama-3.1-8b --workload chat.")
    found = _run_called(model) if model else None
    found = _continue_run(found) if found else _begin_run(model, run_name, options)
    watcher = TrialLines(quiet=as_json)
    watcher.say(f"tuning run {found.name}: {found.spec.objective.words}")
    with terminated_as_interrupted():
        try:
            result = tune(found, watcher)
        except KeyboardInterrupt:
            made = len(found.trials())
            tell(f"corral: {made} trials are kept; `corral tune {found.name}` continues", err=True)
            raise
    return _show(found, result, as_json)


def _run_called(name: str) -> TuneRun | None:
    """The run of that name; None where there is none, and the name is a model's."""
    if name != "last" and not (runs_dir() / name / "tune.json").is_file():
        return None
    return find_run(name)


def _continue_run(found: TuneRun) -> TuneRun:
    """A run to continue, for longer with `--budget`; all other options stay as they were."""
    context = click.get_current_context()
    typed = [
        name
        for name in context.params
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    flags = {one.name: one.opts[0] for one in context.command.params} | {"engine_args": "what follows `--`"}
    if other := [flags[name] for name in typed if name not in ("model", "budget_s", "as_json")]:
        raise UsageError(
            f"{other[0]} cannot be changed: {found.name} is a run that was begun already.",
            "Leave it out to continue (with --budget for longer), or give the new run another --name and a model.",
        )
    spec = found.spec
    if spec.bench.workload.file is not None:
        read_text(spec.bench.workload.file)  # before a server is started in vain
    if "budget_s" in typed:
        race = replace(spec.race, budget_s=context.params["budget_s"])
        write_atomic(found.folder / "tune.json", dump_json(replace(spec, race=race)))
    return found


def _deploy_request(model: str | None, options: dict[str, Any]) -> tuple[DeployRequest, tuple[str, ...]]:
    """The base of the run, by a model's name or as a deployment was started, and its vLLM flags."""
    names = ("context", "concurrency", "fixed", "runtime", "runtime_options", "extra_env")
    values = {key: options[key] for key in names} | {
        key: value for key, value in options.items() if key.startswith("target_option_")
    }
    on, arguments = options["on"], tuple(options["engine_args"])
    if options["deployment"] is not None:
        before = _started_with(choose_folder(options["deployment"]))
        joint = {key: (*before.given[key], *values[key]) for key in ("fixed", "runtime_options", "extra_env")}
        kept = {key: before.given.get(key) for key in ("goal", "flavour", "link")}  # the plan's goal
        values = kept | {key: value or before.given.get(key) for key, value in values.items()} | joint
        on, model, arguments = on or before.on, before.model, (*before.engine_args, *arguments)
    if model and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())  # the run may be continued from elsewhere
    return request_of(load_profile(on), values, on, model, arguments), arguments


def _started_with(folder: DeploymentFolder) -> UpWords:
    """The `corral up` that a deployment was started with."""
    words = load_json(Record, folder.record).words
    if words[:1] != ("up",):
        raise UsageError(
            f"how {folder.name!r} was started is not known.", "Name its model: corral tune MODEL, with its options."
        )
    return read_words(words)


def _seen(name: str) -> SeenLoad:
    """The load of a deployment, by its own counters."""
    folder = choose_folder(name)
    status = deployments.status(folder)
    if status.endpoint is None or status.state is not State.READY:
        raise UsageError(f"{name!r} is {status.state}: its load is no longer known.", "Name a --workload.")
    return read_seen(status.endpoint, folder.rank(0).load, name, status.created_s + (status.timings.ready_s or 0.0))


def _begin_run(model: str | None, name: str, options: dict[str, Any]) -> TuneRun:
    """A new run; everything that can be checked before a start is checked."""
    request, arguments = _deploy_request(model, options)
    request = as_planned(request)  # so that a setup can leave a flag out
    shares, in_turns = shares_for(request, options["slots"])
    request = replace(request, share=shares[0]) if shares else request
    slots_in_turns = len(shares) if in_turns else 1
    workload = _workload(options)
    _, decision = sized(request)
    seats = options["concurrency"] or decision.plan.seats
    objective = _objective(options, seats)
    bursts = objective.kind in (ObjectiveKind.THROUGHPUT, ObjectiveKind.COST)
    knobs = knobs_for(decision.plan, request, arguments, bursts, workload.shares_prefixes)
    check: Callable[[DeployRequest], object] = sized
    if in_turns:
        held = 1 if objective.kind is ObjectiveKind.LATENCY else seats  # the rate decides how many run at once
        check = partial(refuse_part, slots=slots_in_turns, seats=held, tokens=workload.longest_tokens)
        check(request)
        knobs = tuple(
            one for one in knobs if not one.name.endswith("gpu_memory_utilization")
        )  # each part has its own
    knobs, pruned = fitting_knobs(request, knobs, check)
    for one in pruned:
        tell(f"  never started: {one.setup}: {one.because}", err=True)
    if not knobs:
        raise UsageError("everything that could be tuned is fixed.", "Remove some of the --set options.")
    start_s = planned_restart_s(decision.plan)
    race = Race(knobs, options["budget_s"], options["measure_s"], start_s)
    if options["budget_s"] < 8 * (start_s + 2 * options["measure_s"]):
        few = f"--budget {duration(options['budget_s'])} leaves time for few trials"
        tell(f"  note: a start may take {duration(start_s)}: {few}", err=True)
    spec = Spec(workload, percentiles=(50.0, 90.0, 99.0), warmup=min(seats, 16))
    model_name = request.model or decision.source.name
    return new_run(
        TuneSpec(model_name, request, race, objective, spec, time.time(), shares=shares, in_turns=in_turns), name
    )


def _workload(options: dict[str, Any]) -> Workload:
    seed = secrets.randbelow(2**31)
    if options["workload"]:
        if options["input_len"] or options["output_len"]:
            raise UsageError("--workload already sets the lengths.", "Leave out --input-len and --output-len.")
        if options["workload"] == SEEN:
            if options["deployment"] is None:
                raise UsageError("--workload seen needs a deployment.", "Add --deployment NAME.")
            load = _seen(options["deployment"])
            tell(f"  seen: {load.words}", err=True)
            options["rate"] = options["rate"] or round(load.rate, 3)
            return load.workload(options["chat"], seed)
        return workload_of(options["workload"], options["chat"], seed)
    prompt, answer = options["input_len"] or 512, options["output_len"] or 128
    return Workload(input_len=prompt, output_len=answer, chat=options["chat"], seed=seed)


def _objective(options: dict[str, Any], seats: int) -> Objective:
    slos = parse_slos(options["slo"]) if options["slo"] else ()
    kind = ObjectiveKind(options["goal"] or ("rate" if slos else "throughput"))
    return Objective(kind, seats, options["rate"], slos)


def _show(found: TuneRun, result: RaceResult, as_json: bool) -> int:
    trials = found.trials()
    if as_json:
        far = distance(found.spec.objective, result, trials)
        body = {"run": found.name, "folder": str(found.folder), "result": result, "roofline": far}
        print_json({**body, "trials": trials})
    else:
        for line in tune_lines(found, trials, result, tables.room()):
            click.echo(line)
    return UNDECIDED if result.outcome in ("unfinished", "nothing worked") else 0


@command.command()
@click.argument("run")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the report to this file, as HTML.")
@click.option("--profile", metavar="NAME", help="Write the result as your profile NAME: `corral up --on NAME`.")
@json_option("The result as JSON on stdout.")
def report(run: str, output: Path | None, profile: str | None, as_json: bool) -> int:
    """Show what RUN has found so far. RUN is its name, the beginning of it, `last`, or a path."""
    found = find_run(run)
    trials = found.trials()
    result = verdict(found.spec.race, trials)
    written = [*([_write_profile(found, profile, trials, result)] if profile else []), *([output] if output else [])]
    if output is not None:
        write_atomic(output, html_page(found, trials, result))
    if written:
        tell(f"{sentence(result)} Written to {' and '.join(map(str, written))}.", err=True)
        if not as_json:
            return 0
    return _show(found, result, as_json)


def _write_profile(run: TuneRun, name: str, trials: list[Trial], result: RaceResult) -> Path:
    """The user's profile of that name; one that is there already is not touched."""
    from corral.deploy.profile.folders import check_name, user_folder
    from corral.lab.report.tune import profile_text

    path = user_folder() / f"{check_name(name)}.toml"
    if path.exists():
        raise ConflictError(f"{path} exists already.", "Give another --profile NAME, or move it away.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, profile_text(run, trials, result))
    return path

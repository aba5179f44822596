"""`corral tune`: find the settings that serve a workload best, and prove it."""

from __future__ import annotations

import secrets
import sys
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
from corral.cli.help_pages import DefaultVerbGroup, GroupedCommand
from corral.cli.options import Duration, TokenCount, target_options
from corral.cli.up import UpWords, read_words, request_of
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import duration
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle import bringup, deployments
from corral.deploy.lifecycle.deployments import Record
from corral.deploy.profile.profile import load_profile
from corral.engines.runtimes.base import RUNTIMES
from corral.lab.bench.spec import Spec, Workload, parse_slos
from corral.lab.report import tables
from corral.lab.report.screen import print_json, tell
from corral.lab.tune.baselines import BASELINES, RANDOM, baseline_knobs
from corral.lab.tune.knobs import knobs_for
from corral.lab.tune.objective import Objective, ObjectiveKind, distance
from corral.lab.tune.page import html_page, sentence, tune_lines
from corral.lab.tune.parallel_trials import refuse_part, shares_for
from corral.lab.tune.race import Race, RaceResult, verdict
from corral.lab.tune.random_search import random_found
from corral.lab.tune.store import TuneRun, TuneSpec, find_run, new_run, runs_dir
from corral.lab.tune.trials import Trial, TrialOrder
from corral.lab.tune.tuner import fitting_knobs, tune
from corral.lab.tune.workload import PRESETS, SEEN, SeenLoad, read_seen, workload_of
from corral.plan.measured import planned_restart_s
from corral.serve.fleet.chain import choose_folder

HELP = {"help_option_names": ["-h", "--help"]}
EXAMPLES = """
corral tune llama-3.1-8b-instruct --workload chat --slo ttft_p99=500ms,tpot_p99=40ms --budget 40m
corral tune llama-3.1-8b-instruct --input-len 512 --output-len 128 --concurrency 256
corral tune last                                # continue after an interruption
corral tune report last -o tune.html
corral up --tuned last
"""
UNDECIDED = 1  # exit code of a run that ended without a result


@click.group(cls=DefaultVerbGroup, context_settings=HELP)
def command() -> None:
    """Find the settings that serve a workload best: `corral tune MODEL --workload chat --budget 40m`.

    Servers are started one after the other with different vLLM settings, measured, and stopped. `corral tune run
    --help` lists all options; `corral tune RUN` continues a run that was interrupted.
    """


@command.command("run", cls=GroupedCommand, context_settings=HELP, examples=EXAMPLES, headings={
    "The workload": ("--workload", "--input-len", "--output-len", "--chat", "--concurrency", "--request-rate"),
    "The goal": ("--goal", "--slo", "--baseline", "--budget", "--measure"),
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
    "--concurrency", type=click.IntRange(min=1), help="Requests at once (default: as many as the plan has seats for)."
)
@click.option("--request-rate", "rate", type=click.FloatRange(min=0, min_open=True), metavar="PER_S",
              help="For --goal latency: requests per second.")  # fmt: skip
@click.option("--goal", type=click.Choice([one.value for one in ObjectiveKind]),
              help="What to optimise (default: throughput; with --slo, rate).")  # fmt: skip
@click.option("--slo", metavar="SLOS", help="Service level to meet: ttft_p99=500ms,tpot_p99=40ms.")
@click.option("--baseline", "baselines", multiple=True, type=click.Choice((*BASELINES, RANDOM)),
              help="Compare with vLLM's defaults, DigitalOcean's flags, or random search of equal time.")  # fmt: skip
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
@click.option("--side-by-side", "places", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Up to N servers at once: as SLURM jobs, on 1/N of the GPUs, or in turns on one.")  # fmt: skip
@click.option("--on", "on", metavar="PROFILE", envvar="CORRAL_PROFILE", help="Where to run (`corral profile list`).")
@click.option("--context", type=TokenCount(), help="Longest request: 32768, or 32k (default: the plan's choice).")
@click.option(
    "--set", "fixed", multiple=True, metavar="KEY=VALUE", help="Fix one field of the plan; it is not varied."
)
@click.option("--runtime", type=click.Choice(list(RUNTIMES)), help="How vLLM is installed where it runs.")
@click.option(
    "--runtime-option", "runtime_options", multiple=True, metavar="KEY=VALUE", help="Option of that runtime."
)
@click.option("--env", "extra_env", multiple=True, metavar="NAME=VALUE", help="Environment variable for the engine.")
@click.option("--name", "run_name", default="", help="Name of the run (default: the model and the time).")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout.")
@target_options
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def run(model: str | None, run_name: str, as_json: bool, **given: Any) -> int:
    """Tune MODEL, or continue the run of that name. Arguments after `--` are vLLM flags to begin with."""
    if given["deployment"] is not None:
        if model is not None and model.startswith("-"):  # everything after -- is the engine's
            given["engine_args"], model = (model, *given["engine_args"]), None
        if model is not None:
            raise UsageError("a model and --deployment were given.", "Give one of them.")
    elif model is None:
        raise UsageError("no model was named.", "For example: corral tune llama-3.1-8b --workload chat.")
    found = _existing(model) if model else None
    found = _continued(found) if found else _begun(model, run_name, given)
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


def _existing(word: str) -> TuneRun | None:
    """The run that a word names, if it does and is not a model's name."""
    if word != "last" and not (runs_dir() / word / "tune.json").is_file():
        return None
    return find_run(word)


def _continued(found: TuneRun) -> TuneRun:
    """A run to go on with, for longer where `--budget` says so; what is tuned stays as it was."""
    context = click.get_current_context()
    said = [
        name
        for name in context.params
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    options = {one.name: one.opts[0] for one in context.command.params} | {"engine_args": "what follows `--`"}
    if other := [options[name] for name in said if name not in ("model", "budget_s", "as_json")]:
        raise UsageError(
            f"{other[0]} cannot be changed: {found.name} is a run that was begun already.",
            "Leave it out to continue (with --budget for longer), or give the new run another --name and a model.",
        )
    spec = found.spec
    if spec.bench.workload.file is not None:
        read_text(spec.bench.workload.file)  # before a server starts for nothing
    if "budget_s" in said:
        race = replace(spec.race, budget_s=context.params["budget_s"])
        write_atomic(found.folder / "tune.json", dump_json(replace(spec, race=race)))
    return found


def _wished(model: str | None, given: dict[str, Any]) -> tuple[bringup.DeployRequest, tuple[str, ...]]:
    """What is tuned, by a model's name or as a deployment was started, and the vLLM flags that came with it."""
    options = ("context", "concurrency", "fixed", "runtime", "runtime_options", "extra_env")
    said = {key: given[key] for key in options} | {
        key: value for key, value in given.items() if key.startswith("target_option_")
    }
    on, arguments = given["on"], tuple(given["engine_args"])
    if given["deployment"] is not None:
        before = _started_with(choose_folder(given["deployment"]))
        joint = {key: (*before.given[key], *said[key]) for key in ("fixed", "runtime_options", "extra_env")}
        kept = {key: before.given.get(key) for key in ("goal", "flavour", "link")}  # the plan's goal
        said = kept | {key: value or before.given.get(key) for key, value in said.items()} | joint
        on, model, arguments = on or before.on, before.model, (*before.engine_args, *arguments)
    if model and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())  # the run may be continued from elsewhere
    return request_of(load_profile(on), said, on, model, arguments), arguments


def _started_with(folder: DeploymentFolder) -> UpWords:
    """The `corral up` that a deployment was started with."""
    words = load_json(Record, folder.record).words
    if words[:1] != ("up",):
        raise UsageError(
            f"how {folder.name!r} was started is not known.", "Name its model: corral tune MODEL, with its options."
        )
    return read_words(words)


def _seen(name: str) -> SeenLoad:
    """What a deployment was asked, by its own counters."""
    folder = choose_folder(name)
    status = deployments.status(folder)
    if status.endpoint is None or status.state is not State.READY:
        raise UsageError(f"{name!r} is {status.state}: what it was asked is no longer known.", "Name a --workload.")
    return read_seen(status.endpoint, folder.rank(0).load, name, status.created_s + (status.timings.ready_s or 0.0))


def _begun(model: str | None, name: str, given: dict[str, Any]) -> TuneRun:
    """A new run, with everything checked that can be checked before a start."""
    request, arguments = _wished(model, given)
    request = bringup.as_planned(request)  # a setup can then leave such a flag out
    shares, in_turns = shares_for(request, given["places"])
    request = replace(request, share=shares[0]) if shares else request
    sharing = len(shares) if in_turns else 1
    workload = _workload(given)
    _, decision = bringup.sized(request)
    seats = given["concurrency"] or decision.plan.seats
    objective = _objective(given, seats)
    bursts = objective.kind in (ObjectiveKind.THROUGHPUT, ObjectiveKind.COST)
    knobs = knobs_for(decision.plan, request, arguments, bursts, workload.shares_prefixes)
    flags = tuple(one for one in given["baselines"] if one != RANDOM)
    if flags and decision.plan.inventory.gpu is None:
        raise UsageError(f"--baseline {flags[0]} is for GPUs.", f"Leave it out on a CPU, or use --baseline {RANDOM}.")
    knobs = (*baseline_knobs(decision.plan, request, flags), *knobs)
    check: Callable[[bringup.DeployRequest], object] = bringup.sized
    if in_turns:
        held = 1 if objective.kind is ObjectiveKind.LATENCY else seats  # at a rate of its own, however many that are
        check = partial(refuse_part, places=sharing, seats=held, tokens=workload.longest_tokens)
        check(request)
        knobs = tuple(one for one in knobs if not one.name.endswith("gpu_memory_utilization"))  # a part has its own
    knobs, pruned = fitting_knobs(request, knobs, check)
    for one in pruned:
        tell(f"  never started: {one.setup}: {one.because}", err=True)
    if not knobs:
        raise UsageError("everything that could be tuned is fixed.", "Remove some of the --set options.")
    start_s = planned_restart_s(decision.plan)
    race = Race(knobs, given["budget_s"], given["measure_s"], start_s)
    if given["budget_s"] < 8 * (start_s + 2 * given["measure_s"]):
        few = f"--budget {duration(given['budget_s'])} leaves time for few trials"
        tell(f"  note: a start may take {duration(start_s)}: {few}", err=True)
    spec = Spec(workload, percentiles=(50.0, 90.0, 99.0), warmup=min(seats, 16))
    model_name = request.model or decision.source.name
    random = RANDOM in given["baselines"]
    return new_run(TuneSpec(model_name, request, race, objective, spec, time.time(), random, shares, in_turns), name)


def _workload(given: dict[str, Any]) -> Workload:
    seed = secrets.randbelow(2**31)
    if given["workload"]:
        if given["input_len"] or given["output_len"]:
            raise UsageError("--workload already sets the lengths.", "Leave out --input-len and --output-len.")
        if given["workload"] == SEEN:
            if given["deployment"] is None:
                raise UsageError("--workload seen needs a deployment.", "Add --deployment NAME.")
            load = _seen(given["deployment"])
            tell(f"  seen: {load.words}", err=True)
            given["rate"] = given["rate"] or round(load.rate, 3)
            return load.workload(given["chat"], seed)
        return workload_of(given["workload"], given["chat"], seed)
    prompt, answer = given["input_len"] or 512, given["output_len"] or 128
    return Workload(input_len=prompt, output_len=answer, chat=given["chat"], seed=seed)


def _objective(given: dict[str, Any], seats: int) -> Objective:
    slos = parse_slos(given["slo"]) if given["slo"] else ()
    kind = ObjectiveKind(given["goal"] or ("rate" if slos else "throughput"))
    return Objective(kind, seats, given["rate"], slos)


class TrialLines:
    """One line for each trial: what runs, what came out, what is best, and the time left."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._phase, self._order = quiet, "", ""

    def say(self, text: str) -> None:
        if not self._quiet:
            tell(text, err=True)

    def _live(self, text: str) -> None:
        """What the trial is doing, on a terminal's last line; an empty text takes it away."""
        if not self._quiet and sys.stderr.isatty():
            tell(f"\r\033[2K{'             ' + text + ' …' if text else ''}", err=True, nl=False)

    def begins(self, number: int, order: TrialOrder, left_s: float) -> None:
        self._phase = ""
        self._order = f"{number:3d}  {order.purpose.value:6}  {order.setup}"
        self.say(f"{self._order}  ({duration(left_s)} left)")

    def waits(self, who: str) -> None:
        tell(f"corral: waiting for {who}, which continues the same run", err=True)

    def phase(self, text: str) -> None:
        if text != self._phase:
            self._phase = text
            self._live(text)

    def ended(self, trial: Trial, so_far: RaceResult) -> None:
        self._live("")
        result = f"{trial.score:,.1f}" if trial.score else f"failed: {trial.why}"
        leading = f"; ahead: {so_far.leader}" if so_far.leader.choices else ""
        self.say(f"             {result} in {duration(trial.took_s)}{leading}")


def _show(found: TuneRun, result: RaceResult, as_json: bool) -> int:
    trials = found.trials()
    if as_json:
        far = distance(found.spec.objective, result, trials)
        random = random_found(result.best, trials)
        body = {"run": found.name, "folder": str(found.folder), "result": result, "roofline": far, "random": random}
        print_json({**body, "trials": trials})
    else:
        for line in tune_lines(found, trials, result, tables.room()):
            click.echo(line)
    return UNDECIDED if result.outcome in ("unfinished", "nothing worked") else 0


@command.command(context_settings=HELP)
@click.argument("run")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the report to this file, as HTML.")
@click.option("--profile", metavar="NAME", help="Write the result as your profile NAME: `corral up --on NAME`.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout.")
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
    from corral.lab.tune.page import profile_text

    path = user_folder() / f"{check_name(name)}.toml"
    if path.exists():
        raise ConflictError(f"{path} exists already.", "Give another --profile NAME, or move it away.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, profile_text(run, trials, result))
    return path

"""`corral simulate`: a forecast of a load on servers that need not exist, with its error."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from corral.base.errors import DoesNotFitError, UsageError
from corral.base.files import write_atomic
from corral.base.record import to_json
from corral.base.wording import counted
from corral.cli.bench_options import arrival_options, lengths_options
from corral.cli.help_pages import DefaultVerbGroup, FormerOption, GroupedCommand, RenamedOption
from corral.cli.options import Duration, context_option, fixed_option, json_option, price_option
from corral.lab.bench.spec import LoadShape, Slo, Workload, parse_slos
from corral.lab.report import tables
from corral.lab.report.screen import print_json, tell
from corral.lab.report.simulate import forecast_lines, forecast_page, rate_sentence, validation_lines
from corral.lab.simulate.fitting import fit_runs
from corral.lab.simulate.forecast import (
    Forecast,
    SimServer,
    fitted_server,
    forecast,
    highest_rates,
    planned_server,
    smallest_fleet,
    what_if,
)
from corral.lab.simulate.measured import load_measured
from corral.lab.simulate.requests import OpenLoop, RequestSource, source_of, trace_requests
from corral.lab.simulate.validation import validate
from corral.lab.simulate.world import ScalingModel, simulate_load
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import LINKS, parse_gpus
from corral.plan.measured import tuning_for
from corral.plan.models.facts import read_facts
from corral.plan.models.hub import hub_is_off
from corral.plan.settings import largest_graph, parse_assignments
from corral.serve.gateway.policies import POLICIES

EXAMPLES = """
corral simulate llama-3.1-70b --gpus 8xH100 --request-rate 20 --slo ttft_p99=2s --replicas 1..8
corral simulate --from last --input-len 512 --output-len 128 --request-rate 4..40 --slo ttft_p99=1s
corral simulate --from run1,run2,run3 --concurrency 64 --set weights=fp8
corral simulate validate run1 run2 run3 run4
"""
POINTS = 6  # rates of a range that are simulated
SATURATED = 8  # times the seats: requests from which a replica's capacity is taken


@click.group(cls=DefaultVerbGroup)
def command() -> None:
    """How a load would go: latencies, throughput, the smallest fleet.

    Step times come from measured runs (--from), or from the planner (MODEL and --gpus).
    """


def _pair(text: str, flag: str) -> tuple[float, float]:
    """`4` or `4..40`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\.\.(\d+(?:\.\d+)?))?", text)
    low, high = (float(match[1]), float(match[2] or match[1])) if match else (0.0, 0.0)
    if not 0 < low <= high <= 1e6:
        raise UsageError(f"{flag} {text!r} cannot be used.", f"For example: {flag} 4, or {flag} 4..40.")
    return low, high


def _counts(text: str) -> tuple[int, int]:
    low, high = _pair(text, "--replicas")
    if not (low.is_integer() and high.is_integer()):
        raise UsageError(
            f"--replicas {text!r} is not a whole number.", "For example: --replicas 2, or --replicas 1..8."
        )
    return int(low), int(high)


def _slos(text: str | None) -> tuple[Slo, ...]:
    slos = parse_slos(text) if text else ()
    if any(slo.metric == "itl" for slo in slos):
        raise UsageError(
            f"--slo {text!r}: a simulation does not follow single ITLs.",
            "Limit tpot, a request's mean time per token; known are ttft, tpot and e2el.",
        )
    return slos


@command.command("run", cls=GroupedCommand, examples=EXAMPLES, headings={
    "The server": ("--from", "--gpus", "--nodes", "--network", "--context", "--set", "--offline"),
    "The load": ("--trace", "--trace-speed", "--dataset", "--num-prompts", "--input-len", "--output-len",
                 "--range-ratio", "--prefix-len", "--num-prefixes", "--turns", "--request-rate", "--concurrency",
                 "--arrival", "--burstiness", "--seed"),
    "The fleet": ("--replicas", "--route", "--autoscale", "--slo", "--price"),
    "Output": ("-o", "--json", "--help"),
})  # fmt: skip
@click.argument("model", required=False)
@click.option(
    "--from", "measured", multiple=True, metavar="RUN", help="Fit to this run of `corral bench`; repeatable."
)
@click.option("--model", "model_before", cls=FormerOption, argument="MODEL")
@click.option("--gpus", metavar="NxKIND", help="Hardware of one replica, for example 8xH100.")
@click.option("--nodes", type=int, metavar="N", help="Equal nodes of that hardware, for one replica.")
@click.option("--network", "link", cls=RenamedOption, was="--link", type=click.Choice(list(LINKS)), default="ib-ndr",
              show_default=True, help="Between nodes.")  # fmt: skip
@context_option
@fixed_option("assignments")
@click.option("--offline", is_flag=True, help="Do not ask the Hugging Face hub.")
@click.option(
    "--trace",
    type=click.Path(),
    metavar="FILE",
    help="Requests with their times and lengths, one JSON object per line.",
)
@click.option("--trace-speed", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              help="How many times faster to replay.")  # fmt: skip
@click.option("--dataset", type=click.Choice(["random", "prefix_repetition", "multi_turn"]), default="random",
              show_default=True, help="What the requests look like.")  # fmt: skip
@click.option("--num-prompts", type=click.IntRange(min=1), default=2000, show_default=True, help="Requests to send.")
@lengths_options(512)
@click.option("--request-rate", "rate", metavar="PER_S", help="Requests per second: 8, or 4..40.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests at once, where there is no rate.")
@arrival_options(["poisson", "constant", "gamma"])
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of lengths and times.")
@click.option("--replicas", default="1", show_default=True, metavar="N|A..B",
              help="Servers behind one gateway; of A..B, the fewest that meet --slo.")  # fmt: skip
@click.option("--route", "policy", cls=RenamedOption, was="--policy", type=click.Choice(list(POLICIES)),
              default="prefix", show_default=True,
              help="How a server is chosen.")  # fmt: skip
@click.option("--autoscale", "lead_s", type=Duration(at_least_s=1), metavar="DURATION",
              help="Follow the load between A and B replicas; a further one serves after so long.")  # fmt: skip
@click.option("--slo", metavar="SLOS", help="Service level to keep: ttft_p99=500ms,tpot_p99=40ms.")
@price_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write an HTML page with charts there.")
@json_option("All figures as JSON on stdout.")
def run(output: Path | None, as_json: bool, **options: Any) -> int:
    """Simulate a load, or the same load at several rates or on several fleets.

    MODEL is served as its plan for --gpus says, by the planner's roofline.
    """
    options["model"] = options["model"] or options["model_before"]
    slos = _slos(options["slo"])
    source_at, rates = _load(options)  # wrong options are refused before the fit, which takes time
    least, most = _counts(options["replicas"])
    if least < most and not slos and not options["lead_s"]:
        raise UsageError(f"--replicas {options['replicas']} needs an aim.", "Add --slo, or --autoscale 5m.")
    server = _server(options)

    def at(rate: float, replicas: int) -> Forecast:
        scaling = _scaling(options, server, least, most)
        label = f"{rate:g} req/s" if rate else (options["trace"] or f"{options['concurrency'] or 1} at once")
        return forecast(
            server, lambda: source_at(rate), label, replicas, options["policy"], slos, scaling, options["price"]
        )

    def limits() -> tuple[float | None, ...]:
        return highest_rates(server, source_at, rates, slos, least, options["policy"])

    rows, answer = _answer(at, limits, rates, least, most, slos, bool(options["lead_s"]))
    if output is not None:
        write_atomic(output, forecast_page(server, rows, answer))
        tell(f"Written to {output}.", err=True)
    if as_json:
        print_json({"basis": server.basis, "answer": answer, "forecasts": rows,
                    "fit": to_json(server.fit) if server.fit else None})  # fmt: skip
    elif output is None:
        for line in forecast_lines(server, rows, answer, tables.room()):
            click.echo(line)
    return 0


def _answer(
    at: Callable[[float, int], Forecast], limits: Callable[[], tuple[float | None, ...]], rates: tuple[float, float],
    least: int, most: int, slos: tuple[Slo, ...], scales: bool,
) -> tuple[list[Forecast], str]:  # fmt: skip
    low, high = rates
    levels = ", ".join(map(str, slos))
    if least < most and not scales:
        rows, best = smallest_fleet(lambda count: at(high, count), least, most)
        if best is None:
            return rows, f"{counted(most, 'replica')} cannot meet {levels}."
        return rows, f"The smallest fleet that meets {levels}: {counted(best.replicas, 'replica')}."
    if low == high:
        return [at(low, least)], ""
    steps = [low * (high / low) ** (n / (POINTS - 1)) for n in range(POINTS)]
    rows = [at(float(f"{rate:.3g}"), least) for rate in steps]
    if not slos:
        return rows, ""
    return rows, rate_sentence(limits(), rates, levels)


def _load(options: dict[str, Any]) -> tuple[Callable[[float], RequestSource], tuple[float, float]]:
    """A function that makes the load at a rate, and the range of rates."""
    if options["trace"]:
        if options["rate"] or options["concurrency"]:
            raise UsageError("a trace has its own times.", "Leave out --request-rate and --concurrency, or --trace.")
        next(trace_requests(options["trace"]), None)
        return lambda _: OpenLoop(trace_requests(options["trace"], options["trace_speed"])), (0.0, 0.0)
    workload = _workload(options)
    if options["dataset"] == "multi_turn" and options["rate"]:
        raise UsageError(
            "conversations are simulated in a closed loop only.", "Give --concurrency instead of a rate."
        )
    rates = _pair(options["rate"], "--request-rate") if options["rate"] else (0.0, 0.0)
    closed = options["concurrency"] or (None if options["rate"] else 1)
    shape = LoadShape(concurrency=closed, arrival=options["arrival"], burstiness=options["burstiness"])
    return lambda rate: source_of(workload, replace(shape, rate=rate or None)), rates


def _workload(options: dict[str, Any]) -> Workload:
    lengths = ("num_prompts", "input_len", "output_len", "range_ratio", "prefix_len", "num_prefixes", "turns")
    return Workload(options["dataset"], **{name: options[name] for name in lengths}, seed=options["seed"])


def _scaling(options: dict[str, Any], server: SimServer, least: int, most: int) -> ScalingModel | None:
    """Scaling with the capacity of one replica, simulated at its limit with requests of these lengths."""
    if not options["lead_s"]:
        return None
    count = min(4000, SATURATED * server.model.seats)
    work = Workload(num_prompts=count, input_len=options["input_len"], output_len=options["output_len"])
    full = simulate_load(source_of(work, LoadShape(concurrency=server.model.seats)), server.model)
    capacity = (full.input_tokens + full.output_tokens) / full.duration_s if full.duration_s else 1.0
    return ScalingModel(least, most, capacity, options["lead_s"])


def _server(options: dict[str, Any]) -> SimServer:
    references = [name for text in options["measured"] for name in text.split(",") if name]
    fixed = parse_assignments(options["assignments"])
    if references:
        runs = load_measured(references)
        server = fitted_server(runs[0], fit_runs(runs))
        if not fixed and not options["context"] and not options["gpus"]:
            return server
        plan = runs[0].plan
        if plan is None or plan.inventory.kind is None:
            raise UsageError(
                "the effect of another plan is known for GPUs only, and for runs that have a plan.",
                "Leave out --context, --set and --gpus.",
            )
        inventory = (
            parse_gpus(options["gpus"], options["nodes"], options["link"]) if options["gpus"] else plan.inventory
        )
        seats = options["concurrency"] or plan.settings.max_num_seqs
        kept = replace(
            plan.goal, context=options["context"], concurrency=seats
        )  # so that only the given settings differ
        captured = largest_graph(plan.settings, plan.inventory.kind)
        same = {} if options["gpus"] or plan.settings.eager else {"max_graph_size": str(captured)}
        return what_if(server, plan, _fitting(make_plan(plan.model, inventory, kept, {**same, **fixed})))
    if not options["model"] or not options["gpus"]:
        raise UsageError("no server was named.", "Give --from RUN, or a model and --gpus.")
    facts = read_facts(options["model"], options["offline"] or hub_is_off())
    inventory = parse_gpus(options["gpus"], options["nodes"], options["link"])
    plan = _fitting(make_plan(facts, inventory, _goal(options), fixed, tuning_for(facts, inventory)))
    _refuse_long(options, plan)
    return planned_server(plan)


def _goal(options: dict[str, Any]) -> Goal:
    """The server is planned for its requests, as by `corral plan --input-len --output-len`."""
    goal = Goal(context=options["context"], concurrency=options["concurrency"])
    if options["trace"]:
        return goal
    work = _workload(options)
    return replace(goal, prompt_tokens=work.shared_len + work.input_len, output_tokens=work.output_len)


def _refuse_long(options: dict[str, Any], plan: Plan) -> None:
    """Refuse requests beyond the context, which a server would refuse; those of a trace are not checked."""
    longest = None if options["trace"] else _workload(options).longest_tokens
    if longest is not None and longest > plan.max_model_len:
        raise UsageError(
            f"requests of {longest:,} tokens do not fit the plan's context of {plan.max_model_len:,}.",
            "Make them shorter (--input-len, --output-len), or plan for a longer --context.",
        )


def _fitting(plan: Plan) -> Plan:
    if not plan.fits:
        raise DoesNotFitError(f"it does not fit: {plan.reason}", "`corral plan` says what would.")
    return plan


@command.command("validate")
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--fit", "fitted", multiple=True, metavar="RUN", help="Fit to this run; several (default: the first 3)."
)
@click.option("--slo", metavar="SLOS", help="Service level for which highest rates are compared: ttft_p90=1s.")
@json_option("All errors as JSON on stdout.")
def validate_command(runs: tuple[str, ...], fitted: tuple[str, ...], slo: str | None, as_json: bool) -> int:
    """Fit to some RUNS of `corral bench`, predict the others, and print the errors beside the planner's."""
    slos = _slos(slo)
    names_to_fit = [Path(name).name for name in fitted]
    result = validate(load_measured([*runs, *(one for one in fitted if one not in runs)]), names_to_fit, slos)
    if as_json:
        medians = {m: result.median_error(m) for m in ("e2el_mean", "ttft_p50", "tpot_p50", "throughput")}
        print_json({"validation": result, "median_errors": medians})
    else:
        for line in validation_lines(result, tables.room()):
            click.echo(line)
    return 0

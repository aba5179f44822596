"""The options of `corral bench`, some of them `corral simulate`'s as well, and how they become a spec."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from corral.base.errors import UsageError
from corral.base.record import from_json
from corral.base.untrusted import parse_json
from corral.cli.help_pages import RenamedOption
from corral.cli.options import Duration, F, T, endpoint_options, json_option, price_option, together
from corral.lab.bench.spec import (
    ARRIVALS,
    DATASETS,
    TASKS,
    LoadShape,
    Spec,
    Workload,
    parse_percentiles,
    parse_slos,
)
from corral.plan.contract import Plan


def lengths_options(input_len: int) -> Callable[[F], F]:
    """Lengths of prompts and answers, and what prompts share."""
    return together(
        click.option("--input-len", default=input_len, show_default=True, help="Prompt tokens of a request."),
        click.option("--output-len", default=128, show_default=True, help="Output tokens of a request."),
        click.option("--range-ratio", default=0.0, help="Lengths vary by ± this share."),
        click.option("--prefix-len", default=64, show_default=True, help="prefix_repetition: shared tokens."),
        click.option("--num-prefixes", default=10, show_default=True, help="prefix_repetition: different prefixes."),
        click.option("--turns", default=3, show_default=True, help="multi_turn: requests of one conversation."),
    )


def arrival_options(choices: Sequence[str]) -> Callable[[F], F]:
    return together(
        click.option(
            "--arrival",
            default="poisson",
            show_default=True,
            type=click.Choice(choices),
            help="With a rate: when requests are sent.",
        ),
        click.option(
            "--burstiness", default=1.0, show_default=True, help="gamma: below 1 burstier, above 1 more even."
        ),
    )


measured_options = together(
    endpoint_options,
    click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan (JSON) to measure against."),
    click.option(
        "--task",
        type=click.Choice(TASKS),
        help="What requests ask for (default: what the deployment is for; generate).",
    ),
    price_option,
    click.option("--gpu-count", "gpus", cls=RenamedOption, was="--gpus", type=int, metavar="N",
                 help="GPUs that serve it, where no plan tells."),
    click.option("--name", "run_name", default="", metavar="NAME", help="Name of the run (default: time and load)."),
    click.option("--save-detailed", is_flag=True, help="Per-request lists in result.json, as vLLM writes them."),
    json_option("The figures as JSON on stdout."),
)  # fmt: skip

work_options = together(
    click.option(
        "--dataset",
        default="random",
        show_default=True,
        metavar="NAME",
        help=f"What the requests look like: {', '.join(DATASETS)}.",
    ),
    click.option("--dataset-path", "file", type=click.Path(), help="Its file."),
    lengths_options(128),
    click.option("--chat", is_flag=True, help="Use the chat endpoint."),
    click.option(
        "--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Go on past the model's own end."
    ),
    click.option("--temperature", default=0.0, show_default=True, help="Spread of the choice; 0 is greedy."),
    click.option("--seed", type=int, help="Seed of prompts and send times (default: a new one, saved with the run)."),
    click.option(
        "--warmup", type=int, help="Requests before the measurement (default: as many as run at once, at most 16)."
    ),
    click.option("--percentiles", default="90,99", show_default=True, metavar="P,P,…", help="Which to report."),
    click.option(
        "--timeout",
        "stall_s",
        cls=RenamedOption,
        was="--stall",
        type=Duration(),
        default="10m",
        show_default=True,
        metavar="TIME",
        help="How long a server may be silent.",
    ),
)

slo_option = click.option(
    "--slo", cls=RenamedOption, was="--goodput", default="", metavar="SLOS",
    help="Service levels to judge it by, and requests that meet them: ttft_p99=1s,tpot_p99=50ms.",
)  # fmt: skip

load_options = together(
    click.option("--num-prompts", default=100, show_default=True, help="Requests (conversations) to send."),
    click.option("--concurrency", type=int, help="Closed loop: requests at once. With a rate: the most at once."),
    click.option("--request-rate", "rate", type=float, metavar="PER_S", help="Open loop: requests per second."),
    arrival_options(ARRIVALS),
    click.option("--ramp-to", type=float, metavar="PER_S", help="ramp: the last rate."),
    click.option("--trace-speed", "speed", default=1.0, show_default=True, help="trace: how many times faster."),
    click.option("--seconds", type=Duration(), metavar="TIME", help="Send nothing after this long."),
)


def make_spec(options: Mapping[str, Any], *, replay: bool = False) -> Spec:
    """The spec that the options describe; with `replay`, a trace keeps its own times unless a load is given."""
    replay = replay and options["dataset"] == "trace" and not options.get("rate") and not options.get("concurrency")
    load = _of_options(LoadShape, {**options, **({"arrival": "trace"} if replay else {})})
    seed = options["seed"] if options["seed"] is not None else secrets.randbelow(2**31)
    workload = _of_options(
        Workload,
        {**options, "dataset": options["dataset"].replace("-", "_"), "seed": seed, "task": options.get("task") or ""},
    )
    warmup = options["warmup"] if options["warmup"] is not None else min(load.concurrency or 4, 16)
    if warmup < 0:
        raise UsageError(f"--warmup cannot be {warmup}.", "Give 0 or more.")
    return Spec(
        workload,
        load,
        warmup=warmup,
        percentiles=parse_percentiles(options["percentiles"]),
        goodput=parse_slos(options["slo"]) if options["slo"] else (),
        stall_s=options["stall_s"],
    )


def _of_options(kind: type[T], options: Mapping[str, Any]) -> T:
    """A record from the options that have its fields' names."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in options.items() if name in names})


def refuse_ignored(load: LoadShape, over: str = "rate") -> None:
    """Options about arrivals that this load would ignore in silence."""
    context = click.get_current_context()

    def typed(name: str) -> bool:
        return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    open_loop = load.open or (context.info_name == "search" and over == "rate")
    if typed("arrival") and not open_loop:
        raise UsageError(
            f"--arrival {load.arrival} needs a rate: without one, requests are not spread over time.",
            "Use --over rate." if context.info_name == "search" else "Add --request-rate R, in requests per second.",
        )
    for name, flag, arrival in _OF_ARRIVAL:
        if typed(name) and load.arrival != arrival:
            raise UsageError(
                f"{flag} applies to --arrival {arrival}, not to {load.arrival}.",
                f"Add --arrival {arrival}, or leave {flag} out.",
            )


_OF_ARRIVAL = (
    ("burstiness", "--burstiness", "gamma"),
    ("ramp_to", "--ramp-to", "ramp"),
    ("speed", "--trace-speed", "trace"),
)


def numbers(text: str, flag: str) -> list[float]:
    """`1,4,16` as numbers above 0."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise UsageError(f"{flag} {text!r} cannot be used.", f"For example: {flag} 1,4,16,64.")
    return values


def read_plan_file(path: Path | None) -> Plan | None:
    return None if path is None else from_json(Plan, parse_json(path.read_bytes(), str(path)), str(path))

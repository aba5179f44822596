"""The options of `corral bench` and how they become a spec."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from corral.base.errors import UsageError
from corral.base.record import load_json
from corral.cli.options import Duration
from corral.lab.bench.spec import ARRIVALS, DATASETS, LoadShape, Spec, Workload, parse_goodput, parse_percentiles
from corral.plan.contract import Plan

Decorator = Callable[[Any], Any]


def _apply(*options: Decorator) -> Decorator:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


server_options = _apply(
    click.option(
        "--deployment", "-d", "name", metavar="NAME", help="The deployment to measure (default: the only ready one)."
    ),
    click.option("--url", help="A server that Corral did not start."),
    click.option("--key-file", type=click.Path(), help="File with its key."),
    click.option("--model", help="The served model's name, where there are several."),
    click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan (JSON) to measure against."),
    click.option(
        "--price", type=click.FloatRange(min=0, min_open=True), metavar="MONEY", help="Price of one GPU for one hour."
    ),
    click.option("--gpus", type=int, metavar="N", help="GPUs that serve it, where no plan tells."),
    click.option("--name", "run_name", default="", metavar="NAME", help="Name of the run (default: time and load)."),
    click.option("--save-detailed", is_flag=True, help="Per-request lists in result.json, as vLLM writes them."),
    click.option("--json", "as_json", is_flag=True, help="The figures as JSON on stdout."),
)

work_options = _apply(
    click.option("--dataset", default="random", show_default=True, metavar="NAME", help=", ".join(DATASETS) + "."),
    click.option("--dataset-path", type=click.Path(), help="Its file."),
    click.option("--input-len", default=128, show_default=True, help="Prompt tokens."),
    click.option("--output-len", default=128, show_default=True, help="Tokens of an answer."),
    click.option("--range-ratio", default=0.0, help="Lengths vary by ± this share."),
    click.option("--prefix-len", default=64, show_default=True, help="prefix_repetition: shared tokens."),
    click.option("--num-prefixes", default=10, show_default=True, help="prefix_repetition: different prefixes."),
    click.option("--turns", default=3, show_default=True, help="multi_turn: requests of one conversation."),
    click.option("--chat", is_flag=True, help="Use the chat endpoint."),
    click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Answers of full length."),
    click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
    click.option("--seed", type=int, help="Of prompts and send times (default: a new one, saved with the run)."),
    click.option(
        "--warmup", type=int, help="Requests before the measurement (default: as many as run at once, at most 16)."
    ),
    click.option("--percentiles", default="90,99", show_default=True, metavar="P,P,…", help="Which to report."),
    click.option("--goodput", "goodput", default="", metavar="SLOS", help="Count good requests: ttft=1s,tpot=50ms."),
    click.option(
        "--stall",
        "stall_s",
        type=Duration(),
        default="10m",
        show_default=True,
        metavar="TIME",
        help="How long a server may be silent.",
    ),
)

load_options = _apply(
    click.option("--num-prompts", default=100, show_default=True, help="Requests (conversations) to send."),
    click.option("--concurrency", type=int, help="Closed loop: requests at once. With a rate: the most at once."),
    click.option("--request-rate", "rate", type=float, metavar="PER_S", help="Open loop: requests per second."),
    click.option(
        "--arrival", default="poisson", show_default=True, type=click.Choice(ARRIVALS), help="With a rate: when."
    ),
    click.option("--burstiness", default=1.0, show_default=True, help="gamma: below 1 burstier, above 1 more even."),
    click.option("--ramp-to", type=float, metavar="PER_S", help="ramp: the last rate."),
    click.option("--trace-speed", default=1.0, show_default=True, help="trace: how many times faster to replay."),
    click.option("--seconds", type=Duration(), metavar="TIME", help="Send nothing after this long."),
)


def make_spec(given: dict[str, Any], *, replay: bool = False) -> Spec:
    """The spec that the options describe; with `replay`, a trace keeps its own times unless a load is given."""
    replay = replay and given["dataset"] == "trace" and given.get("rate") is None and given.get("concurrency") is None
    load = LoadShape(
        concurrency=given.get("concurrency"),
        rate=given.get("rate"),
        arrival="trace" if replay else given.get("arrival", "poisson"),
        burstiness=given.get("burstiness", 1.0),
        ramp_to=given.get("ramp_to"),
        speed=given.get("trace_speed", 1.0),
        seconds=given.get("seconds"),
    )
    seed = given["seed"] if given["seed"] is not None else secrets.randbelow(2**31)
    workload = Workload(
        dataset=given["dataset"].replace("-", "_"),
        file=given["dataset_path"],
        num_prompts=given.get("num_prompts", 100),
        input_len=given["input_len"],
        output_len=given["output_len"],
        range_ratio=given["range_ratio"],
        prefix_len=given["prefix_len"],
        num_prefixes=given["num_prefixes"],
        turns=given["turns"],
        chat=given["chat"],
        ignore_eos=given["ignore_eos"],
        temperature=given["temperature"],
        seed=seed,
    )
    warmup = given["warmup"] if given["warmup"] is not None else min(load.concurrency or 4, 16)
    if warmup < 0:
        raise UsageError(f"--warmup cannot be {warmup}.", "Give 0 or more.")
    return Spec(
        workload,
        load,
        warmup=warmup,
        percentiles=parse_percentiles(given["percentiles"]),
        goodput=parse_goodput(given["goodput"]),
        stall_s=given["stall_s"],
    )


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
    ("trace_speed", "--trace-speed", "trace"),
)


def numbers(text: str, flag: str) -> list[float]:
    """`1,4,16` as numbers above 0."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise UsageError(f"{flag} {text!r} cannot be used.", f"For example: {flag} 1,4,16,64.")
    return found


def read_plan_file(path: Path | None) -> Plan | None:
    return None if path is None else load_json(Plan, path)

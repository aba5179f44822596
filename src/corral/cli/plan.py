"""`corral plan`: will it fit, how to split it, how fast will it be, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from corral.base.errors import BARELY_FITS, CorralError, DoesNotFitError, UncountedError, UsageError
from corral.base.home import home_dir
from corral.base.record import dump_json, to_json
from corral.cli.help_pages import RenamedOption
from corral.cli.options import TokenCount
from corral.deploy.profile.merging import (
    PlanRequest,
    engine_version,
    hardware_of_plan,
    plan_request,
    storage_of,
    tuning_of_plan,
)
from corral.deploy.profile.profile import Profile, load_profile
from corral.engines.flags import check_arguments, shipped_flags
from corral.engines.settings import SETTINGS
from corral.plan import measured as calibration
from corral.plan.choose import compare, make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import GIB, GPUS, LINKS, Inventory, find_gpu, parse_gpus
from corral.plan.models.facts import ModelFacts, facts_from_folder, read_facts
from corral.plan.models.hub import hub_is_off
from corral.plan.places import Storage, located, pulled
from corral.plan.settings import parse_assignments, refuse_flags


@click.command(
    epilog=f"--set takes {', '.join(SETTINGS)}. Exits 0 when it fits, {BARELY_FITS} when it barely fits,"
    f" {DoesNotFitError.exit_code} when not, {UncountedError.exit_code} when its size is not known."
)
@click.argument("model", required=False)
@click.option("--on", "on", metavar="PROFILE", envvar="CORRAL_PROFILE", help="Hardware and defaults of a profile.")
@click.option("--gpus", metavar="NxKIND", help="Hardware, for example 8xH100 (default: this machine's own).")
@click.option("--nodes", type=int, metavar="N", help="Equal nodes of that hardware.")
@click.option("--network", "link", cls=RenamedOption, was="--link", type=click.Choice(list(LINKS)),
              help="Between nodes (default: ib-ndr).")  # fmt: skip
@click.option(
    "--context", type=TokenCount(), help="Longest request: 32768, or 32k (default: the model's own, if it fits)."
)
@click.option("--concurrency", type=int, metavar="N", help="Requests at once.")
@click.option(
    "--goal", type=click.Choice(["balanced", "latency", "throughput"]), help="What comes first (default: balanced)."
)
@click.option(
    "--input-len",
    "prompt_tokens",
    cls=RenamedOption,
    was="--prompt",
    type=int,
    default=512,
    show_default=True,
    metavar="N",
    help="Prompt tokens of a request.",
)
@click.option(
    "--output-len",
    "output_tokens",
    cls=RenamedOption,
    was="--output",
    type=int,
    default=256,
    show_default=True,
    metavar="N",
    help="Output tokens of a request.",
)
@click.option("--replicas", type=click.IntRange(1, 1000), metavar="N",
              help="N replicas: in one engine, or as N servers behind one address, and why.")  # fmt: skip
@click.option("--price", type=float, metavar="MONEY", help="Price of one GPU for one hour.")
@click.option("--storage", type=float, metavar="GB/S", help="Speed at which weights are read.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Fix one field, plan the rest.")
@click.option("--compare", "comparing", is_flag=True, help="Alternatives side by side, best first.")
@click.option("--explain", "explaining", is_flag=True, help="The arithmetic, line by line.")
@click.option("--need", "needing", is_flag=True, help="Smallest inventories that serve it.")
@click.option("--table", "tabling", is_flag=True, help="Memory of models in bf16, fp8 and int4, with GPU counts.")
@click.option("--calibration", "learned", is_flag=True, help="What earlier deployments taught.")
@click.option("--weights-gib", type=click.FloatRange(0.01, 1e5), metavar="GIB",
              help="Size of the weights, for a model that its config does not count.")  # fmt: skip
@click.option("--offline", is_flag=True, help="Do not ask the Hugging Face hub.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def command(
    model: str | None,
    on: str | None,
    gpus: str | None,
    nodes: int | None,
    link: str | None,
    comparing: bool,
    explaining: bool,
    needing: bool,
    tabling: bool,
    learned: bool,
    offline: bool,
    as_json: bool,
    engine_args: tuple[str, ...],
    **given: Any,
) -> int:
    """Plan how to run MODEL: a folder, a Hugging Face repository, or a catalogue name.

    Arguments of `vllm serve` after `--` are read as `--set` where the plan decides them. --table takes several.
    """
    if tabling:
        named = [*([model] if model else []), *engine_args]
        return _show_table(named, gpus or "H100", given["context"], offline, as_json)
    if model and model.startswith("-"):  # `corral plan -- --flag value`: everything after -- is the engine's
        engine_args, model = (model, *engine_args), None
    if learned:
        return _show_lessons(as_json)
    profile = load_profile(on)
    question = _asked(profile, model, given, engine_args)
    weights_bytes = int((given["weights_gib"] or 0) * GIB)
    facts = _facts(profile, question.model, offline or hub_is_off(), weights_bytes)
    if needing:
        return _show_needs(facts, question.goal, gpus, as_json)
    inventory = hardware_of_plan(profile, gpus, nodes, link)
    if comparing:
        return _show_comparison(question, facts, inventory, profile, as_json)
    form = "json" if as_json else "reasons" if explaining else "table"
    if given["replicas"]:
        return _show_replicas(question, facts, inventory, profile, form, given["replicas"])
    return _show_plan(question, facts, inventory, profile, form)


def _facts(profile: Profile, model: str, offline: bool, weights_bytes: int) -> ModelFacts:
    """Of the files that a start would serve, where a profile or an earlier pull has them; else as the name says."""
    storage = Storage(**storage_of(profile))
    with contextlib.suppress(CorralError):
        if any(vars(storage).values()) or pulled():
            source = located(model, storage)
            if source.path:
                facts = facts_from_folder(Path(source.path), source.name, weights_bytes)
                return replace(facts, notes=(*facts.notes, f"the files are in {source.path}"))
    return read_facts(model, offline, weights_bytes)


class _Question(NamedTuple):
    """What is to be planned."""

    model: str
    goal: Goal
    asked: PlanRequest


def _asked(profile: Profile, model: str | None, given: Mapping[str, Any], engine_args: tuple[str, ...]) -> _Question:
    model = profile.settings.defaults.model if model is None else model
    if model is None:
        raise UsageError("no model was named.", "For example: corral plan llama-3.1-8b --gpus 1xH100.")
    said = {name: given[name] for name in ("context", "concurrency", "goal") if given[name] is not None}
    said |= {"fixed": parse_assignments(given["assignments"]), "extra_args": engine_args}
    asked = plan_request(profile, said)
    _check_rest(asked.rest)
    goal = Goal(
        **asked.goal,
        prompt_tokens=given["prompt_tokens"],
        output_tokens=given["output_tokens"],
        price_per_gpu_hour=given["price"],
        storage_gb_s=given["storage"],
    )
    return _Question(model, goal, asked)


def _check_rest(arguments: tuple[str, ...]) -> None:
    if arguments and (flags := shipped_flags()):
        check_arguments(arguments, flags)


def _show_lessons(as_json: bool) -> int:
    from corral.lab.report.plan import lesson_lines

    lessons = calibration.read_lessons(home_dir())
    click.echo(dump_json({"lessons": lessons}) if as_json else "\n".join(lesson_lines(lessons)), nl=not as_json)
    return 0


def _show_needs(facts: ModelFacts, request: Goal, gpus: str | None, as_json: bool) -> int:
    from corral.lab.report.plan import need_lines
    from corral.plan.need import needs

    rows = needs(facts, request, (find_gpu(gpus.split("x")[-1]).kind,) if gpus else ())
    if as_json:
        document = {
            "model": facts.name,
            "needs": [{**to_json(r), "gpus": r.gpus} for r in rows],
            "notes": facts.notes,
        }
        click.echo(dump_json(document), nl=False)
    else:
        click.echo(f"{facts.name} with a context of {request.context or facts.max_context:,}:\n")
        click.echo("\n".join(need_lines(rows, facts.notes)))
    return 0


def _show_table(models: list[str], gpus: str, context: int | None, offline: bool, as_json: bool) -> int:
    from corral.lab.report.plan import table_lines
    from corral.plan.need import memory_table

    names = models or ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]
    facts = [read_facts(name, offline or hub_is_off()) for name in names]
    gpu = GPUS[str(parse_gpus(gpus).gpu)]
    rows = memory_table(facts, gpu, context)
    click.echo(
        dump_json({"gpu": gpu.kind, "models": rows}) if as_json else "\n".join(table_lines(rows, gpu)), nl=not as_json
    )
    return 0


def _show_comparison(
    question: _Question, facts: ModelFacts, inventory: Inventory, profile: Profile, as_json: bool
) -> int:
    from corral.lab.report.plan import comparison_lines

    tuning = tuning_of_plan(profile, facts, inventory, question.asked.rest)
    rows = compare(facts, inventory, question.goal, question.asked.fixed, tuning)
    if as_json:
        click.echo(dump_json({"candidates": [c for _, c in rows]}), nl=False)
    else:
        click.echo("\n".join(comparison_lines(rows)))
    return 0 if any(not c.problem for _, c in rows) else DoesNotFitError.exit_code


def _show_plan(question: _Question, facts: ModelFacts, inventory: Inventory, profile: Profile, form: str) -> int:
    tuning = tuning_of_plan(profile, facts, inventory, question.asked.rest)
    plan = make_plan(facts, inventory, question.goal, question.asked.fixed, tuning)
    if old := _older_engine(facts, inventory, profile):
        plan = replace(plan, warnings=(*plan.warnings, old))
    _refuse_flags(question, plan)
    if form == "json":
        click.echo(dump_json(plan), nl=False)
    else:
        _print_plan(plan, question, profile, form)
    return _exit_code(plan)


def _older_engine(facts: ModelFacts, inventory: Inventory, profile: Profile) -> str:
    """That the vLLM which would serve it is too old for the model."""
    from corral.engines.recipes import older_engine, recipe_for, tables

    recipe = recipe_for([facts.name.rpartition("/")[2]], "", tables()[0])
    return older_engine(facts.name, recipe, engine_version(profile, inventory))


def _exit_code(plan: Plan) -> int:
    return BARELY_FITS if plan.barely else 0 if plan.fits else DoesNotFitError.exit_code


def _show_replicas(
    question: _Question, facts: ModelFacts, inventory: Inventory, profile: Profile, form: str, replicas: int
) -> int:
    """The plan of one server, or of the engine with all replicas, and which of the two it is."""
    from corral.lab.report.plan import replica_lines
    from corral.plan.need import ReplicaForm, advise

    tuning = tuning_of_plan(profile, facts, inventory, question.asked.rest)
    advice = advise(facts, inventory, question.goal, question.asked.fixed, tuning, replicas)
    _refuse_flags(question, advice.plan)
    if form == "json":
        click.echo(dump_json(advice), nl=False)
    else:
        click.echo("\n".join([*replica_lines(advice), ""]))
        servers = replicas if advice.form is ReplicaForm.SERVERS else 1
        _print_plan(advice.plan, question, profile, form, servers)
    return _exit_code(advice.plan)


def _refuse_flags(question: _Question, plan: Plan) -> None:
    if plan.fits:
        refuse_flags(question.asked.rest, plan.settings, plan.max_model_len)


def _print_plan(plan: Plan, question: _Question, profile: Profile, form: str, replicas: int = 1) -> None:
    if form == "reasons":
        from corral.plan.reasons import explain

        click.echo("\n".join(explain(plan)))
    else:
        from corral.lab.report.plan import plan_lines

        click.echo("\n".join(plan_lines(plan, question.model, question.asked, profile, replicas)))

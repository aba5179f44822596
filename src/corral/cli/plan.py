"""`corral plan`: will it fit, how to split it, how fast will it be, and why."""

from __future__ import annotations

from typing import Any

import click

from corral.base.errors import BARELY_FITS, DoesNotFitError, UncountedError
from corral.base.home import home_dir
from corral.base.record import dump_json, to_json
from corral.cli.help_pages import RenamedOption
from corral.cli.options import TokenCount
from corral.deploy.profile.merging import hardware_of_plan, tuning_of_plan
from corral.deploy.profile.planning import PlanInput, facts_of, plan_of, question_of, refuse_planned_flags
from corral.deploy.profile.profile import Profile, load_profile
from corral.engines.settings import SETTINGS
from corral.plan import measured as calibration
from corral.plan.choose import compare
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import GPUS, LINKS, Inventory, find_gpu, parse_gpus
from corral.plan.models.facts import ModelFacts, read_facts
from corral.plan.models.hub import hub_is_off
from corral.plan.settings import parse_assignments


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
    said = {**given, "fixed": parse_assignments(given["assignments"])}
    question = question_of(profile, model, said, engine_args)
    facts = facts_of(profile, question.model, offline, given["weights_gib"])
    if needing:
        return _show_needs(facts, question.goal, gpus, as_json)
    inventory = hardware_of_plan(profile, gpus, nodes, link)
    if comparing:
        return _show_comparison(question, facts, inventory, profile, as_json)
    form = "json" if as_json else "reasons" if explaining else "table"
    if given["replicas"]:
        return _show_replicas(question, facts, inventory, profile, form, given["replicas"])
    return _show_plan(question, facts, inventory, profile, form)


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
    question: PlanInput, facts: ModelFacts, inventory: Inventory, profile: Profile, as_json: bool
) -> int:
    from corral.lab.report.plan import comparison_lines

    tuning = tuning_of_plan(profile, facts, inventory, question.asked.rest)
    rows = compare(facts, inventory, question.goal, question.asked.fixed, tuning)
    if as_json:
        click.echo(dump_json({"candidates": [c for _, c in rows]}), nl=False)
    else:
        click.echo("\n".join(comparison_lines(rows)))
    return 0 if any(not c.problem for _, c in rows) else DoesNotFitError.exit_code


def _show_plan(question: PlanInput, facts: ModelFacts, inventory: Inventory, profile: Profile, form: str) -> int:
    plan = plan_of(question, facts, inventory, profile)
    if form == "json":
        click.echo(dump_json(plan), nl=False)
    else:
        _print_plan(plan, question, profile, form)
    return _exit_code(plan)


def _exit_code(plan: Plan) -> int:
    return BARELY_FITS if plan.barely else 0 if plan.fits else DoesNotFitError.exit_code


def _show_replicas(
    question: PlanInput, facts: ModelFacts, inventory: Inventory, profile: Profile, form: str, replicas: int
) -> int:
    """The plan of one server, or of the engine with all replicas, and which of the two it is."""
    from corral.lab.report.plan import replica_lines
    from corral.plan.need import ReplicaForm, advise

    tuning = tuning_of_plan(profile, facts, inventory, question.asked.rest)
    advice = advise(facts, inventory, question.goal, question.asked.fixed, tuning, replicas)
    refuse_planned_flags(question, advice.plan)
    if form == "json":
        click.echo(dump_json(advice), nl=False)
    else:
        click.echo("\n".join([*replica_lines(advice), ""]))
        servers = replicas if advice.form is ReplicaForm.SERVERS else 1
        _print_plan(advice.plan, question, profile, form, servers)
    return _exit_code(advice.plan)


def _print_plan(plan: Plan, question: PlanInput, profile: Profile, form: str, replicas: int = 1) -> None:
    if form == "reasons":
        from corral.plan.reasons import explain

        click.echo("\n".join(explain(plan)))
    else:
        from corral.lab.report.plan import plan_lines

        click.echo("\n".join(plan_lines(plan, question.model, question.asked, profile, replicas)))

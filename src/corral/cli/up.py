"""`corral up`: from nothing to a model that answers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from corral.base.errors import CorralError, LaunchError, UsageError
from corral.base.wording import duration
from corral.cli.help_pages import GroupedCommand, RenamedOption
from corral.cli.options import (
    PREFIX,
    Duration,
    Origins,
    chosen_target,
    context_option,
    env_option,
    fixed_option,
    profile_option,
    runtime_options,
    target_options,
)
from corral.cli.up_fleet import bring_up_fleet, checked, curl_lines, next_lines
from corral.client.client import CHAT, Client
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.diagnosis import last_lines
from corral.deploy.deployment.folder import open_folder
from corral.deploy.deployment.state import Patience
from corral.deploy.launch.paste import masked
from corral.deploy.launch.render import refuse_reserved
from corral.deploy.lifecycle import deployments, rendering
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.lifecycle.watching import wait_ready
from corral.deploy.profile.merging import merged, use_hub_of
from corral.deploy.profile.profile import Profile, load_profile
from corral.deploy.targets.base import Queue, load_target
from corral.engines.runtimes.base import parse_options
from corral.lab.report.launch import fleet_launch_lines, launch_lines
from corral.lab.report.screen import PhaseScreen, explain, print_json
from corral.plan.settings import parse_assignments
from corral.serve.fleet.chain import chain_of
from corral.serve.fleet.creation import FleetOrder, parse_size, preview
from corral.serve.fleet.start import bring_up, bring_up_chain
from corral.serve.gateway.policies import POLICIES

EXAMPLES = """
corral up                 # a small model, on this machine
corral up llama-3.1-8b-instruct --context 32768
corral up llama-3.1-70b-instruct --hosts node00,node01
corral up llama-3.1-70b-instruct --partition gpu --time 8:00:00 --renew
corral up llama-3.1-405b-instruct --on my-cluster --dry-run --shell
corral up llama-3.1-8b-instruct --replicas 4 --hosts n0,n1,n2,n3
"""
HEADINGS = {
    "The model": ("--context", "--concurrency", "--goal", "--set", "--tuned", "--served-name", "--recipe"),
    "Where it runs": ("--on", "--bind", "--port", "--expose"),
    "What clients may use": ("--adapters", "--tools", "--allowed-origins", "--store-responses", "--key-file"),
    "Options for ssh": (),
    "Options for SLURM": ("--renew", "--max-jobs"),
    "Options for ssh and SLURM": (),
    "How it runs": ("--runtime", "--runtime-option", "--flavour", "--link", "--env"),
    "Several servers": ("--replicas", "--keep", "--keeper", "--route"),
    "Behaviour": ("--name", "--wait", "--attach", "--restart", "--stall", "--hung", "--node-timeout"),
    "Output": ("--dry-run", "--shell", "--json", "--help"),
}
DRY_RUN_FORMS = "Nothing is started. --json prints the whole LaunchSpec, --shell commands to paste."
FIRST_QUESTION = "What is the capital of France?"


@click.command(
    cls=GroupedCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    headings=HEADINGS,
    examples=EXAMPLES,
)
@click.argument("model", required=False)
@profile_option()
@click.option("--name", help="Name of the deployment (default: the model's name).")
@click.option("--served-name", multiple=True, metavar="NAME",
              help="Model name in clients' requests; repeatable (default: the model's name).")  # fmt: skip
@context_option
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests at once that the plan must hold.")
@click.option(
    "--goal", type=click.Choice(["balanced", "latency", "throughput"]), help="What comes first (default: balanced)."
)
@fixed_option()
@click.option("--tuned", metavar="RUN", help="With the settings that `corral tune` found best in RUN (`last`).")
@click.option("--bind", metavar="ADDRESS", help="Address to listen on (default: this machine's own, 127.0.0.1).")
@click.option("--port", type=click.IntRange(1, 65535), help="Port (default: 8000, or a free one when it is taken).")
@click.option(
    "--flavour", type=click.Choice(["cpu", "cuda", "rocm"]), help="Engine build (default: the GPUs', or cpu)."
)
@click.option(
    "--link", type=click.Choice(["auto", "native", "ray"]), help="How several nodes are joined (default: auto)."
)
@click.option("--expose", is_flag=True, help="Listen on the cluster's network, not only on the node.")
@click.option("--tools/--no-tools", default=None, help="Parse tool calls (default: where the model's form is known).")
@click.option("--recipe/--no-recipe", default=None,
              help="Use what is known of the model's family: parsers, flags, variables (default: yes).")  # fmt: skip
@click.option("--adapters", metavar="DIR", type=click.Path(file_okay=False, resolve_path=True),
              help="Serve the LoRA adapters of DIR beside the model, each by the name of its folder.")  # fmt: skip
@click.option(
    "--allowed-origins",
    metavar="ORIGIN,…",
    type=Origins(),
    help="Pages that may call it from a browser, such as https://chat.example.org (default: none).",
)
@click.option(
    "--store-responses",
    is_flag=True,
    default=None,
    help="Keep answers of /v1/responses in memory, for previous_response_id.",
)
@click.option("--key-file", metavar="FILE", help="File with the key that clients send (default: a new key).")
@click.option("--node-timeout", "node_s", cls=RenamedOption, was="--patience", type=Duration(3), metavar="TIME",
              help="Silence after which a node of several counts as lost"
                   f" (default: {Patience.node_s:g}).")  # fmt: skip
@runtime_options
@click.option("--renew", is_flag=True, help="On SLURM: submit a successor before each time limit.")
@click.option("--max-jobs", type=click.IntRange(min=1), help="With --renew: jobs in all (default: without end).")
@click.option(
    "--replicas", metavar="N|A..B", help="A fleet: N servers, or A to B as the load asks; one address, one key."
)
@click.option("--keep", is_flag=True, help="With --replicas on SLURM: replace jobs before their time limit.")
@click.option(
    "--keeper",
    type=click.Choice(["here", "job"]),
    help="With --replicas: where the fleet's keeper runs; with `job`, in the jobs of its members (default: here).",
)
@click.option(
    "--route", type=click.Choice(list(POLICIES)), help="With --replicas: how a server is chosen (default: prefix)."
)
@click.option("--attach", metavar="NAME", help="Take up an interrupted `corral up` again: wait until NAME is ready.")
@env_option
@click.option("--restart", "restarts", type=click.IntRange(0, 100), help="Restarts after a failure (default: 0).")
@click.option("--stall", "stall_s", type=Duration(10), metavar="TIME",
              help="Give up on a start that does not advance for this long (default: ten times what its phase"
                   " usually takes, at least 15 minutes).")  # fmt: skip
@click.option("--hung", "hung_s", type=Duration(10), metavar="TIME",
              help="Give up on a running server that answers nothing and moves no token for this long"
                   f" (default: {Patience.hung_s:g}).")  # fmt: skip
@click.option("--wait/--no-wait", default=True, help="Wait until it is ready (default), or only start it.")
@click.option("--dry-run", is_flag=True, help="Show what would be started, and stop.")
@click.option("--shell", is_flag=True, help="With --dry-run: print commands to paste instead.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document when ready; with --dry-run, the LaunchSpec."
)
@target_options
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def command(
    model: str | None,
    on: str | None,
    renew: bool,
    max_jobs: int | None,
    replicas: str | None,
    keep: bool,
    keeper: str | None,
    route: str | None,
    tuned: str | None,
    attach: str | None,
    wait: bool,
    dry_run: bool,
    shell: bool,
    as_json: bool,
    engine_args: tuple[str, ...],
    **given: Any,
) -> None:
    """Serve MODEL: a catalogue name, a Hugging Face id, or a folder. Without MODEL, one that fits this machine.

    Arguments after `--` go to `vllm serve` and are checked before anything starts.
    """
    if model and model.startswith("-"):  # `corral up -- --flag value`: everything after -- is the engine's
        engine_args, model = (model, *engine_args), None
    profile = load_profile(on)
    if tuned:
        model, given, engine_args = _tuned(tuned, on, model, given, engine_args)
    request = replace(request_of(profile, given, on, model, engine_args), words=_own_words())
    if renew or max_jobs:
        request = _renewed(request, renew, replicas)
    if shell and not dry_run:
        raise UsageError("--shell shows the commands of a dry run.", "Add --dry-run.")
    fleet = _fleet(request, replicas, keep, route, keeper)
    if fleet is not None:
        if attach or shell:
            raise UsageError("--attach and --shell are for single deployments.", "Leave them out, or --replicas.")
        if dry_run:
            launches = [(plan, masked(spec)) for plan, spec in preview(checked(request, fleet), fleet.size, _note)]
            if as_json:
                print_json([spec for _, spec in launches])
            else:
                click.echo("\n".join(fleet_launch_lines(launches)))
            return
        bring_up_fleet(request, fleet, PhaseScreen(quiet=as_json), wait, ask, as_json)
        return
    if dry_run:
        _preview(request, profile, shell, as_json)
        return
    with PhaseScreen(quiet=as_json) as screen:
        if any(layer.kind == "project" for layer in profile.layers):  # found by where one stands: never silently
            screen.note(f"profile {on}: {' over '.join(layer.label for layer in reversed(profile.layers))}")
        if attach:
            status = _attach(attach, screen)
        else:
            jobs = _job_limit(request, max_jobs) if renew else None
            status = _bring_up(request, screen, wait, renew, jobs)
    if wait:
        _tell_ready(status, screen, renew, as_json)
    else:
        _tell_started(status, as_json)


def _own_words() -> tuple[str, ...]:
    """The words of this command, from its verb on."""
    context = click.get_current_context()
    given: tuple[str, ...] = context.find_root().obj or ()
    return given[given.index(context.info_name) :] if context.info_name in given else ()


def _fleet(
    request: DeployRequest, replicas: str | None, keep: bool, route: str | None, keeper: str | None
) -> FleetOrder | None:
    """What is asked of a fleet, where one is."""
    if replicas is None:
        if keep or route or keeper:
            raise UsageError("--keep, --keeper and --route are for fleets.", "Say how many servers: --replicas N.")
        return None
    host = request.bind or ("0.0.0.0" if request.expose else "127.0.0.1")  # noqa: S104 - asked for by the user
    return FleetOrder(parse_size(replicas), route or "prefix", host, request.port, keep, keeper == "job")


def _note(text: str) -> None:
    explain("  note: ", text)


class UpWords(NamedTuple):
    """What a `corral up` said of the server."""

    on: str | None
    model: str | None
    given: dict[str, Any]
    engine_args: tuple[str, ...]


def read_words(words: tuple[str, ...]) -> UpWords:
    """The words of an earlier `corral up`, read again; those of a tuning run are its settings."""
    given = dict(command.make_context("up", list(words[1:])).params)
    on, model, arguments, run = (given.pop(name) for name in ("on", "model", "engine_args", "tuned"))
    if model and model.startswith("-"):
        arguments, model = (model, *arguments), None
    if run:
        model, given, arguments = _tuned(run, on, model, given, arguments)
    return UpWords(on, model, given, tuple(arguments))


def _tuned(
    run: str, on: str | None, model: str | None, given: Mapping[str, Any], engine_args: tuple[str, ...]
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The model and settings of a tuning run; what the command line sets itself stays.

    Where it ran is not taken over, how is: its goal, environment and, where no profile says it, runtime.
    """
    from corral.lab.tune.store import find_run
    from corral.lab.tune.tuner import settings_found

    found = find_run(run)
    request, (fixed, arguments) = found.spec.request, settings_found(found)
    said = parse_assignments(given["fixed"])
    pairs = [f"{name}={value}" for name, value in {**fixed, **said}.items()]
    measured: dict[str, Any] = {"context": request.goal.context, "concurrency": request.goal.concurrency,
                                "goal": request.goal.goal, "flavour": request.flavour}  # fmt: skip
    if on is None and not given["runtime"] and request.runtime != DeployRequest.runtime:
        measured |= {"runtime": request.runtime, "runtime_options": _pairs(request.runtime_options)}
    taken = {name: value for name, value in measured.items() if not given.get(name)}
    env = (*_pairs(request.extra_env), *given["extra_env"])
    return (
        model or found.spec.model,
        {**given, **taken, "fixed": tuple(pairs), "extra_env": env},
        (*arguments, *engine_args),
    )


def _pairs(options: Mapping[str, object], within: str = "") -> tuple[str, ...]:
    """As they are written on a command line."""
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += _pairs(value, f"{within}{name}.")
        else:
            found.append(f"{within}{name}={value if isinstance(value, str) else json.dumps(value)}")
    return tuple(found)


def _flags(given: Mapping[str, Any], on: str | None) -> dict[str, Any]:
    """What the command line says of a request, by the names that a request and a profile have for it."""
    target, options = chosen_target(given, on)
    return {
        **{name: value for name, value in given.items() if not name.startswith(PREFIX)},
        "target": target,
        "target_options": options,
        "served_name": (*given.get("served_name", ()), None)[0],
        "also_served_as": tuple(given.get("served_name", ())[1:]) or None,
        "expose": given.get("expose") or None,
        "runtime_options": parse_options(given["runtime_options"]) or None,
        "fixed": parse_assignments(given["fixed"]),
        "extra_env": _environment(given["extra_env"]),
    }


def request_of(
    profile: Profile, given: Mapping[str, Any], on: str | None, model: str | None, engine_args: tuple[str, ...]
) -> DeployRequest:
    """What a command line with the options of `up` (or some of them) asks for."""
    flags = {**_flags(given, on), "model": model, "extra_args": engine_args}
    use_hub_of(profile)
    options = merged(profile, flags)
    refuse_reserved(options["extra_env"])
    return DeployRequest.of(options)


def _preview(request: DeployRequest, profile: Profile, shell: bool, as_json: bool) -> None:
    """What would run; a profile that names its hardware needs none of it here."""
    # a target with options of its own has heard of that hardware from them
    named = profile.inventory() if request.target == profile.target and not request.target_options else None
    if shell:
        click.echo(rendering.to_paste(request, _note, named), nl=False)
        return
    plan, spec = rendering.dry_run(request, _note, named)
    if as_json:
        print_json(masked(spec))
    else:
        click.echo("\n".join([*launch_lines(plan, masked(spec)), "", DRY_RUN_FORMS]))


def _renewed(request: DeployRequest, renew: bool, replicas: str | None) -> DeployRequest:
    """The same request with jobs that submit their successors, where that is possible."""
    if replicas is not None:
        raise UsageError(
            "--renew cannot be used with --replicas.", "Use --keep instead: the fleet then replaces its jobs itself."
        )
    target = load_target(request.target, request.target_options)
    if not isinstance(target, Queue) or not renew:
        raise UsageError(
            "--renew and --max-jobs are for jobs of a scheduler.", "Say --renew with --partition, --time, …."
        )
    if request.name and chain_of(request.name) != request.name:
        raise UsageError(
            f"{request.name!r} looks like a successor's name.", "Choose a --name that does not end in ~NUMBER."
        )
    return replace(request, target_options=target.with_renewal(request.target_options))


def _job_limit(request: DeployRequest, max_jobs: int | None) -> int | None:
    """How many jobs a chain has in all; None: without end."""
    limit = max_jobs or request.target_options.get("max_jobs")
    return int(limit) if isinstance(limit, int | str) else None


def _bring_up(
    request: DeployRequest, screen: PhaseScreen, wait: bool, renew: bool, jobs: int | None
) -> deployments.Status:
    try:
        return bring_up_chain(request, jobs, screen, wait) if renew else bring_up(request, screen, wait)
    except LaunchError as error:
        _with_log(error)
        raise


def _attach(name: str, screen: PhaseScreen) -> deployments.Status:
    try:
        return wait_ready(open_folder(name), screen)
    except LaunchError as error:
        _with_log(error)
        raise


def _with_log(error: LaunchError) -> None:
    if log := error.details.get("log"):
        error.details["log_tail"] = last_lines(Path(log), 15)


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"--env {name!r} is not NAME=VALUE.", "Write it as --env VLLM_LOGGING_LEVEL=DEBUG.")
        found[name] = value
    refuse_reserved(found)
    return found


def _tell_ready(status: deployments.Status, screen: PhaseScreen, renew: bool, as_json: bool) -> None:
    endpoint = status.endpoint
    assert endpoint is not None
    answer = ask(endpoint) if status.task == "generate" else ""
    if as_json:
        print_json(_document(status, screen, answer))
        return
    click.echo("\n" + summary(status, endpoint, answer))
    if renew:
        click.echo(f"One address for it and its successors: corral proxy {shlex.quote(status.name)}")


def _tell_started(status: deployments.Status, as_json: bool) -> None:
    if as_json:
        print_json(status)
    else:
        click.echo(f"{status.name} is starting; `corral wait {shlex.quote(status.name)}` waits until it is ready.")


def _document(status: deployments.Status, screen: PhaseScreen, answer: str) -> dict[str, Any]:
    assert status.endpoint is not None
    times = {name.replace(" ", "_") + "_s": round(took, 2) for name, took in screen.times.items()}
    return {
        "name": status.name,
        "state": status.state,
        "endpoint": status.endpoint,
        "timings": {**times, "engine_ready_s": status.timings.ready_s},
        "engine": status.engine,
        "observed": status.observed,
        "notes": screen.notes,
        "first_answer": answer,
    }


def ask(endpoint: Endpoint) -> str:
    """One question to the new server, as its first user would put it; empty when the model has no chat template."""
    question = [{"role": "user", "content": FIRST_QUESTION}]
    client = Client(endpoint)
    try:
        reply = client.request_sync(CHAT, {"messages": question, "max_tokens": 32, "temperature": 0})
        return (reply.text or reply.choices[0].reasoning or "").strip()  # so short an answer may be thoughts only
    except CorralError:
        return ""
    finally:
        client.close_sync()


_CALLS = {  # of OpenAI's SDK
    "generate": ('chat.completions.create(model={0!r},\n      messages=[{{"role": "user", "content": "Hello!"}}])',
                 "choices[0].message.content"),
    "embed": ('embeddings.create(model={0!r}, input=["Hello!"])', "data[0].embedding"),
    "transcribe": ('audio.transcriptions.create(model={0!r}, file=open("speech.wav", "rb"))', "text"),
}  # fmt: skip


def _python_lines(endpoint: Endpoint, task: str) -> list[str]:
    if task not in _CALLS:
        return []
    call, answer = _CALLS[task]
    return [
        "Python (pip install openai):",
        "  from openai import OpenAI",
        f"  client = OpenAI(base_url={endpoint.base_url!r},",
        f"                  api_key=open({endpoint.key_file!r}).read().strip())",
        f"  reply = client.{call.format(endpoint.model)}",
        f"  print(reply.{answer})",
        "",
    ]


def summary(status: deployments.Status, endpoint: Endpoint, answer: str) -> str:
    """What a newcomer needs next: where it is, how to call it, how to stop it."""
    name = shlex.quote(status.name)
    ready = f" (the engine took {duration(status.timings.ready_s)})" if status.timings.ready_s else ""
    lines = [
        f"{status.name} is ready{ready}",
        "",
        f"  endpoint  {endpoint.base_url}",
        f"  model     {endpoint.model}",
        f"  key       {endpoint.key_file}",
    ]
    if answer:
        lines += ["", f"  asked     {FIRST_QUESTION}", f"  answered  {' '.join(answer.split())}"]
    lines += [
        "",
        *((*next_lines(status.name), "") if status.task == "generate" else ()),
        *curl_lines(endpoint, status.task),
        "",
        *_python_lines(endpoint, status.task),
        f"It keeps running. Watch: corral logs {name} -f    Stop: corral down {name}",
    ]
    return "\n".join(lines)

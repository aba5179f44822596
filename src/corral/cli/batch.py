"""`corral batch`: many prompts through a model, nothing lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from corral.base.errors import INTERRUPTED, CorralError, UsageError
from corral.base.files import read_text
from corral.cli.help_pages import DefaultVerbGroup, GroupedCommand, RenamedOption
from corral.cli.options import Duration, TokenCount, chosen_target, price_option, target_options
from corral.lab.report.batch import Screen, print_check, print_status
from corral.lab.report.screen import print_json, tell

HELP = {"help_option_names": ["-h", "--help"]}
UNFINISHED = 1  # finished, but some rows are in the error file


@click.group(cls=DefaultVerbGroup, context_settings=HELP)
def command() -> None:
    """Run a file of prompts through a model: `corral batch prompts.jsonl -o answers.jsonl`.

    Run the same command again to continue after any interruption. Without --deployment, --url or --start, the running
    deployment is used.
    """


def _recipe_options(function: Any) -> Any:
    options = [
        click.option("--input-format", help="jsonl, json, text, csv, tsv or parquet (default: from the name)."),
        click.option("--prompt-template", metavar="TEXT|@FILE", help="Prompt with {{column}} for values of the row."),
        click.option("--prompt-column", metavar="NAME", help="Column that holds the prompt (default: prompt)."),
        click.option("--id-column", metavar="NAME", help="Column that holds the id (default: custom_id or id)."),
        click.option("--chat", is_flag=True, help="Send prompts as chat messages, not as text to continue."),
        click.option("--system", metavar="TEXT", help="System message before every prompt; implies --chat."),
        click.option(
            "--max-tokens",
            type=int,
            help="Longest answer in tokens (default: 256 for a plain prompt; a chat ends by itself).",
        ),
        click.option("--temperature", type=float, help="Spread of the choice; 0 is greedy."),
        click.option("--top-p", type=float, help="Sample from the likeliest tokens of this total probability."),
        click.option("--seed", type=int, help="Seed of every row."),
        click.option("--n", type=int, help="Answers per prompt."),
        click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Any other parameter of vLLM."),
        click.option("--no-row-params", is_flag=True, help="Columns named like parameters are data."),
        click.option("--any-model", is_flag=True, help="Rows that name another model get the served one."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def run_options(function: Any) -> Any:
    options = [
        click.option("--order", "row_order", default="input", show_default=True,
                     help="input, longest-first, or prefix-first (equal beginnings together)."),
        click.option("--concurrency", type=click.IntRange(min=1), help="Requests at once (default: adapts itself)."),
        click.option("--attempts", type=click.IntRange(min=1), default=6, show_default=True,
                     help="Tries per row after 5xx, cut answers, aborts and timeouts."),
        click.option("--backoff", type=Duration(0.001), default=0.5, show_default=True, metavar="TIME",
                     help="Pause before the second try; doubles with every further one, up to a minute."),
        click.option("--patience", type=Duration(), default="30m", show_default=True, metavar="TIME",
                     help="How long to wait while nothing succeeds, for example for a server that restarts."),
        click.option("--timeout", type=Duration(1), default="1h", show_default=True, metavar="TIME",
                     help="How long a server may be silent about one request."),
        click.option("--keep-going", is_flag=True, help="Do not stop when nearly every row fails."),
        click.option("--jobs", type=click.IntRange(min=1), metavar="N",
                     help="Let up to N runners work on this batch at once: run the same command N times, anywhere; "
                          "on SLURM, N jobs are queued (default: 1; resume: as many as before)."),
        click.option("--max-jobs", type=click.IntRange(min=1), metavar="N",
                     help="On SLURM: how often a job that runs out of time is queued again (default: 10 in all)."),
        click.option("--wait", is_flag=True,
                     help="Wait for a deployment that has failed, in case it is started again (up to --patience);"
                          " on SLURM, wait until the batch is done."),
        price_option,
        click.option("--json", "as_json", is_flag=True, help="Progress and summary as JSON lines on stdout."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def server_options(function: Any) -> Any:
    """Which servers do the rows, or which model is started for them."""
    options = [
        click.option(
            "--deployment", "-d", "deployments", multiple=True, metavar="NAME", help="Deployment to use; repeatable."
        ),
        click.option("--url", "urls", multiple=True, help="Use the server at this address; repeatable."),
        click.option("--key-file", help="File (mode 0600) with the key for --url."),
        click.option("--start", "model", cls=RenamedOption, was="--model", metavar="MODEL",
                     help="Start this model, run, stop it."),
        click.option("--context", type=TokenCount(), help="With --start: longest request in tokens, 32768 or 32k."),
        click.option("--set", "fixed", multiple=True, metavar="KEY=VALUE",
                     help="With --start: fix a field of the plan."),
        click.option("--on", metavar="PROFILE", help="With --start: where to run it (`corral profile list`)."),
        target_options,
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def output_options(function: Any) -> Any:
    """What becomes of the results."""
    options = [
        click.option("--ordered", is_flag=True, help="Results in the order of the input, written at the end."),
        click.option("--skip-bad", is_flag=True, help="Send bad rows to the error file and do the others."),
        click.option("--retry-failed", is_flag=True, help="Try rows of the error file again."),
        click.option("--force", is_flag=True,
                     help="Accept another input, model or other settings than at the start."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@command.command("run", cls=GroupedCommand, context_settings=HELP)
@click.argument("input")
@click.option("-o", "--output", required=True, help="Results: .jsonl, .csv, .parquet, also .gz or .zst.")
@server_options
@click.option("--engine", type=click.Choice(["http", "ray-data"]), default="http", show_default=True,
              help="ray-data: on an existing Ray cluster, with --start a path or a Hugging Face id.")  # fmt: skip
@click.option(
    "--in-process",
    cls=RenamedOption,
    was="--offline",
    is_flag=True,
    help="Hand rows to a running engine of this machine inside its process, not over HTTP (with --start: by itself).",
)
@_recipe_options
@click.option("--format", "shape", type=click.Choice(["openai", "columns"]),
              help="Shape of results (default: as the input).")  # fmt: skip
@click.option("--answer-column", default="response", show_default=True, help="Column of the answer.")
@output_options
@run_options
def run(**options: Any) -> int:
    """Give every row of INPUT (- is standard input) one result line in OUTPUT.

    Exit codes: 0 every row has a result; 1 finished, some rows are in the error file; 4 another runner holds the job,
    or the settings changed; 9 the server stayed away; 10 the input is bad or the disk is full; 130 interrupted. After
    all but 0 and 1, the same command continues.
    """
    return run_rows(options, _recipe(options))


def run_rows(options: dict[str, Any], recipe: Any) -> int:
    """Do the rows of a file as a recipe says."""
    from corral.use.batch.spec import BatchSpec

    spec = BatchSpec(
        input=options["input"],
        output=options["output"],
        recipe=recipe,
        input_format=options["input_format"],
        shape=options["shape"],
        answer=options["answer_column"],
        ordered=options["ordered"],
        skip_bad=options["skip_bad"],
        force=options["force"],
        retry_failed=options["retry_failed"],
    )
    engine, more = options["engine"], _target_fields(options)
    if engine == "ray-data":
        _check_ray(options, more.get("model") or options["model"], more)
    replicas = (options["concurrency"] or 1) if engine == "ray-data" else 1
    servers = servers_of(options, more, engine=engine, replicas=replicas)
    return _run(spec, servers, options)


def servers_of(options: dict[str, Any], more: dict[str, Any] | None = None, **start: Any) -> Any:
    """The servers of `server_options`, or the model to start; `more` are the fields of its target."""
    from corral.use.batch.spec import BatchServers, ModelToStart

    more = _target_fields(options) if more is None else more
    model = more.get("model") or options["model"]
    fixed = options["fixed"]
    start_model = ModelToStart(model, options["context"], fixed, (), more, **start) if model else None
    return BatchServers(
        options["deployments"], options["urls"], options["key_file"], start_model, options.get("in_process", False)
    )


@command.command("resume", context_settings=HELP)
@click.argument("output")
@click.option("--retry-failed", is_flag=True, help="Try rows of the error file again.")
@run_options
def resume(output: str, retry_failed: bool, **options: Any) -> int:
    """Continue the batch that writes OUTPUT, with the settings it was begun with."""
    from corral.use.batch.batch import saved_spec

    spec, servers = saved_spec(output)
    options["jobs"] = options["jobs"] or servers.jobs
    return _run(replace(spec, retry_failed=retry_failed), servers, options)


@command.command("status", context_settings=HELP)
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def status(output: str, as_json: bool) -> None:
    """Show the status of the batch that writes OUTPUT, also while it runs."""
    from corral.use.batch.inspect import inspect

    print_status(inspect(output), as_json)


@command.command("cancel", context_settings=HELP)
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def cancel(output: str, as_json: bool) -> None:
    """Stop the batch that writes OUTPUT; rows under way may finish, and `resume` continues it."""
    from corral.use.batch.inspect import ask_to_stop

    text = ask_to_stop(output)
    print_json({"output": output, "text": text}) if as_json else click.echo(text, err=True)


@command.command("check", context_settings=HELP)
@click.argument("input")
@_recipe_options
@click.option("--skip-bad", is_flag=True, help="Bad rows are listed, but are no reason to refuse the input.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document with every problem.")
def check(skip_bad: bool, as_json: bool, **options: Any) -> int:
    """Check INPUT and list every problem with its first line (--json: with every line); starts nothing.

    Exit codes are those of `corral batch run` for such an input: 0 all rows are good; 10 some are bad, or 1 with
    --skip-bad.
    """
    from corral.use.batch.inspect import check_input

    checked = check_input(options["input"], options["input_format"], _recipe(options))
    print_check(checked, as_json, skip_bad)
    return UNFINISHED if checked.problems else 0


@command.command("serve", context_settings=HELP)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where files and jobs are kept.")
@click.option(
    "--deployment", "-d", "deployments", multiple=True, metavar="NAME", help="Deployment to use; repeatable."
)
@click.option("--url", "urls", multiple=True, help="Use the server at this address; repeatable.")
@click.option("--key-file", help="File (mode 0600) with the key for --url.")
@click.option("--serve-key-file", help="File (mode 0600) with the key clients must send (default: made for you).")
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="Port; 0: any free one.")
@click.option("--any-model", is_flag=True, help="Rows that name another model get the served one.")
@click.option("--skip-bad", is_flag=True, help="Send bad rows to the error file and do the others.")
@click.option("--max-batches", "jobs", cls=RenamedOption, was="--jobs", type=click.IntRange(min=1), default=2,
              show_default=True, help="Batches that run at once.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready.")
def serve(**options: Any) -> int:
    """Serve OpenAI's batch API (/v1/files, /v1/batches) in front of your own model."""
    from corral.use.batch.service.app import ServiceOptions, serve_forever
    from corral.use.batch.spec import BatchServers

    service = ServiceOptions(
        folder=options["folder"],
        servers=BatchServers(options["deployments"], options["urls"], options["key_file"]),
        key_file=options["serve_key_file"],
        bind=options["bind"],
        port=options["port"],
        jobs=options["jobs"],
        any_model=options["any_model"],
        skip_bad=options["skip_bad"],
        as_json=options["as_json"],
    )
    return serve_forever(service)


def _target_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The target of the model, as fields of a request; empty for this machine."""
    target, chosen = chosen_target(options, options["on"])
    if not options["on"] and target is None:
        return {}
    if not options["on"] and not options["model"]:
        raise UsageError(f"the options of {target} say where to start a model.", "Name it: --start MODEL.")
    flags = {"target_options": chosen, **({"target": target} if target else {})}
    return _from_profile(options, flags) if options["on"] else flags


def _from_profile(options: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    from corral.base.record import to_json
    from corral.deploy.launch.render import refuse_reserved
    from corral.deploy.profile.merging import merged, use_hub_of
    from corral.deploy.profile.profile import load_profile
    from corral.plan.settings import parse_assignments

    profile = load_profile(options["on"])
    own = {"model": options["model"], "context": options["context"], "fixed": parse_assignments(options["fixed"])}
    use_hub_of(profile)
    request = merged(profile, {**flags, **own})  # options win over the profile
    refuse_reserved(request.get("extra_env", {}))
    return {name: to_json(value) for name, value in request.items()}


def _recipe(options: dict[str, Any]) -> Any:
    from corral.client.sampling import parse_assignments
    from corral.use.batch.input.recipe import Recipe

    params = parse_assignments(options["params"])
    for name in ("max_tokens", "temperature", "top_p", "seed", "n"):
        if options[name] is not None:
            params[name] = options[name]
    template = options["prompt_template"]
    if template and template.startswith("@"):
        template = read_text(template[1:])
    return Recipe(
        template=template,
        chat=options["chat"],
        system=options["system"],
        params=params,
        id_column=options["id_column"],
        prompt_column=options["prompt_column"],
        row_params=not options["no_row_params"],
        any_model=options["any_model"],
    )


def _settings(options: dict[str, Any]) -> Any:
    from corral.use.batch.core.runner import RunnerSettings

    return RunnerSettings(
        concurrency=options["concurrency"],
        attempts=options["attempts"],
        backoff_s=options["backoff"],
        patience_s=options["patience"],
        stall_s=options["timeout"],
        runaway_share=1.0 if options["keep_going"] else RunnerSettings.runaway_share,
        wait=options["wait"],
    )


_RUNNER_OPTIONS = {"row_order": "order", "concurrency": "concurrency", "attempts": "attempts", "backoff": "backoff",
                "patience": "patience", "timeout": "timeout"}  # fmt: skip


def _submit(spec: Any, servers: Any, options: dict[str, Any]) -> int:
    """Queue the batch; with --wait, wait for its end."""
    from corral.lab.report.batch import print_submitted, wait_for_jobs
    from corral.use.batch.jobs import submit

    runner_options = [word for name, option in _RUNNER_OPTIONS.items() if options[name] is not None
                      for word in (f"--{option}", str(options[name]))]  # fmt: skip
    runner_options += ["--keep-going"] if options["keep_going"] else []
    screen = Screen(options["as_json"], spec.output)
    with screen:
        queued = submit(spec, servers, options["max_jobs"], runner_options, screen.phases)
    print_submitted(queued, options["as_json"])
    return wait_for_jobs(spec.output) if options["wait"] and not queued.done else 0


@command.command("in-job", context_settings=HELP, hidden=True)
@click.argument("output")
@click.option("--deployment", required=True)
@run_options
def in_job(output: str, deployment: str, **options: Any) -> int:
    """Run a batch beside a model in a job of a scheduler; queued by `corral batch`."""
    import os

    from corral.deploy.deployment.state import NO_ROOM
    from corral.use.batch.jobs import OwnDeployment, run_in_job

    own = OwnDeployment(
        deployment, options["jobs"] or 1, options["max_jobs"] or 10, int(os.environ.get("CORRAL_AGENTS", "0"))
    )
    screen = Screen(options["as_json"], output)
    with screen:
        settings = replace(_settings(options), drain_s=float(os.environ.get("CORRAL_DRAIN_S", "60")))
        try:
            outcome = run_in_job(output, own, settings, screen, row_order=options["row_order"])
        except (CorralError, OSError) as error:
            from corral.use.batch.service.workers import Shortage, shortage_of

            if shortage_of(error) is not Shortage.DISK:
                raise
            tell(error.in_full if isinstance(error, CorralError) else str(error), err=True)
            return NO_ROOM
    if outcome.result:
        screen.summary(outcome.result)
    if outcome.text:
        tell(outcome.text, err=True)
    if outcome.next_job:
        return 0
    return (
        _exit_code(outcome.result.summary.done, outcome.result.errors is not None) if outcome.result else INTERRUPTED
    )


def _run(spec: Any, servers: Any, options: dict[str, Any]) -> int:
    from corral.use.batch.batch import run_batch
    from corral.use.batch.jobs import is_queued
    from corral.use.batch.shared import Sharing
    from corral.use.batch.spec import RAY_DATA

    jobs = options["jobs"] or 1
    model = servers.start_model
    if model and model.engine == RAY_DATA and options["concurrency"]:
        servers = replace(servers, start_model=replace(model, replicas=options["concurrency"]))
    if is_queued(servers):
        return _submit(spec, replace(servers, jobs=jobs), options)
    screen = Screen(options["as_json"], spec.output)
    with screen:
        result = run_batch(
            spec,
            servers,
            _settings(options),
            screen,
            row_order=options["row_order"],
            price=options["price"],
            reporter=screen.phases,
            sharing=Sharing(jobs),
        )
    screen.summary(result)
    return _exit_code(result.summary.done, result.errors is not None)


def _exit_code(done: bool, failed: bool) -> int:
    if not done:
        return INTERRUPTED
    return UNFINISHED if failed else 0


def _check_ray(options: dict[str, Any], model: str | None, more: dict[str, Any]) -> None:
    """Refuse options that Ray Data cannot use."""
    if not model:
        raise UsageError("--engine ray-data needs the model.", "Give --start PATH, or a Hugging Face id.")
    if options["urls"] or options["deployments"] or (options["jobs"] or 1) > 1:
        raise UsageError("--engine ray-data starts its own engines.", "Leave out --url, --deployment and --jobs.")
    if more:
        raise UsageError(
            "--engine ray-data runs on a Ray cluster that is there, not on --on, --hosts or SLURM.",
            "Start this command on a node of that cluster, or set RAY_ADDRESS.",
        )

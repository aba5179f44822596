"""From a request to a running deployment: locate, decide, stage, launch, watch. What `corral up` and Python share.

The order is chosen so that what can be refused is refused first: an unknown model, a flag this vLLM does not have, a
gated repository, a model that does not fit. Only then is a name taken, an engine installed, a model fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.base.errors import AccessError, CorralError, DoesNotFitError, LaunchError, UnreachableError, UsageError
from corral.base.home import home_dir
from corral.base.processes import own_identity
from corral.deploy.deployment.folder import DeploymentFolder, checked_name
from corral.deploy.deployment.start_times import Phase, expectation, kind_of
from corral.deploy.deployment.state import Patience, Reason, State
from corral.deploy.launch.links import choose_link
from corral.deploy.launch.paste import as_batch, as_shell, masked
from corral.deploy.launch.render import LaunchSpec, Order, render
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.staging import Staging, measure_cpu, unmeasured
from corral.deploy.lifecycle.watching import Reporter, wait_ready
from corral.deploy.targets.base import Queue, Target, load_target
from corral.engines import environments as engines
from corral.engines.flags import check_arguments, values_of
from corral.engines.locks import FLAVOURS, PINNED_VERSION
from corral.engines.planned import joined, read_back
from corral.engines.runtimes.base import NodeSide, Runtime, make_runtime
from corral.engines.runtimes.ray import ray_checks, refuse_known_lack
from corral.plan.choose import make_plan
from corral.plan.constraints import refuse_flags
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import Inventory, NodeSlice, within
from corral.plan.measured import planned_start, tuning_for
from corral.plan.models import catalogue
from corral.plan.models import store as model_store
from corral.plan.models.facts import read_facts
from corral.plan.models.store import EMBEDDED, ModelSource

PORT_ATTEMPTS = 3  # a port that was free when chosen can be taken before the engine binds it


@dataclass(frozen=True)
class DeployRequest:
    """What the user asked for; None means: Corral chooses."""

    model: str | None = None
    name: str | None = None
    served_name: str | None = None
    target: str = "local"
    target_options: Mapping[str, object] = field(default_factory=dict)  # hosts, a partition, …
    runtime: str = "managed"
    runtime_options: Mapping[str, object] = field(default_factory=dict)
    link: str = "auto"
    flavour: str | None = None
    bind: str | None = None
    expose: bool = False
    port: int | None = None
    goal: Goal = field(default_factory=Goal)
    fixed: Mapping[str, object] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    patience: Patience = field(default_factory=Patience)
    share: NodeSlice = field(default_factory=NodeSlice)  # of machines that several deployments share
    words: tuple[str, ...] = ()  # of the command that asked for it: the same words start it again

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> DeployRequest:
        """From keyword arguments, where `goal` and `patience` are keyword arguments themselves (see `merged`)."""
        goal, patience = Goal(**said.get("goal", {})), Patience(**said.get("patience", {}))
        return cls(**{**said, "goal": goal, "patience": patience})


@dataclass(frozen=True)
class DeployDecision:
    """Everything decided before the first byte is fetched."""

    request: DeployRequest
    name: str
    source: ModelSource
    served_name: str
    flavour: str
    plan: Plan
    inventory: Inventory
    engine_version: str = ""  # where it can be told

    def notes(self) -> list[str]:
        """What was decided that nobody asked for in so many words, to be said before anything starts."""
        precision = self.plan.precision
        because = next((r.because for r in self.plan.reasons if r.field == "precision.weights"), "")
        said = [self.inventory.note] if self.inventory.note else []
        said += [f"warning: {warning}" for warning in self.plan.warnings]
        if self.inventory.gpu is None and precision.weights != self.plan.model.weights:
            return [f"{self.source.name} is served in {precision.weights}: {because}", *said]
        if precision.how == "native":
            return said
        asked = {"weights", "dtype", "quantization"} & set(self.request.fixed)
        insist = "" if asked else "; `--set weights=bf16` would refuse to start instead"
        return [f"{self.source.name} is served in {precision.weights}: {because}{insist}", *said]

    def tell(self, note: Callable[[str], None]) -> None:
        for text in self.notes():
            note(text)


@dataclass(frozen=True)
class ClaimHooks:
    """What a caller adds when a name is claimed."""

    refuse: Callable[[str], None] = lambda _: None  # raises where something else holds the name
    prepare: Callable[[DeploymentFolder, DeployDecision], None] = lambda *_: None  # writes into the new folder


@dataclass(frozen=True)
class Preview:
    """A dry run: it needs no hub for a model of the catalogue, and no GPU where the hardware is named."""

    inventory: Inventory | None = None  # named, in the place of what the target finds


def decide(request: DeployRequest, target: Target, preview: Preview | None = None) -> DeployDecision:
    """Choose and check; raises what can be refused now. Installs, fetches and starts nothing."""
    request = as_planned(request)
    inventory = within((preview.inventory if preview else None) or target.inventory(), request.share)
    flavour = _flavour(request, inventory)
    reference = request.model or _fitting_model(inventory, request)
    source = model_store.locate(reference)
    served = model_store.served_name(source, request.served_name)
    name = checked_name(served if request.name is None else request.name)
    runtime = _runtime(request, target, flavour)
    check_arguments(request.extra_args, runtime.flags())
    if request.link == "ray" and request.runtime_options.get("ray") != "install" and len(target.nodes()) > 1:
        refuse_known_lack(runtime)
    known = preview is not None and catalogue.find(source.repo) is not None
    if not known:
        model_store.check_access(source)
    plan = _fitting(source, _plan(source, inventory, request, runtime.version, offline=known))
    refuse_flags(request.extra_args, plan.settings, plan.max_model_len)
    if plan.precision.how == "checkpoint":  # the plan chose a quantised twin of what was named
        source = replace(model_store.locate(plan.checkpoint), name=source.name)
        if not known:
            model_store.check_access(source)
    if isinstance(target, Queue):
        target.check(plan)
    return DeployDecision(request, name, source, served, flavour, plan, inventory, runtime.version)


def _fitting(source: ModelSource, plan: Plan) -> Plan:
    """The plan, or the error that says why it does not fit and what would."""
    if plan.fits:
        return plan
    options = "; ".join(f"{near.what} ({near.change})" for near in plan.nearest)
    raise DoesNotFitError(
        f"{source.name} {plan.verdict}: {plan.reason}.",
        f"What would: {options}." if options else "`corral plan MODEL --need` shows what it needs.",
        nearest=[near.what for near in plan.nearest],
    )


def as_planned(request: DeployRequest) -> DeployRequest:
    """The same request with those flags of the engine that the plan decides as fields of the plan."""
    read = read_back(request.extra_args)
    return replace(request, fixed=joined(request.fixed, read), link=read.link or request.link, extra_args=read.rest)


def sized(
    request: DeployRequest, note: Callable[[str], None] | None = None, preview: Preview | None = None
) -> tuple[Target, DeployDecision]:
    """The target and what is decided for it; where a scheduler gives the nodes, as many as the model needs."""
    target = load_target(request.target, request.target_options)
    if note:  # a dry run touches no node, unless its commands are to be pasted
        _prepare(target, note, preview)
    try:
        return target, decide(request, target, preview)
    except DoesNotFitError as error:
        if not isinstance(target, Queue) or "nearest" not in error.details:  # other limits do not go away with size
            raise
        for nodes in target.sizes():
            wider = target.resized(nodes)
            with contextlib.suppress(DoesNotFitError):
                return wider, decide(request, wider, preview)
        raise


def _prepare(target: Target, note: Callable[[str], None], preview: Preview | None) -> None:
    try:
        for text in target.prepare():
            note(text)
    except (UnreachableError, AccessError) as error:
        if preview is None:
            raise
        note(f"{error.message.rstrip('.')}; addresses are as this machine resolves them, without network adapters")


def _plan(
    source: ModelSource, inventory: Inventory, request: DeployRequest, version: str, offline: bool = False
) -> Plan:
    here = model_store.already_here(source)
    facts = read_facts(str(here) if here else source.repo, offline=offline or source.kind == "embedded")
    tuning = tuning_for(facts, inventory, version, request.extra_args, request.runtime == "managed")
    plan = make_plan(facts, inventory, request.goal, request.fixed, tuning)
    spans = plan.parallel.replica_gpus > inventory.gpus_per_node
    if plan.parallel.data > 1 and (spans or (request.link == "ray" and inventory.nodes > 1)):
        # one deployment joins whole replicas on each node, or one replica over all; several over several is two
        plan = make_plan(facts, inventory, request.goal, {**request.fixed, "data": 1}, tuning)
    return plan


def _flavour(request: DeployRequest, inventory: Inventory) -> str:
    flavour = request.flavour or ("cuda" if inventory.gpu else "cpu")
    if flavour not in FLAVOURS:
        raise UsageError(f"there is no engine flavour {flavour!r}.", f"Known: {', '.join(FLAVOURS)}.")
    if flavour == "cuda" and not inventory.gpu:
        raise UsageError(
            "this machine has no GPU that the CUDA engine could use.", "Use --flavour cpu of `corral up`."
        )
    return flavour


def _fitting_model(inventory: Inventory, request: DeployRequest) -> str:
    """On a CPU the embedded default; on GPUs the largest instruct model that fits as stored (8 bits or more)."""
    if not inventory.gpu:
        return EMBEDDED
    entries = [e for e in catalogue.CATALOGUE.values() if "instruct" in e.name and e.weights in ("bf16", "fp8")]
    for entry in sorted(entries, key=lambda entry: (-entry.parameters, entry.weights != "bf16")):
        plan = make_plan(read_facts(entry.name, offline=True), inventory, request.goal, request.fixed)
        if plan.fits and plan.precision.how == "native":
            return entry.name
    return EMBEDDED


def dry_run(
    request: DeployRequest,
    note: Callable[[str], None] = lambda _: None,
    inventory: Inventory | None = None,
    taken: set[int] | None = None,
) -> LaunchSpec:
    """The very LaunchSpec that would run, with nothing installed, fetched or started.

    `taken` are ports of its head node that others are going to take; its own is added.
    """
    target, decision = sized(request, preview=Preview(inventory))
    decision.tell(note)
    path = _model_path(decision, target)
    folder = DeploymentFolder.of(decision.name)
    return _render(
        decision, target, folder, _runtime(request, target, decision.flavour), path, "dry-run", note, taken
    )


def to_paste(request: DeployRequest, note: Callable[[str], None], inventory: Inventory | None = None) -> str:
    """The same launch as commands to paste: they leave a deployment of the same name alone."""
    target, decision = sized(request, note, Preview(inventory))
    decision.tell(note)
    path = _model_path(decision, target)
    folder = DeploymentFolder(home_dir() / "pasted" / DeploymentFolder.of(decision.name).path.name)
    runtime = _runtime(request, target, decision.flavour)
    launch_id = f"pasted{hashlib.sha256(decision.name.encode()).hexdigest()[:10]}"
    spec = masked(_render(decision, target, folder, runtime, path, launch_id, note))
    reach = {rank.node: target.reach(rank.node) for rank in spec.ranks}
    first = _before(decision, path, reach)
    if isinstance(target, Queue):
        return as_batch(spec, folder.script, target.templates(spec, folder), first)
    return as_shell(spec, reach, first)


def _model_path(decision: DeployDecision, target: Target) -> str:
    """Where the nodes have the model, or will have it; its name on the hub, where nobody has it yet."""
    source, least = decision.source, decision.plan.memory.weights_bytes * 9 // 10
    here = model_store.already_here(source)
    return target.placed(here) if here else target.find_model(source.name, source.repo, least) or source.repo


def _before(decision: DeployDecision, path: str, reach: Mapping[str, Sequence[str]]) -> list[str]:
    """What must be done before a launch by hand, as commands; or what to know."""
    source, here = decision.source, model_store.already_here(decision.source)
    if here and path != str(here):
        hosts = ",".join(reach)
        return [shlex.join([sys.executable, "-m", "corral", "pull", str(here), "--hosts", hosts, "--to", path])]
    if path == source.repo:
        return [f"# vLLM fetches {path} from the hub; after `corral pull {path}` this would serve it from disk"]
    return []


def _runtime(request: DeployRequest, target: Target, flavour: str) -> Runtime:
    node = NodeSide(target.home(), flavour, PINNED_VERSION)
    return make_runtime(request.runtime, request.runtime_options, node)


def _render(
    decision: DeployDecision,
    target: Target,
    folder: DeploymentFolder,
    runtime: Runtime,
    model_path: str,
    launch_id: str,
    note: Callable[[str], None],
    taken: set[int] | None = None,
) -> LaunchSpec:
    request, nodes = decision.request, target.nodes()
    check_arguments(request.extra_args, runtime.flags())
    bind = target.default_bind(request.expose) if request.bind is None else request.bind
    chosen = target.choose_ports(bind, request.port, taken or ())
    if taken is not None:
        taken.add(chosen.ports.serve)
    link, why = choose_link(request.link, nodes, runtime.flags())
    for text in (chosen.note, f"link {link}: {why}" if len(nodes) > 1 else ""):
        if text:
            note(text)
    order = Order(
        deployment=decision.name,
        launch_id=launch_id,
        folder=target.node_folder(folder, launch_id),
        model=decision.source.name,
        model_path=model_path,
        served_name=decision.served_name,
        target=target.name,
        link=link,
        nodes=nodes,
        host=bind,
        ports=chosen.ports,
        base_url=target.base_url(bind, chosen.ports),
        files=target.files(),
        extra_args=request.extra_args,
        extra_env={**request.share.env(), **request.extra_env},
        patience=request.patience,
        expected=expectation(_kind(decision, target, runtime), decision.plan),
    )
    spec = render(decision.plan, order, runtime)
    return replace(spec, script=target.script(spec, folder)) if isinstance(target, Queue) else spec


def _kind(decision: DeployDecision, target: Target, runtime: Runtime) -> str:
    """What the length of a start depends on: starts that agree in it are of one kind."""
    plan, request = decision.plan, decision.request
    return kind_of(
        decision.source.name, plan.precision, plan.parallel, plan.settings, plan.max_model_len, request.extra_args,
        runtime.engine, request.runtime, target.name, target.options(),
    )  # fmt: skip


def bring_up(
    request: DeployRequest, report: Reporter, wait: bool = True, hooks: ClaimHooks | None = None
) -> deployments.Status:
    """Do all of it; returns the ready deployment (or, without waiting, the starting one)."""
    hooks = hooks or ClaimHooks()
    for _ in range(PORT_ATTEMPTS - 1):
        try:
            return _bring_up_once(request, report, wait, hooks)
        except LaunchError as error:
            if error.details.get("reason") != "port_taken" or request.port is not None:
                raise
            report.note(f"{error.message} Starting again on another port.")
    return _bring_up_once(request, report, wait, hooks)


def _new_record(decision: DeployDecision, target: Target) -> deployments.Record:
    return deployments.Record(
        name=decision.name,
        launch_id=secrets.token_hex(8),
        model=decision.source.name,
        served_name=decision.served_name,
        target=target.name,
        target_options=target.options(),
        created_s=time.time(),
        created_by=own_identity(),
        words=decision.request.words,
    )


def _bring_up_once(request: DeployRequest, report: Reporter, wait: bool, hooks: ClaimHooks) -> deployments.Status:
    target, decision = sized(request, report.note)
    record = _new_record(decision, target)
    if decision.inventory.gpu:
        decision.tell(report.note)
    hooks.refuse(decision.name)
    folder = deployments.claim(record, lambda who: report.note(f"waiting for {who}, which uses the same name"))
    staging = Staging(report, folder, planned_start(decision.plan))
    with _released_on_failure(folder):
        hooks.prepare(folder, decision)
        kind = kind_of("engine", decision.flavour, PINNED_VERSION, request.runtime)
        staging.phase(Phase.INSTALLING, kind, needed=engines.find(decision.flavour) is None)
        runtime = _runtime(request, target, decision.flavour).stage(staging.detail)
        if runtime.carried:
            runtime = runtime.moved({path: target.place(Path(path), staging.detail) for path in runtime.carried})
        link, _ = choose_link(decision.request.link, target.nodes(), runtime.flags())
        target.verify((*runtime.check(), *(ray_checks(runtime) if link == "ray" else ())))
        decision = _measured(decision, staging)
        if not decision.inventory.gpu:
            decision.tell(report.note)
        kind = kind_of("model", decision.source.name, target.name, target.options())
        staging.phase(Phase.FETCHING, kind, needed=model_store.already_here(decision.source) is None)
        path = _bring_model(decision, target, staging)
        spec = _render(decision, target, folder, runtime, path, record.launch_id, report.note)
        record = replace(record, kind=_kind(decision, target, runtime))
        staging.phase(Phase.STARTING, record.kind)
        deployments.launch(spec, decision.plan, target, record, folder)
    if not wait:
        return deployments.status(folder)
    try:
        return wait_ready(folder, report)
    except KeyboardInterrupt:
        report.note(_interrupted(folder))
        raise
    except LaunchError as error:
        if error.details.get("reason") == Reason.CANNOT_START:  # nobody has to take it out of the queue
            deployments.stop(folder)
        raise


def _measured(decision: DeployDecision, staging: Staging) -> DeployDecision:
    """The decision with what this CPU can do, measured now that there is an engine to measure with."""
    model, inventory = decision.plan.model, decision.inventory
    formats = unmeasured(model, inventory, decision.request.fixed)
    if not formats:
        return decision
    staging.phase(Phase.MEASURING)
    if not measure_cpu(model, inventory, formats, staging.report.note):
        return decision
    again = _plan(decision.source, inventory, decision.request, decision.engine_version)
    return replace(decision, plan=_fitting(decision.source, again))


def _interrupted(folder: DeploymentFolder) -> str:
    """What goes on after an interrupted wait, and how to take it up again."""
    name = shlex.quote(folder.name)
    with contextlib.suppress(CorralError, OSError):
        now = deployments.status(folder)
        if now.state is State.QUEUED:
            return f"{now.text}. Wait for it again: corral up --attach {name}. Stop it: corral down {name}"
    return f"it keeps starting in the background. Wait for it: corral up --attach {name}. Stop it: corral down {name}"


def _bring_model(decision: DeployDecision, target: Target, staging: Staging) -> str:
    """The model's folder on the nodes. What only the hub has goes to them straight, not by way of this machine."""
    source, hosts = decision.source, target.fetching_hosts()
    if not hosts or source.kind != "hub" or model_store.already_here(source):
        invented = "dummy" in values_of("--load-format", decision.request.extra_args)  # vLLM makes up the weights
        return target.place(model_store.fetch(source, staging.detail, weights=not invented), staging.detail)
    if found := target.find_model(source.name, source.repo, decision.plan.memory.weights_bytes * 9 // 10):
        return found
    from corral.deploy.transfer.outcome import Progress
    from corral.deploy.transfer.pull import PullOrder, pull

    addresses = {node.name: node.address for node in target.nodes() if node.address}
    order = PullOrder(source.repo, hosts, f"{target.home()}/models/{source.name}", addresses=addresses)

    def report(far: Progress) -> None:
        staging.detail(f"{far.host}: {far.what}", far.done_bytes, far.total_bytes)

    result = pull(order, report, target.shell())
    if result.failed:
        first = result.failed[0]
        raise LaunchError(f"the model did not reach {first.host}: {first.text}", first.remedy, host=first.host)
    return result.folder


@contextlib.contextmanager
def _released_on_failure(folder: DeploymentFolder) -> Iterator[None]:
    """Nothing was started: the name is free again."""
    try:
        yield
    except BaseException:
        if not any(mark.exists() for mark in (folder.rank(0).agent, folder.job, folder.started)):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise

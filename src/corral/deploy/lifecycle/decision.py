"""From a request to a decision: which model, in which number format, on which hardware, with which engine.

The order is chosen so that what can be refused is refused first: an unknown model, a flag this vLLM does not have, a
gated repository, a model that does not fit. Nothing is installed, fetched or started here.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.base.errors import AccessError, DoesNotFitError, NotFoundError, UnreachableError, UsageError
from corral.base.files import read_key
from corral.deploy.deployment.folder import checked_name
from corral.deploy.deployment.state import Patience
from corral.deploy.targets.base import NodeFiles, Target, load_target
from corral.engines import PINNED_VERSION
from corral.engines.flags import check_arguments
from corral.engines.locks import FLAVOURS
from corral.engines.paths import named_paths
from corral.engines.recipes import Applied, ModelRecipe, applied, recipe_for, refuse_old_engine, tables
from corral.engines.runtimes.base import NodeSide, Runtime, make_runtime
from corral.engines.runtimes.ray import refuse_known_lack
from corral.engines.settings import joined, read_back
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import Inventory, NodeSlice, within
from corral.plan.lora import AdapterFolder
from corral.plan.measured import tuning_for
from corral.plan.models import catalogue
from corral.plan.models import store as model_store
from corral.plan.models.adapter import read_adapters, refuse_misfits
from corral.plan.models.facts import ModelFacts, read_facts
from corral.plan.models.store import EMBEDDED, ModelSource
from corral.plan.models.task import requested_task, task_arguments
from corral.plan.places import Storage, located
from corral.plan.settings import read_fixed, refuse_flags


@dataclass(frozen=True)
class ApiOptions:
    """What clients may use of an endpoint, and from where; None: as by default."""

    tools: bool = True  # tool calls are parsed where the model's form is known
    allowed_origins: tuple[str, ...] = ()  # pages of these origins may call it from a browser
    store_responses: bool = False  # `previous_response_id` of /v1/responses; kept in the server's memory
    key_file: str | None = None  # holds the key of the endpoint, in place of a new one

    def key(self) -> str:
        """The key in that file, checked; empty where none is named."""
        return read_key(self.key_file) if self.key_file else ""


@dataclass(frozen=True)
class DeployRequest:
    """A deployment as the user requests it; None means: Corral chooses."""

    model: str | None = None
    name: str | None = None
    served_name: str | None = None  # that clients say; the deployment's own name is another
    also_served_as: tuple[str, ...] = ()  # further names of the same model
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
    recipe: bool = True  # what is known of the model's family is applied
    adapters: str | None = None  # a folder of LoRA adapters
    api: ApiOptions = field(default_factory=ApiOptions)
    patience: Patience = field(default_factory=Patience)
    storage: Storage = field(default_factory=Storage)  # where a profile says that models lie
    share: NodeSlice = field(default_factory=NodeSlice)  # of machines that several deployments share
    words: tuple[str, ...] = ()  # the command line that requested it; it starts the deployment again

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> DeployRequest:
        """From keyword arguments, where these have keyword arguments themselves (see `merged`)."""
        kinds = {"goal": Goal, "patience": Patience, "api": ApiOptions, "storage": Storage}
        return cls(**{**arguments, **{name: kind(**arguments.get(name, {})) for name, kind in kinds.items()}})


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
    engine_version: str = ""  # where it is known
    recipe: Applied = field(default_factory=Applied)
    task: str = "generate"
    task_arguments: tuple[str, ...] = ()  # of `vllm serve`, where the task is not what vLLM takes by itself

    def notes(self) -> list[str]:
        """What was decided without a request; shown before anything starts."""
        precision = self.plan.precision
        because = next((r.because for r in self.plan.reasons if r.field == "precision.weights"), "")
        notes = [self.inventory.note] if self.inventory.note else []
        if self.plan.barely:
            better = "; ".join(f"{near.what} ({near.change})" for near in self.plan.nearest)
            notes.append(f"warning: barely fits: {self.plan.reason}" + (f"; better: {better}" if better else ""))
        notes += [f"warning: {warning}" for warning in self.plan.warnings]
        words = shlex.join(self.task_arguments)
        if words:
            notes.append(f"it is served for {self.task} ({words}); other --runner and --convert can follow `--`")
        notes += self.recipe.notes
        if self.inventory.gpu is None and precision.weights != self.plan.model.weights:
            return [f"{self.source.name} is served in {precision.weights}: {because}", *notes]
        if precision.how == "native":
            return notes
        fixed = {"weights", "dtype", "quantization"} & set(self.request.fixed)
        insist = "" if fixed else "; `--set weights=bf16` would refuse to start instead"
        return [f"{self.source.name} is served in {precision.weights}: {because}{insist}", *notes]

    @property
    def least_bytes(self) -> int:
        """What the files of the model have at least, where they are whole."""
        return self.plan.memory.weights_bytes * 9 // 10


@dataclass(frozen=True)
class Preview:
    """A dry run: it needs no hub for a model of the catalogue, and no GPU where the hardware is named."""

    inventory: Inventory | None = None  # named, in place of what the target finds


def decide(request: DeployRequest, target: Target, preview: Preview | None = None) -> DeployDecision:
    """Choose and check; raises what can be refused now. Installs, fetches and starts nothing."""
    request = as_planned(request)
    request.api.key()  # a file that cannot be used is refused first
    inventory = within((preview.inventory if preview else None) or target.inventory(), request.share)
    flavour = _flavour(request, inventory)
    source = located(request.model or _fitting_model(inventory, request), request.storage)
    served = model_store.served_name(source, request.served_name)
    name = checked_name(source.name if request.name is None else request.name)
    _refuse_names((served, *request.also_served_as))
    runtime = _checked_runtime(request, target, flavour)
    recipe = _recipe(request, source, runtime, flavour)  # an engine that is too old is refused
    offline = preview is not None and catalogue.find(source.repo) is not None
    if not offline:
        model_store.check_access(source)
    plan = fitting_plan(source, inventory, request, runtime.version, offline)
    refuse_flags(request.extra_args, plan.settings, plan.max_model_len)
    if plan.precision.how == "checkpoint":  # the plan chose a quantised twin of the model
        source = replace(located(plan.checkpoint, request.storage), name=source.name)
        if not offline:
            model_store.check_access(source)
    target.check(plan)
    if preview is None or target.HERE:
        _refuse_missing(request, target, runtime)
    task = requested_task(plan.model.task, request.extra_args)
    flags = runtime.flags()
    known = recipe if task == "generate" else ModelRecipe()
    used = applied(known, request.extra_args, request.extra_env, flags, request.api.tools)
    words = task_arguments(task, plan.model.architecture, request.extra_args)
    return DeployDecision(
        request, name, source, served, flavour, plan, inventory, runtime.version, used, task,
        tuple(words) if "--runner" in flags.takes_value else (),
    )  # fmt: skip


def _recipe(request: DeployRequest, source: ModelSource, runtime: Runtime, flavour: str) -> ModelRecipe:
    """What is known of the model's family."""
    if not request.recipe:
        return ModelRecipe()
    known, problem = tables()
    recipe = recipe_for([source.name, source.repo.rpartition("/")[2]], source.path, known)
    refuse_old_engine(source.name, recipe, runtime.version, request.runtime, flavour)
    return replace(recipe, problem=problem)


def _refuse_missing(request: DeployRequest, target: Target, runtime: Runtime) -> None:
    """Refuse paths after `--` that a node does not have; what an image itself has cannot be looked for."""
    wanted = {
        there: one
        for one in named_paths(request.extra_args)
        if (runtime.image or not one.written) and (there := runtime.outside(one.path))
    }
    for there, node in target.missing(list(wanted)).items():
        raise NotFoundError(
            f"{wanted[there].flag} names {there}, which {node} does not have, or may not read.",
            "Put it there under this path, or name another after `--`.",
        )


def _refuse_names(names: tuple[str, ...]) -> None:
    """Several names follow one flag of vLLM, so none may look like a flag."""
    wrong = [name for name in names if not name.strip() or name.startswith("-")]
    if wrong and len(names) > 1:
        raise UsageError(f"{wrong[0]!r} cannot be one of several names.", "Give names that do not begin with a dash.")


def _checked_runtime(request: DeployRequest, target: Target, flavour: str) -> Runtime:
    """The runtime as it is known before staging, with the arguments that its vLLM takes."""
    runtime = runtime_of(request, target, flavour)
    check_arguments(request.extra_args, runtime.flags())
    if request.link == "ray" and request.runtime_options.get("ray") != "install" and len(target.nodes()) > 1:
        refuse_known_lack(runtime)
    return runtime


def fitting_plan(
    source: ModelSource, inventory: Inventory, request: DeployRequest, version: str, offline: bool = False
) -> Plan:
    """The plan, or the error that says why the model does not fit and what would."""
    plan = _plan(source, inventory, request, version, offline)
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
    """The target and the decision for it; a scheduler is asked for as many nodes as the model needs."""
    target = load_target(request.target, request.target_options)
    if note:  # without it no node is asked
        _prepare(target, note, preview)
    try:
        return target, decide(request, target, preview)
    except DoesNotFitError as error:
        if "nearest" not in error.details:  # other limits do not go away with size
            raise
        for larger in target.larger():
            with contextlib.suppress(DoesNotFitError):
                return larger, decide(request, larger, preview)
        raise


def _prepare(target: Target, note: Callable[[str], None], preview: Preview | None) -> None:
    try:
        for text in target.prepare():
            note(text)
    except (UnreachableError, AccessError) as error:
        if preview is None:
            raise
        note(f"{error.message.rstrip('.')}; what is in @…@ could not be found: fill in the nodes' own values")


def _plan(source: ModelSource, inventory: Inventory, request: DeployRequest, version: str, offline: bool) -> Plan:
    here = model_store.already_here(source)
    facts = read_facts(str(here) if here else source.repo, offline=offline or source.kind == "embedded")
    tuning = tuning_for(facts, inventory, version, request.extra_args, request.runtime == "managed")
    if request.adapters:
        tuning = replace(tuning, adapters=_fitting_adapters(request, facts, source, here))
    plan = make_plan(facts, inventory, request.goal, request.fixed, tuning)
    spans = plan.parallel.replica_gpus > inventory.gpus_per_node
    if plan.parallel.data > 1 and (spans or (request.link == "ray" and inventory.nodes > 1)):
        # a deployment has whole replicas on each node, or one replica over all nodes; nothing in between
        plan = make_plan(facts, inventory, request.goal, {**request.fixed, "data": 1}, tuning)
    return plan


def _fitting_adapters(
    request: DeployRequest, facts: ModelFacts, source: ModelSource, folder: Path | None
) -> AdapterFolder:
    """What the plan needs of the adapters; refuses those that the model has no place for."""
    adapters = read_adapters(Path(request.adapters or ""))
    refuse_misfits(adapters, facts, source, folder, read_fixed(request.fixed).max_lora_rank)
    names = {one.name for one in adapters}
    if taken := names & {model_store.served_name(source, request.served_name), *request.also_served_as}:
        raise UsageError(f"the model and an adapter are both called {taken.pop()!r}.", "Rename the adapter's folder.")
    return AdapterFolder(len(adapters), max(one.rank for one in adapters))


def _flavour(request: DeployRequest, inventory: Inventory) -> str:
    here = (inventory.kind.flavour if inventory.kind else "cuda") if inventory.gpu else "cpu"
    flavour = request.flavour or here
    if flavour not in (*FLAVOURS, "rocm"):
        raise UsageError(f"there is no engine flavour {flavour!r}.", f"Known: {', '.join((*FLAVOURS, 'rocm'))}.")
    if flavour not in ("cpu", here):
        raise UsageError(
            f"there is no GPU that the {flavour} engine could use.", f"Use --flavour {here} of `corral up`."
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


def runtime_of(request: DeployRequest, target: NodeFiles, flavour: str) -> Runtime:
    """The runtime of a request, as the target's nodes have it."""
    node = NodeSide(target.home(), flavour, PINNED_VERSION)
    return make_runtime(request.runtime, request.runtime_options, node)

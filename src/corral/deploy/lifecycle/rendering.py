"""The LaunchSpec of a decision, for a launch, a dry run, or commands to paste."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.home import home_dir
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import Expected, expectation, kind_of, planned_start
from corral.deploy.launch.links import choose_link
from corral.deploy.launch.paste import masked
from corral.deploy.launch.render import LaunchSpec, Order, render
from corral.deploy.lifecycle.decision import DeployDecision, DeployRequest, Preview, runtime_of, sized
from corral.deploy.targets.base import Target
from corral.engines.flags import check_arguments
from corral.engines.runtimes.base import Runtime
from corral.plan.contract import Plan
from corral.plan.hardware.inventory import Inventory
from corral.plan.models import store as model_store


@dataclass(frozen=True)
class Staged:
    """A decision with everything in place for its launch."""

    decision: DeployDecision
    target: Target
    folder: DeploymentFolder
    runtime: Runtime
    model_path: str  # on the nodes
    launch_id: str
    adapters: str = ""  # the folder of LoRA adapters, on the nodes

    def start_kind(self) -> str:
        """What the length of a start depends on, as a key: starts of one kind take about as long.

        Also on Corral's home: vLLM finds what it has compiled by the paths of engine and model.
        """
        plan, request = self.decision.plan, self.decision.request
        return kind_of(
            self.decision.source.name, plan.precision, plan.parallel, plan.settings, plan.max_model_len,
            request.extra_args, self.runtime.engine, request.runtime, self.target.name, self.target.options(),
            self.target.home(),
        )  # fmt: skip


def dry_run(
    request: DeployRequest,
    note: Callable[[str], None] | None = None,
    inventory: Inventory | None = None,
    taken: set[int] | None = None,
) -> tuple[Plan, LaunchSpec]:
    """What would run, with nothing installed, fetched or started. Without `note` asks no node."""
    target, decision = sized(request, note, Preview(inventory))
    note = note or (lambda _: None)
    folder = DeploymentFolder.of(decision.name)
    staged = _unstaged(decision, target, folder, "dry-run", _model_path(decision, target), note)
    return decision.plan, render_launch(staged, note, taken)


def to_paste(request: DeployRequest, note: Callable[[str], None], inventory: Inventory | None = None) -> str:
    """The same launch as commands to paste, from nothing; they leave a deployment of the same name alone."""
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(f"# {' '.join(text.split())}")
        note(text)

    target, decision = sized(request, say, Preview(inventory))
    folder = DeploymentFolder(home_dir() / "pasted" / DeploymentFolder.of(decision.name).path.name)
    launch_id = f"pasted{hashlib.sha256(decision.name.encode()).hexdigest()[:10]}"
    path, pull = _pasted_model(decision, target)
    staged = _unstaged(decision, target, folder, launch_id, path, say)
    spec = masked(render_launch(staged, say))
    made = [check.argv for check in staged.runtime.check() if check.details.get("makes")]
    first = [*pull, *(shlex.join(line) for argv in made for line in target.on_each(argv))]
    return target.paste(spec, folder, [*notes, *first])


def _unstaged(
    decision: DeployDecision,
    target: Target,
    folder: DeploymentFolder,
    launch_id: str,
    path: str,
    note: Callable[[str], None],
) -> Staged:
    """The launch as staging would make it, with nothing staged."""
    for text in decision.notes():
        note(text)
    runtime = runtime_of(decision.request, target, decision.flavour)
    adapters = decision.request.adapters
    placed = target.placed(Path(adapters)) if adapters else ""
    return Staged(decision, target, folder, runtime, path, launch_id, placed)


def _model_path(decision: DeployDecision, target: Target) -> str:
    """Where the nodes have the model, or will have it; its name on the hub where nobody has it yet."""
    source = decision.source
    if source.kind == "hub" and (there := target.find_model(source, decision.least_bytes)):
        return there
    here = model_store.already_here(source)
    return target.placed(here) if here else source.repo


def _pasted_model(decision: DeployDecision, target: Target) -> tuple[str, list[str]]:
    """The model's path on the nodes, and the command that brings it there where they lack it.

    An engine that is started by hand has neither a token of the hub nor, in a container, the hub's cache.
    """
    source = decision.source
    if source.kind == "hub" and (there := target.find_model(source, decision.least_bytes)):
        return there, []
    here = model_store.already_here(source)
    path = target.placed(here) if here else f"{target.home()}/models/{source.name}"
    reference = str(here) if here else source.name if source.kind == "embedded" else source.repo
    return path, [] if path == str(here) else [shlex.join(target.pull_command(reference, path))]


def render_launch(staged: Staged, note: Callable[[str], None], taken: set[int] | None = None) -> LaunchSpec:
    """The commands of a launch. `taken` are ports of the head node that others will use; its own is added."""
    decision, target, runtime = staged.decision, staged.target, staged.runtime
    request, nodes = decision.request, target.nodes()
    check_arguments(request.extra_args, runtime.flags())
    bind = target.default_bind(request.expose) if request.bind is None else request.bind
    chosen = target.choose_ports(bind, request.port, taken or ())
    if taken is not None:
        taken.add(chosen.ports.serve)
    link, why = choose_link(request.link, nodes, runtime.flags())
    for text in filter(None, (chosen.note, f"link {link}: {why}" if len(nodes) > 1 else "")):
        note(text)
    order = Order(
        deployment=decision.name,
        launch_id=staged.launch_id,
        folder=target.node_folder(staged.folder, staged.launch_id),
        model=decision.source.name,
        model_path=staged.model_path,
        served_name=decision.served_name,
        also_served_as=request.also_served_as,
        target=target.name,
        link=link,
        nodes=nodes,
        host=bind,
        ports=chosen.ports,
        base_url=target.base_url(bind, chosen.ports),
        files=target.FILES,
        tool_args=(*decision.task_arguments, *decision.recipe.api_arguments),
        task=decision.task,
        allowed_origins=request.api.allowed_origins,
        store_responses=request.api.store_responses,
        adapters=(request.adapters or "", staged.adapters),
        extra_args=(*decision.recipe.arguments, *request.extra_args),
        extra_env={**decision.recipe.environment, **request.share.env(), **request.extra_env},
        patience=request.patience,
    )
    spec = render(decision.plan, order, runtime)
    spec = replace(spec, expected=_expected(staged, spec))
    return replace(spec, script=target.script(spec, staged.folder))


def _expected(staged: Staged, spec: LaunchSpec) -> dict[str, Expected]:
    """How long the phases of a start take: as earlier ones took, unless what these left behind is gone."""
    plan, caches = staged.decision.plan, spec.ranks[0].env.get("VLLM_CACHE_ROOT", "")
    if caches and not staged.target.may_have(caches):
        return planned_start(plan)
    return expectation(staged.start_kind(), plan)

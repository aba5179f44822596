"""The LoRA adapters of a deployment or fleet that runs: added, listed and removed in its folder of them.

The folder is the one that `corral up --adapters` named. Its servers read an adapter when a request first names it,
and the gateway routes by the names in the folder. Nodes that do not see this machine's files get a copy.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import ConflictError, CorralError, NotFoundError, UsageError
from corral.base.record import load_json, nearest
from corral.base.shell import run
from corral.client.client import Client
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import State
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.tunnel import ensure_tunnel
from corral.deploy.targets.base import Progress
from corral.engines.adapters import CONFIG, WEIGHTS, adapter_names
from corral.plan.models import catalogue
from corral.plan.models.adapter import Adapter, brought, checked_adapter_name, read_adapter, refuse_misfits
from corral.plan.models.store import ModelSource
from corral.serve.fleet.chain import choose_folder, members
from corral.serve.fleet.record import read_fleet
from corral.serve.fleet.status import chosen_fleet


@dataclass(frozen=True)
class AdapterHost:
    """A deployment or fleet with a folder of adapters."""

    name: str
    folder: Path
    servers: tuple[DeploymentFolder, ...]
    launch: LaunchSpec  # of one of them

    def adapters(self) -> list[Adapter]:
        return [read_adapter(self.folder / name) for name in adapter_names(self.folder)]

    def add(self, name: str, reference: str, progress: Progress) -> Adapter:
        """Check an adapter against the model that runs, and put it where the servers find it."""
        checked_adapter_name(name)
        if name in (*adapter_names(self.folder), self.launch.served_name):
            raise ConflictError(f"{self.name!r} has a model {name!r} already.", "Choose another name, or remove it.")
        source = brought(reference)
        if not source.is_dir():
            raise NotFoundError(f"there is no folder {reference}.", "Name a folder, or a repository as owner/name.")
        adapter = read_adapter(source, name)
        self._refuse_misfit(adapter)
        coming, there = self.folder / f".{name}.coming", self.folder / name
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir()
        for file in (CONFIG, WEIGHTS):
            shutil.copyfile(source / file, coming / file)
        read_adapter(coming, name)  # what was copied is what was checked
        coming.rename(there)
        for server in self._elsewhere():
            deployments.target_of(load_json(deployments.Record, server.record)).place(self.folder, progress)
        return adapter

    def remove(self, name: str) -> None:
        """Take an adapter away; requests that run end as they would."""
        if name not in adapter_names(self.folder):
            near = nearest(name, adapter_names(self.folder))
            hint = f"Closest: {', '.join(near)}." if near else "`corral adapter list` shows them."
            raise NotFoundError(f"{self.name!r} has no adapter {name!r}.", hint)
        going = self.folder / f".{name}.going"
        (self.folder / name).rename(going)
        shutil.rmtree(going)
        for server in self._elsewhere():
            target = deployments.target_of(load_json(deployments.Record, server.record))
            for argv in target.on_each(["rm", "-rf", "--", f"{_on_nodes(_launch(server))}/{name}"]):
                done = run(argv)
                if done.code:
                    raise CorralError(f"{name!r} is still on a node of {server.name}: {done.last_line}", "Try again.")

    def listing(self) -> list[set[str]]:
        """The names that each server that answers lists now; asking makes it look into the folder."""
        return list(filter(None, map(_listed, self.servers)))

    def _refuse_misfit(self, adapter: Adapter) -> None:
        plan = deployments.plan_of(self.servers[0])
        if plan is None:
            raise ConflictError(f"the plan of {self.name!r} cannot be read.", "Wait until it is ready.")
        there = Path(self.launch.model_path)
        cached = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/", str(there))
        entry = catalogue.find(self.launch.model)
        repo = f"{cached[1]}/{cached[2]}" if cached else entry.repo if entry else ""
        source = ModelSource(self.launch.model, "hub", repo)
        folder = there if (there / "config.json").is_file() else None
        refuse_misfits((adapter,), plan.model, source, folder, plan.settings.max_lora_rank)

    def _elsewhere(self) -> Iterator[DeploymentFolder]:
        """Servers whose nodes have a copy of the folder."""
        return (one for one in self.servers if _on_nodes(_launch(one)) != str(self.folder))


def adapter_host(name: str | None) -> AdapterHost:
    """The deployment or fleet of that name, or the only one."""
    fleet = chosen_fleet(name)
    if fleet is not None:
        name, found = fleet.name, [DeploymentFolder.of(one) for one in read_fleet(fleet).serving()]
    else:
        chosen = choose_folder(name)
        name, found = chosen.name, members(chosen)
    servers = [one for one in found if one.launch.is_file()]
    folder = next((spec.adapters for spec in map(_launch, servers) if spec.adapters), "")
    if not folder:
        raise UsageError(
            f"{name!r} was started without adapters.", "Start it with `corral up … --adapters DIR`; more can follow."
        )
    return AdapterHost(name, Path(folder), tuple(servers), _launch(servers[0]))


def _launch(server: DeploymentFolder) -> LaunchSpec:
    return load_json(LaunchSpec, server.launch)


def _on_nodes(spec: LaunchSpec) -> str:
    """The folder as the nodes have it: in the environment of a rank, or in the arguments of its container."""
    for rank in spec.ranks:
        words = (word.partition("CORRAL_ADAPTERS=")[2] for word in rank.argv)
        if found := rank.env.get("CORRAL_ADAPTERS") or next(filter(None, words), ""):
            return found
    return spec.adapters


def _listed(server: DeploymentFolder) -> set[str] | None:
    """The models that a server lists; None where it does not answer now."""
    with contextlib.suppress(CorralError, OSError, ValueError, TypeError, KeyError):
        if deployments.status(server).state is not State.READY:
            return None
        ensure_tunnel(server)
        endpoint = deployments.endpoint_of(server, State.READY)
        client = Client(endpoint, connect_s=5) if endpoint else None
        if client is not None:
            try:
                return {str(card["id"]) for card in client.page_sync("/v1/models", timeout_s=30).json()["data"]}
            finally:
                client.close_sync()
    return None

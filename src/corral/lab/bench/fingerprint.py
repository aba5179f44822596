"""The circumstances of a run: engine, flags, model, hardware, Corral; enough to explain why two runs differ.

Keys, paths of key files and prompts are in no fingerprint.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

import corral
from corral.base.errors import CorralError, DataError
from corral.base.masking import masked_argv
from corral.base.record import load_json
from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from corral.client.metrics import cache_config
from corral.deploy.deployment.folder import DeploymentFolder, all_folders
from corral.deploy.deployment.state import ENDED
from corral.deploy.launch.render import LaunchSpec
from corral.deploy.lifecycle.deployments import status
from corral.plan.contract import Plan
from corral.plan.hardware.probe import gpu_facts


@dataclass(frozen=True)
class Fingerprint:
    """Flat groups of facts, compared key by key."""

    server: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    cache: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, str] = field(default_factory=dict)
    generator: dict[str, str] = field(default_factory=dict)

    @property
    def api_servers(self) -> int | None:
        """API server processes that the flags ask for, 1 where they ask for none; None where there are no flags."""
        for flag in self.flags:
            name, _, value = flag.replace("=", " ", 1).partition(" ")
            if name.replace("_", "-") == "--api-server-count" and value.isdecimal():
                return int(value)
        return 1 if self.flags else None


def find_folder(client: Client) -> DeploymentFolder | None:
    """The deployment of this home that serves this address, if one does."""
    for folder in all_folders():
        try:
            endpoint = load_json(Endpoint, folder.endpoint)
            same = endpoint.base_url.rstrip("/").removesuffix("/v1") == client.endpoint.root
            if same and status(folder).state not in ENDED:  # an ended one may have had the same port
                return folder
        except (OSError, CorralError):
            continue
    return None


async def read_fingerprint(client: Client, folder: DeploymentFolder | None, plan: Plan | None) -> Fingerprint:
    """Read the circumstances from the server, the deployment's folder and this machine."""
    server = {"address": client.endpoint.root, "model": client.endpoint.model}
    cache: dict[str, str] = {}
    try:
        page = await client.page("/version", timeout_s=10)
        if page.status == 200:
            server["engine"] = f"vLLM {page.json().get('version')}"
        page = await client.page("/v1/models", timeout_s=10)
        for card in page.json().get("data", []) if page.status == 200 else []:
            if card.get("id") == client.endpoint.model:
                server |= {"model_root": str(card.get("root")), "max_model_len": str(card.get("max_model_len"))}
        page = await client.page("/metrics", timeout_s=10)
        cache = cache_config(page.body) if page.status == 200 else {}
    except (RequestError, ValueError, AttributeError):
        pass  # a server without these pages is still measured; the fields stay empty
    flags: tuple[str, ...] = ()
    if folder is not None:
        server |= {"deployment": folder.name}
        flags = _flags(folder)
    return Fingerprint(server, flags, cache, _hardware(plan), _generator())


def _flags(folder: DeploymentFolder) -> tuple[str, ...]:
    try:
        argv = load_json(LaunchSpec, folder.launch).ranks[0].argv
    except (OSError, DataError, IndexError):
        return ()
    flags: list[str] = []
    for word in masked_argv(argv):
        if word.startswith("--"):
            flags.append(word)
        elif flags and "=" not in flags[-1] and " " not in flags[-1]:
            flags[-1] += f" {word}"
    hidden = ("--api-key", "--port", "--host", "--middleware")
    return tuple(flag for flag in flags if not flag.startswith(hidden))


def _hardware(plan: Plan | None) -> dict[str, str]:
    facts = {"cpu": _cpu_model(), "cores": str(os.cpu_count() or 0), "kernel": platform.release()}
    if plan is not None:
        facts |= {"planned_for": plan.inventory.label, "parallel": str(plan.parallel)}
        if plan.inventory.driver:
            facts["driver"] = plan.inventory.driver
    gpus = gpu_facts()
    if gpus is not None:
        facts |= {"gpu": f"{gpus.count} × {gpus.name}", "driver": gpus.driver}
    return facts


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _generator() -> dict[str, str]:
    facts = {"corral": corral.__version__, "python": platform.python_version(), "host": platform.node()}
    for name in ("msgspec", "uvloop"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "none"
    return facts


def differences(a: Fingerprint, b: Fingerprint) -> list[tuple[str, str, str]]:
    """What differs: name, the one's value, the other's."""
    facts = []
    for group in ("server", "cache", "hardware", "generator"):
        one, other = getattr(a, group), getattr(b, group)
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key) and key not in ("address", "num_cpu_blocks_in_use"):
                facts.append((f"{group}.{key}", one.get(key, "-"), other.get(key, "-")))
    mine, theirs = set(a.flags), set(b.flags)
    if mine != theirs:
        facts.append(("flags", " ".join(sorted(mine - theirs)) or "-", " ".join(sorted(theirs - mine)) or "-"))
    return facts

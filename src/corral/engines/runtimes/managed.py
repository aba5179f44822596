"""The managed runtime: an environment that Corral installed itself (`corral engine list`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from corral.base.errors import UsageError
from corral.base.home import home_dir
from corral.engines import environments as engines
from corral.engines.flags import FlagList
from corral.engines.runtimes.base import EngineCommand, NodeCheck, NodeSide, Wrapped, kept_caches

# the CPU flavour starts through Corral's own launcher, which imports vLLM once instead of three times
MODULES = {
    "cpu": ("-m", "corral_cpu_engine.launch"),
    "cuda": ("-m", "vllm.entrypoints.cli.main", "serve"),
}


@dataclass(frozen=True)
class ManagedRuntime:
    """vLLM from one of Corral's own environments."""

    installed: engines.Engine
    home: str  # on the nodes
    moved_to: str = ""  # of the engine on the nodes, once it was put there
    name: str = "managed"

    @classmethod
    def from_options(cls, options: Mapping[str, object], node: NodeSide) -> ManagedRuntime:
        if options:
            raise UsageError(
                f"the managed runtime takes no options, and was given {next(iter(options))!r}.", "Leave it out."
            )
        if node.flavour not in engines.FLAVOURS:
            raise UsageError(
                f"the managed runtime has vLLM for {' and '.join(engines.FLAVOURS)}, not for {node.flavour}.",
                "Use vLLM's own image (--runtime docker, podman or apptainer), or your installation (venv, module).",
            )
        engine = engines.find(node.flavour, node.version) or engines.expected(node.flavour, node.version)
        return cls(engine, node.home)

    @property
    def engine(self) -> str:
        return self.installed.name

    @property
    def python(self) -> tuple[str, ...]:
        return (str(PurePath(self._path) / "bin" / "python"),)

    @property
    def serve(self) -> tuple[str, ...]:
        return (*self.python, *MODULES[self.installed.flavour])

    @property
    def carried(self) -> tuple[str, ...]:
        return (self.installed.path,)

    @property
    def _path(self) -> str:
        """Where the engine lies on the nodes."""
        if self.moved_to:
            return self.moved_to
        if self.home == str(home_dir()):
            return self.installed.path
        return str(PurePath(self.home) / "engines" / PurePath(self.installed.path).name)

    @property
    def version(self) -> str:
        return self.installed.version

    def flags(self) -> FlagList:
        return engines.flags_of(self.installed)

    def stage(self, progress: Callable[[str], None]) -> ManagedRuntime:
        return replace(self, installed=engines.install(self.installed.flavour, self.installed.version, progress))

    def moved(self, paths: Mapping[str, str]) -> ManagedRuntime:
        return replace(self, moved_to=paths[self.installed.path])

    def wrap(self, job: EngineCommand) -> Wrapped:
        return Wrapped(job.argv, {**kept_caches(self.home, self.installed.name), **job.env})

    @property
    def image(self) -> str:
        return ""

    def outside(self, path: str) -> str:
        return path

    def question(self, code: str) -> tuple[str, ...]:
        return (*self.python, "-c", code)

    def check(self) -> tuple[NodeCheck, ...]:
        versions = "import importlib.metadata as m; print(m.version('vllm'))"
        return (
            NodeCheck(
                f"engine {self.engine}",
                (*self.python, "-c", versions),
                "`corral up` copies the engine there; it needs the same Python "
                f"({self.installed.python_version}) at the same place on the node.",
                reports="vllm",
            ),
        )

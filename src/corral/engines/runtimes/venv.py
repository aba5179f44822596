"""The venv runtime: vLLM in a virtual environment of the user's own, at the same path on every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from corral.base.errors import UsageError
from corral.engines.environments import version_in
from corral.engines.flags import FlagList, flags_or_guess
from corral.engines.runtimes.base import (
    EngineCommand,
    NodeCheck,
    NodeSide,
    OnTheNodes,
    Wrapped,
    kept_caches,
    read_options,
)

# not the `vllm` script: its first line names the interpreter it was installed with, which breaks when moved
SERVE_MODULE = ("-m", "vllm.entrypoints.cli.main", "serve")
VERSION_QUESTION = "import vllm; print(vllm.__version__)"
LIGHT_QUESTION = """\
import importlib.metadata as m, sys
try:
    print(m.version("vllm"))
except m.PackageNotFoundError:
    sys.exit("vLLM is not installed in " + sys.prefix)
"""
# what `activate` does, without what it adds for people; kernels are compiled at run time with tools from bin
ENTER = 'VIRTUAL_ENV=$1 PATH=$1/bin:$PATH; export VIRTUAL_ENV PATH; unset PYTHONHOME; shift; exec "$@"'


@dataclass(frozen=True)
class VenvOptions:
    """What the user says about a virtual environment."""

    path: str
    version: str = ""  # of its vLLM, where known: its flags are then checked before a start


@dataclass(frozen=True)
class VenvRuntime(OnTheNodes):
    """vLLM from a virtual environment that somebody else looks after."""

    options: VenvOptions
    node: NodeSide
    name: str = "venv"

    @classmethod
    def from_options(cls, options: Mapping[str, object], node: NodeSide) -> VenvRuntime:
        read = read_options(VenvOptions, options, "venv")
        if not PurePath(read.path).is_absolute():
            raise UsageError(f"the path of a venv must begin with /, not {read.path!r}.", "Write the whole path.")
        return cls(read, node)

    @property
    def engine(self) -> str:
        return f"venv {self.options.path}"

    @property
    def python(self) -> tuple[str, ...]:
        return (str(PurePath(self.options.path) / "bin" / "python"),)

    @property
    def serve(self) -> tuple[str, ...]:
        return (*self.python, *SERVE_MODULE)

    @property
    def version(self) -> str:
        """As the user says, or as the environment at that path of this machine says."""
        return self.options.version or version_in(self.options.path)

    def flags(self) -> FlagList:
        return flags_or_guess(self.options.version, self.node.version)

    def wrap(self, job: EngineCommand) -> Wrapped:
        argv = ("sh", "-c", ENTER, "corral-venv", str(PurePath(self.options.path)), *job.argv)
        return Wrapped(argv, {**kept_caches(self.node.home, "venv"), **job.env})

    def question(self, code: str) -> tuple[str, ...]:
        return (*self.python, "-c", code)

    def check(self) -> tuple[NodeCheck, ...]:
        return (
            NodeCheck(
                f"vLLM in {self.options.path}",
                (*self.python, "-c", VERSION_QUESTION),
                "Make the environment there at the same path, and install vLLM into it.",
                reports="vllm",
                timeout_s=120,  # importing vLLM from a network file system takes its time
                light=(*self.python, "-c", LIGHT_QUESTION),
            ),
        )

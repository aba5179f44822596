"""The conda runtime: vLLM in a conda environment of the user's own, by name or by prefix.

The environment is activated as in a shell (`conda shell.bash hook`, `conda activate`), because its packages set
variables in activation scripts (CUDA_HOME, library paths) that a bare `PREFIX/bin/python` would lack. The shell is
then replaced by the engine. `conda run` is not used: it stays in between, and a signal sent to it never reaches the
engine. The shell is no login shell: profiles may print, change folders, or activate something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from corral.base.errors import UsageError
from corral.engines.conda import CONDA_HOMES
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
from corral.engines.runtimes.ray import REQUIREMENT, refuse_other_ray
from corral.engines.runtimes.venv import LIGHT_QUESTION, SERVE_MODULE, VERSION_QUESTION

# $1: the conda command, or "" to find it; $2: the environment
ENTER = """\
conda=$1 wanted=$2; shift 2
if [ -z "$conda" ]; then
    for found in "$CONDA_EXE" "$(type -P conda)" "$HOME"/{HOMES}/bin/conda \\
        /opt/{conda,HOMES}/bin/conda; do
        if [ -x "$found" ]; then conda=$found; break; fi
    done
fi
if [ -n "$conda" ]; then
    hook=$("$conda" shell.bash hook) || { echo "corral: $conda does not work on this node" >&2; exit 1; }
    eval "$hook"
    conda activate "$wanted" || { echo "corral: the conda environment $wanted could not be activated" >&2; exit 1; }
elif [ -x "$wanted/bin/python" ]; then
    export PATH="$wanted/bin:$PATH" CONDA_PREFIX="$wanted"
else
    echo "corral: there is no command conda on this node" >&2; exit 127
fi
unset PYTHONHOME
exec "$@"
""".replace("HOMES", ",".join(CONDA_HOMES))


@dataclass(frozen=True)
class CondaOptions:
    """What the user says about a conda environment."""

    env: str  # a name, or a prefix (a path)
    conda: str = ""  # the conda command; found on the node when not named
    version: str = ""  # of its vLLM, where known: its flags are then checked before a start
    ray: str = ""  # "install": into the environment, where it is the user's own


# $1: what to install
INSTALL = """\
prefix=$(python -c "import sys; print(sys.prefix)") || exit
python -c "import ray" 2>/dev/null && exit
[ -O "$prefix" ] && [ -w "$prefix" ] || { echo "$prefix is not yours: Ray is not installed into it" >&2; exit 1; }
python -m pip install --quiet "$1" >&2
"""


@dataclass(frozen=True)
class CondaRuntime(OnTheNodes):
    """vLLM from a conda environment that somebody else looks after."""

    options: CondaOptions
    node: NodeSide
    name: str = "conda"

    @classmethod
    def from_options(cls, options: Mapping[str, object], node: NodeSide) -> CondaRuntime:
        read = read_options(CondaOptions, options, "conda")
        if not read.env.strip() or read.env.startswith("-"):
            raise UsageError(
                f"{read.env!r} is not the name of a conda environment.", "Give its name or its whole path."
            )
        refuse_other_ray(read.ray)
        return cls(read, node)

    @property
    def engine(self) -> str:
        return f"conda {self.options.env}"

    @property
    def python(self) -> tuple[str, ...]:
        return ("python",)

    @property
    def serve(self) -> tuple[str, ...]:
        return (*self.python, *SERVE_MODULE)

    @property
    def version(self) -> str:
        """As the user says, or as the environment says where it is named by its path."""
        prefix = self.options.env
        return self.options.version or (version_in(prefix) if prefix.startswith("/") else "")

    def flags(self) -> FlagList:
        return flags_or_guess(self.options.version, self.node.version)

    def wrap(self, job: EngineCommand) -> Wrapped:
        return Wrapped(self._entered(job.argv), {**kept_caches(self.node.home, "conda"), **job.env})

    def _entered(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        return ("bash", "-c", ENTER, "corral-conda", self.options.conda, self.options.env, *argv)

    def question(self, code: str) -> tuple[str, ...]:
        return self._entered((*self.python, "-c", code))

    def check(self) -> tuple[NodeCheck, ...]:
        install = NodeCheck(
            f"Ray in the conda environment {self.options.env}",
            self._entered(("sh", "-c", INSTALL, "corral-ray", REQUIREMENT)),
            "Make an environment of your own: `conda create -n NAME --clone OTHER`.",
            timeout_s=1800,
            details={"shared": True, "refusal": "is not yours"},
        )
        return (
            *((install,) if self.options.ray else ()),
            NodeCheck(
                f"vLLM in the conda environment {self.options.env}",
                self._entered((*self.python, "-c", VERSION_QUESTION)),
                f"`corral engine install --into conda:{self.options.env}` makes and fills it; `conda env list` on "
                "the node shows what there is.",
                reports="vllm",
                timeout_s=180,
                light=self._entered((*self.python, "-c", LIGHT_QUESTION)),
            ),
        )

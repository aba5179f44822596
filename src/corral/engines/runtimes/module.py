"""The module runtime: loads environment modules (Lmod or Environment Modules), then runs another runtime.

What the modules set is seen by the runtime inside and by its engine. PYTHONPATH and PYTHONHOME are put back as they
were: a Python module's own packages must not come before those of the environment that holds vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from corral.base.errors import UsageError
from corral.engines.flags import FlagList
from corral.engines.runtimes.base import (
    EngineCommand,
    NodeCheck,
    NodeSide,
    Runtime,
    Wrapped,
    make_runtime,
    read_options,
)

# $1: yes to unload everything first; then the modules, `--`, and the command. Environment Modules before version 5
# answer 0 for a module that does not exist, so what is loaded is looked at as well.
ENTER = """\
purge=$1; shift
if ! type module >/dev/null 2>&1; then
    for init in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/lmod.sh /etc/profile.d/modules.sh \\
        /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash /etc/profile.d/z00_lmod.sh; do
        if [ -r "$init" ]; then . "$init"; break; fi
    done
fi
type module >/dev/null 2>&1 || { echo "corral: there is no command module on this node" >&2; exit 127; }
python_path=$PYTHONPATH
[ "$purge" = no ] || module purge
while [ "$1" != -- ]; do
    before=$LOADEDMODULES
    module load "$1" || { echo "corral: the module $1 could not be loaded" >&2; exit 1; }
    case ":$LOADEDMODULES" in
        *":$1"*) ;;
        ":$before") echo "corral: the module $1 could not be loaded" >&2; exit 1 ;;
    esac
    shift
done
shift
unset PYTHONHOME PYTHONPATH
[ -z "$python_path" ] || export PYTHONPATH="$python_path"
exec "$@"
"""


@dataclass(frozen=True)
class ModuleOptions:
    """What the user says about modules."""

    load: tuple[str, ...]
    inside: str = "managed"  # the runtime that runs with them loaded
    options: dict[str, Any] = field(default_factory=dict)  # that runtime's own
    purge: bool = False  # unload first what the login shell had loaded


@dataclass(frozen=True)
class ModuleRuntime:
    """Another runtime with modules loaded around it."""

    options: ModuleOptions
    inside: Runtime
    name: str = "module"

    @classmethod
    def from_options(cls, options: Mapping[str, object], node: NodeSide) -> ModuleRuntime:
        read = read_options(ModuleOptions, options, "module")
        if read.inside == "module":
            raise UsageError("the runtime inside a module runtime cannot be 'module'.", "List all modules in one.")
        for name in read.load:
            if not name.strip() or name.startswith("-"):
                raise UsageError(f"{name!r} is not the name of a module.", "`module avail` on a node lists them.")
        return cls(read, make_runtime(read.inside, read.options, node))

    @property
    def engine(self) -> str:
        return f"{self.inside.engine} (modules {', '.join(self.options.load)})"

    @property
    def serve(self) -> tuple[str, ...]:
        return self.inside.serve

    @property
    def python(self) -> tuple[str, ...]:
        return self.inside.python

    @property
    def carried(self) -> tuple[str, ...]:
        return self.inside.carried

    @property
    def version(self) -> str:
        return self.inside.version

    def flags(self) -> FlagList:
        return self.inside.flags()

    def stage(self, progress: Callable[[str], None]) -> ModuleRuntime:
        return replace(self, inside=self.inside.stage(progress))

    def moved(self, paths: Mapping[str, str]) -> ModuleRuntime:
        return replace(self, inside=self.inside.moved(paths))

    def wrap(self, job: EngineCommand) -> Wrapped:
        inner = self.inside.wrap(job)
        return Wrapped(
            self._entered(inner.argv),
            inner.env,
            tuple(self._entered(argv) for argv in inner.cleanup),
            self._entered(inner.pid_query) if inner.pid_query else (),
        )

    def _entered(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        purge = "yes" if self.options.purge else "no"
        return ("bash", "-c", ENTER, "corral-module", purge, *self.options.load, "--", *argv)

    @property
    def image(self) -> str:
        return self.inside.image

    def outside(self, path: str) -> str:
        return self.inside.outside(path)

    def question(self, code: str) -> tuple[str, ...]:
        return self._entered(self.inside.question(code))

    def check(self) -> tuple[NodeCheck, ...]:
        loads = NodeCheck(
            f"modules {', '.join(self.options.load)}",
            self._entered(("true",)),
            "`module avail` (with Lmod `module spider NAME`) on the node lists what can be loaded.",
            light=self._entered(("true",)),
        )
        return (loads, *(self._inside_check(each) for each in self.inside.check()))

    def _inside_check(self, check: NodeCheck) -> NodeCheck:
        light = self._entered(check.light) if check.light else ()
        return replace(check, argv=self._entered(check.argv), light=light)

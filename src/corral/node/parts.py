"""Imports modules that came as one text; that text begins with this file (see `corral/base/bundle.py`).

Nothing is unpacked: the sources are strings, and are imported from there, so that a program can run where no file may
be left behind. Lines of a module in a traceback are those of its own file.

Standard library only, nothing of corral: the source is sent to the node. (As `survey`, read by older Pythons.)
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any, Dict, Optional


class Parts:
    """Finds and loads modules whose sources are strings."""

    def __init__(self, sources: Dict[str, str]) -> None:
        self.sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if name not in self.sources:
            return None
        package = any(other.startswith(name + ".") for other in self.sources)
        return ModuleSpec(name, self, is_package=package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary one

    def exec_module(self, module: Any) -> None:
        name = module.__name__
        exec(compile(self.sources[name], name.replace(".", "/") + ".py", "exec"), module.__dict__)  # noqa: S102

    def get_source(self, name: str) -> str:
        """For tracebacks."""
        return self.sources[name]


def start(entry: str, sources: Dict[str, str]) -> None:
    """Run one of the modules."""
    sys.meta_path.insert(0, Parts(sources))
    importlib.import_module(entry).start()

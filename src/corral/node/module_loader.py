"""Imports modules from strings: a bundle of modules (see `corral/base/bundle.py`) begins with this file.

Nothing is unpacked, so that a program can run where no file may be left behind. Line numbers in a traceback are those
of the module's own file.

Standard library only, nothing of corral: the source is sent to the node. (Part of `survey`, which older Pythons
read.)
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any, Dict, Optional


class StringLoader:
    """Finds and loads modules whose sources are strings."""

    def __init__(self, sources: Dict[str, str]) -> None:
        self.sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if name not in self.sources:
            return None
        package = any(other.startswith(name + ".") for other in self.sources)
        return ModuleSpec(name, self, is_package=package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # the default

    def exec_module(self, module: Any) -> None:
        name = module.__name__
        exec(compile(self.sources[name], name.replace(".", "/") + ".py", "exec"), module.__dict__)  # noqa: S102

    def get_source(self, name: str) -> str:
        """The source, for tracebacks."""
        return self.sources[name]


def start(entry: str, sources: Dict[str, str]) -> None:
    """Import one of the modules and run its `start`."""
    sys.meta_path.insert(0, StringLoader(sources))
    importlib.import_module(entry).start()

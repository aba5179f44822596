"""Imports the parts of a package that came as one text; that text begins with this file (see `corral/bundle.py`).

Nothing is unpacked: the parts are strings, and are imported from there, so that a package can run where no file may
be left behind. Lines of a part in a traceback are those of its own file.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any, Dict, Optional


class Parts:
    """Finds and loads the modules of a package whose sources are strings."""

    def __init__(self, sources: Dict[str, str]) -> None:
        self.sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if name not in self.sources:
            return None
        return ModuleSpec(name, self, is_package="." not in name)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary one

    def exec_module(self, module: Any) -> None:
        name = module.__name__
        exec(compile(self.sources[name], name.replace(".", "/") + ".py", "exec"), module.__dict__)  # noqa: S102

    def get_source(self, name: str) -> str:
        """For tracebacks."""
        return self.sources[name]


def start(package: str, sources: Dict[str, str]) -> None:
    """Run the package, as `python3 -m` would."""
    sys.meta_path.insert(0, Parts(sources))
    importlib.import_module(package + ".__main__").start()

"""Shorter imports: remember two directory scans that transformers repeats.

Importing transformers 5 reads every model file (over 3,000, twice) for names to
export, and the record of every installed package: 1.2 s of a 6 s start, with the
same result each time.  ``remember`` keeps both results in one file in vLLM's
cache folder.

The key is the transformers folder, its version, and the change times of its model
folder and of the environment's own ``sys.path`` folders, so installing, upgrading or removing a
package starts afresh.  A missing, damaged or foreign file is ignored and
written anew; when transformers looks different, nothing happens.
"""

from __future__ import annotations

import copy
import functools
import importlib.abc
import importlib.metadata
import importlib.util
import os
import pickle
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_MODULE = "transformers.utils.import_utils"


def cache_path() -> str:
    """The file; beside vLLM's own caches."""
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm"
    )
    return os.path.join(root, "corral_imports.pickle")


def _key() -> Any:
    """Changes when any package of this interpreter does."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.origin:
        return None
    home = os.path.dirname(spec.origin)
    # a deployment's own folder on PYTHONPATH differs at every start and holds no package: only the environment counts
    folders = [home, os.path.join(home, "models"), *(p for p in sys.path if p.startswith(sys.prefix))]
    return (
        sys.version,
        sys.prefix,
        importlib.metadata.version("transformers"),
        [(f, os.stat(f).st_mtime_ns) for f in folders if os.path.isdir(f)],
    )


def remember() -> None:
    """Install the memory; call before transformers is imported.  Never raises."""
    if "transformers" in sys.modules:
        return
    try:
        key = _key()
        if key is None:
            return
        store: dict[Any, Any] = {}
        try:
            with open(cache_path(), "rb") as f:
                saved = pickle.load(f)
            if saved["key"] == key:
                store = saved["store"]
        except Exception:
            pass
        known = len(store)
        _remember_distributions(store)
        sys.meta_path.insert(0, _Hook(store))
        _pending.append((key, store, known))
    except Exception:
        pass


_pending: list[tuple[Any, dict[Any, Any], int]] = []


def save() -> None:
    """Write what was learnt, if anything."""
    while _pending:
        key, store, known = _pending.pop()
        if len(store) == known:
            continue
        try:
            path = cache_path()
            os.makedirs(os.path.dirname(path), exist_ok=True)
            temporary = f"{path}.{os.getpid()}"
            with open(temporary, "wb") as f:
                pickle.dump({"key": key, "store": store}, f)
            os.replace(temporary, path)
        except OSError:
            pass


def _remember_distributions(store: dict[Any, Any]) -> None:
    original = importlib.metadata.packages_distributions

    @functools.wraps(original)
    def packages_distributions() -> Any:
        importlib.metadata.packages_distributions = original  # once
        if "distributions" not in store:
            store["distributions"] = dict(original())
        return dict(store["distributions"])

    importlib.metadata.packages_distributions = packages_distributions


class _Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Wraps ``define_import_structure`` as soon as its module is loaded."""

    def __init__(self, store: dict[Any, Any]):
        self.store = store
        self.loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        original = getattr(module, "define_import_structure", None)
        if original is None:
            return
        store, home = self.store, os.path.dirname(os.path.dirname(module.__file__))
        models = os.path.join(home, "models")

        @functools.wraps(original)
        def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
            # Only the scan of all models: transformers/models or its __init__.py.
            if os.fspath(module_path) not in (models, os.path.join(models, "__init__.py")):
                return original(module_path, prefix)
            key = (os.path.basename(os.fspath(module_path)), prefix)
            if key in store:
                return store[key]
            result = original(module_path, prefix)
            store[key] = copy.deepcopy(result)  # transformers adds to what it gets
            return result

        module.define_import_structure = define_import_structure

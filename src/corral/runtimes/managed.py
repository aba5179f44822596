"""The managed runtime: an environment that Corral installed itself (`corral engine list`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral import engines
from corral.engine_flags import FlagList
from corral.home import cache_dir
from corral.runtimes.base import Wrapped

__all__ = ["ManagedRuntime"]


# the CPU flavour starts through Corral's own launcher, which imports vLLM once instead of three times
MODULES = {
    "cpu": ("-m", "corral_cpu_engine.launch"),
    "cuda": ("-m", "vllm.entrypoints.cli.main", "serve"),
}


@dataclass(frozen=True)
class ManagedRuntime:
    """vLLM from one of Corral's own environments."""

    installed: engines.Engine
    name: str = "managed"

    @property
    def engine(self) -> str:
        return self.installed.name

    def flags(self) -> FlagList:
        return engines.flags_of(self.installed)

    def wrap(self, arguments: Sequence[str], env: Mapping[str, str]) -> Wrapped:
        cache = cache_dir() / self.installed.name  # compiled code, kept per engine: second starts load it
        own = {"VLLM_CACHE_ROOT": str(cache / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
        return Wrapped((self.installed.python, *MODULES[self.installed.flavour], *arguments), {**own, **env})

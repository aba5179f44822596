"""Whether a runtime has the Ray that the link `ray` needs, asked on the nodes before anything starts.

vLLM's wheel and image have had no Ray since 0.18 (gpustack 5430, lws 835, dynamo 8515); what its last requirement was
(`ray[cgraph]>=2.48.0`, vllm pull request 33351) is what is wanted here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from corral.base.errors import EngineError, UsageError

if TYPE_CHECKING:
    from corral.engines.runtimes.base import NodeCheck, Runtime


LEAST = (2, 48, 0)
REQUIREMENT = "ray[cgraph]>=" + ".".join(map(str, LEAST))
_WITHOUT = (0, 18, 0)  # images of vLLM's own without Ray begin here
_NATIVE = "Leave --link out: this vLLM joins the nodes itself (`native`)"
_INSTALL = "`--runtime-option ray=install` "
_REMEDIES = {
    "docker": f"{_INSTALL}derives an image with it on each node",
    "podman": f"{_INSTALL}derives an image with it on each node",
    "conda": f"{_INSTALL}installs it into the environment, where that is yours",
    "module": "`--runtime-option options.ray=install` installs it into a conda environment that is yours",
    "venv": f"`pip install '{REQUIREMENT}'` with the environment's own Python",
    "apptainer": f"build an image in which `pip install '{REQUIREMENT}'` was run",
    "managed": "`corral engine remove` and `corral engine install` bring the engine back as it was",
}
QUESTION = f"""\
import importlib.metadata as m, re, sys
try:
    found = m.version("ray")
except m.PackageNotFoundError:
    sys.exit("Ray is not installed")
if tuple(map(int, re.findall(r"\\d+", found)[:3])) < {LEAST}:
    sys.exit("Ray " + found + " is older than {".".join(map(str, LEAST))}, which vLLM wants")
print(found)
"""


def refuse_other_ray(said: str) -> None:
    if said not in ("", "install"):
        raise UsageError(f"the runtime's option ray cannot be {said!r}.", "It can be: install.")


def _remedy(runtime: Runtime) -> str:
    other = _REMEDIES.get(runtime.name, f"install {REQUIREMENT} there")
    return f"{_NATIVE}. Or: {other}."


def ray_checks(runtime: Runtime) -> tuple[NodeCheck, ...]:
    """The question to each node; the same answer is wanted from all of them."""
    from corral.engines.runtimes.base import NodeCheck

    argv = runtime.question(QUESTION)
    told = {"shared": not runtime.image, "refusal": "Ray "}  # an environment on a shared file system answers anywhere
    return (NodeCheck("Ray for --link ray", argv, _remedy(runtime), reports="ray", timeout_s=900, details=told),)


def refuse_known_lack(runtime: Runtime) -> None:
    """Refuse without asking what is known: vLLM's own images have no Ray."""
    image = runtime.image
    match = re.search(r"(?:^|/)vllm/vllm-openai:v(\d+)\.(\d+)\.(\d+)$", image)
    if match and tuple(map(int, match.groups())) >= _WITHOUT:
        raise EngineError(f"{image} has no Ray, which --link ray needs.", _remedy(runtime))

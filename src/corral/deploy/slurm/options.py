"""The options of the slurm target, by profile or flag. Every name that is none of these is an option of sbatch.

`--slurm partition=gpu_h100 --slurm licenses=scratch:1` gives the partition, which Corral uses for planning, and
`--licenses=scratch:1`, which it only passes on; sbatch itself refuses an option that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from corral.base.errors import UsageError
from corral.base.wording import time_limit_s
from corral.deploy.slurm.cluster import Want
from corral.plan.hardware.inventory import LINKS, parse_gpus


@dataclass(frozen=True)
class SlurmOptions:
    """A job as it is requested; Corral chooses what is empty, or leaves it to the cluster."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    exclusive: bool = False
    mem: str = ""  # per node, as sbatch takes it; 0: all of it
    gpus_per_node: int | None = None  # 0: CPUs only
    cpus_per_task: int | None = None
    time: str = ""
    nodes: int | None = None
    signal_s: int = 120  # before the time limit: draining begins
    requeue: bool | None = None  # None: as the cluster does
    job_name: str = ""
    output: str = ""
    error: str = ""
    modules: tuple[str, ...] = ()
    python: str = "python3"  # on the nodes, for the agents
    runner: tuple[str, ...] = ()  # a command that uses the model; the job ends with it (`corral batch`)
    interface: str = ""  # between the nodes; found when empty
    hca: str = ""  # RDMA adapters, for NCCL
    gpu: str = ""
    gpu_memory_gib: float | None = None
    link: str = "ib-ndr"
    hardware: Mapping[str, Any] = field(default_factory=dict)  # facts of a profile: gpus, nodes, link, …
    home: str = ""  # Corral's home on the nodes
    models: str = ""
    hf_home: str = ""
    shared: bool = True
    max_jobs: int | None = None
    renew: bool = False  # a successor is submitted before the end
    keeper: bool = False  # of a fleet: one stands by in each of its jobs
    renew_margin_s: float | None = None  # how much earlier than measured load and queue times ask for
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, options: Mapping[str, object]) -> SlurmOptions:
        """From a profile's values or from text of the command line."""
        known = {one.name: str(one.type) for one in fields(cls)}
        values: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in options.items():
            name = str(key).lstrip("-").replace("-", "_")
            if name == "extra" and isinstance(value, Mapping):
                extra |= {str(option).lstrip("-").replace("_", "-"): item for option, item in value.items()}
            elif name in known:
                values[name] = _value(name, known[name], value)
            else:  # `hold=true` is the flag --hold: no option of sbatch has such a value
                flag = {"true": True, "false": False}.get(str(value).lower(), value)
                extra[str(key).lstrip("-").replace("_", "-")] = flag
        read = cls(**values, extra=extra)
        read._check()
        return read

    def _check(self) -> None:
        if self.time and not time_limit_s(self.time):
            raise UsageError(f"{self.time!r} is not a time limit.", "Write it as sbatch does: 4:00:00 or 1-12:00:00.")
        if self.mem and mebibytes(self.mem) is None:
            raise UsageError(f"{self.mem!r} is not an amount of memory.", "Write it as sbatch does: 0, 64G, 500000M.")
        if self.link not in LINKS:
            raise UsageError(f"{self.link!r} is not a link Corral knows.", f"Known: {', '.join(LINKS)}.")
        for name in ("partition", "account", "qos", "reservation", "constraint", "job_name", "output", "error",
        "time",
                     "mem", "python", "home"):  # fmt: skip
            _one_line(name, getattr(self, name) or "")
        for module in self.modules:
            _one_line("modules", module)
        for name, value in self.extra.items():
            if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9-]*", name):
                raise UsageError(f"{name!r} is not the name of an option of sbatch.", "Give it without dashes.")
            if name in OURS:
                raise UsageError(f"--{name} is set by Corral itself: {OURS[name]}.", f"Leave {name} out.")
            _one_line(name, str(value))

    @property
    def time_s(self) -> float | None:
        return time_limit_s(self.time) if self.time else None

    def facts(self) -> SlurmOptions:
        """With the hardware facts of a profile where the options do not set them."""
        facts, made = self.hardware, self
        if gpus := facts.get("gpus"):
            named = parse_gpus(str(gpus))
            made = replace(made, gpu=made.gpu or named.gpu or "")
            if made.gpus_per_node is None:
                made = replace(made, gpus_per_node=named.gpus_per_node)
        if facts.get("link") and self.link == "ib-ndr":
            made = replace(made, link=str(facts["link"]))
        if facts.get("nodes") and made.nodes is None:
            made = replace(made, nodes=int(facts["nodes"]))
        return made

    def want(self) -> Want:
        """The nodes that it asks for."""
        memory = mebibytes(self.mem) if self.mem else None
        return Want(
            self.partition, self.gpus_per_node, self.gpu, self.gpu_memory_gib, self.constraint, self.nodes or 1,
            self.cpus_per_task, memory or None, self.link,
        )  # fmt: skip


OURS = {
    "array": "a deployment is one job",
    "wrap": "the script is written by Corral",
    "parsable": "Corral reads what sbatch prints",
    "ntasks": "there is one agent per node",
    "ntasks-per-node": "there is one agent per node",
    "signal": "say signal_s=SECONDS",
    "gpus-per-task": "say gpus_per_node=COUNT",
    "test-only": "nothing would be started",
    "wait": "Corral waits itself",
}
_LISTS = {"modules", "runner"}


def _value(name: str, kind: str, value: object) -> Any:
    """A value with the type of its field; text of the command line is converted."""
    if name in _LISTS:
        return tuple(str(value).split(",")) if isinstance(value, str) else tuple(str(item) for item in value)  # type: ignore[attr-defined]
    if kind.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} must be a table, not {value!r}.", "Set it in a profile.")
        return dict(value)
    if kind.startswith("bool"):
        known = {"true": True, "yes": True, "1": True, "": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in known:
            raise UsageError(f"{name} must be true or false, not {value!r}.", "Correct it.")
        return known[str(value).lower()]
    try:
        if kind.startswith("int"):
            number = int(str(value))
            if number < 0 or (number == 0 and name != "gpus_per_node"):
                raise ValueError
            return number
        return float(str(value)) if kind.startswith("float") else str(value)
    except ValueError:
        raise UsageError(f"{name} must be a number above 0, not {value!r}.", "Correct it.") from None


def _one_line(name: str, value: str) -> None:
    if not value.isprintable() or '"' in value:
        raise UsageError(f"{name} cannot be {value!r}: it must be one line without quotes.", "Correct it.")


def mebibytes(text: str) -> int | None:
    """An amount of memory as sbatch takes it, in MiB; None when it is not one."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", str(text).strip(), re.IGNORECASE)
    if not match:
        return None
    factor = {"K": 1 / 1024, "M": 1.0, "": 1.0, "G": 1024.0, "T": 1024.0 * 1024}[match[2].upper()]
    return int(int(match[1]) * factor)

"""What a target declares of itself: keys of a profile, options of the command line; and the tables that all share.

A key is a field of a frozen dataclass with its meaning, its check and a sample; None means: not said. The tables here
belong to no target, and every target may take from them what it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from corral.base.errors import UsageError
from corral.base.ssh import check_host
from corral.base.wording import time_limit_s
from corral.plan.hardware.inventory import LINKS, parse_gpus

Check = Callable[[Any], str]  # what is expected instead, or nothing when the value is good
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def key(
    doc: str,
    default: Any = None,
    check: Check | None = None,
    sample: object = None,
    read: tuple[str, Callable[[str], Any]] | None = None,
) -> Any:
    """A key of a profile; `sample` is what a reader sees in a draft, where the type alone says too little.

    `read` makes the value of text, where people write it as such, after what is said of such values.
    """
    shown = {"doc": doc, "check": check, "sample": sample, "read": read}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=shown)
    return field(default=MISSING if default is MISSING else default, metadata=shown)


def is_placeholder(value: object) -> bool:
    """Whether a value is one that only the user can know: `<your account>`."""
    return isinstance(value, str) and value.startswith("<") and value.endswith(">")


def one_of(*known: str) -> Check:
    return lambda value: "" if value in known else "one of " + ", ".join(known)


def at_least(least: float, most: float | None = None) -> Check:
    words = f"from {least:.15g} to {most:.15g}" if most is not None else f"{least:.15g} or more"
    return lambda value: "" if value >= least and (most is None or value <= most) else words


def time_limit(value: str) -> str:
    return "" if is_placeholder(value) or time_limit_s(value) else 'a time limit such as "4:00:00" or "1-00:00:00"'


def one_word(value: str) -> str:
    """One word of a batch script or of a command line: nothing that could begin another line or option."""
    good = is_placeholder(value) or (value.isprintable() and value.strip() == value and not value.startswith("-"))
    return "" if value and good else "one word that does not begin with a dash"


def a_path(value: str) -> str:
    """A file of this machine; what begins with a dash would be an option of the command that gets it."""
    good = is_placeholder(value) or (value.isprintable() and value.startswith(("/", "~")))
    return "" if good else "a path of this machine that begins with / or ~"


def path_on_nodes(value: str) -> str:
    good = is_placeholder(value) or (value.isprintable() and value.startswith(("/", "~", "$")))
    return "" if good else "a path on the nodes that begins with / or ~"


def variables(value: Mapping[str, str]) -> str:
    bad = [name for name in value if not _ENV_NAME.fullmatch(name)]
    return f"names of variables on the left; {bad[0]!r} is not one" if bad else ""


def hosts(value: tuple[str, ...]) -> str:
    for host in value:
        try:
            check_host(host)
        except UsageError:
            return f"a list of hosts as ssh knows them; {host!r} is not one"
    return "" if len(set(value)) == len(value) else "a list that names no host twice"


def _gpus(value: str) -> str:
    try:
        parse_gpus(value)
    except UsageError as error:
        return f'GPUs of one node such as "8xH100" ({error.in_full})'
    return ""


@dataclass(frozen=True)
class HardwareKeys:
    """[hardware]: named facts, so that plans and dry runs need no node."""

    gpus: str | None = key("GPUs of one node: `8xH100`", None, _gpus)
    nodes: int | None = key(
        "equal nodes, where the target's own table does not say how many", None, at_least(1, 4096)
    )
    link: str | None = key("between the nodes, as `corral plan --link` knows it", None, one_of(*LINKS))
    cpu_cores: int | None = key("CPU cores of one node, for plans", None, at_least(1))
    memory_gib: float | None = key("host memory of one node in GiB, for plans", None, at_least(0.5))


@dataclass(frozen=True)
class NetworkKeys:
    """[network]: which way the ranks talk; found by itself when nothing is said."""

    interface: str | None = key("interface between the nodes: `bond0`", None, one_word)
    hca: str | None = key("RDMA adapters, as `NCCL_IB_HCA` takes them", None, one_word)
    env: Mapping[str, str] = key("further network variables, such as `NCCL_IB_GID_INDEX`", {}, variables)


@dataclass(frozen=True)
class StorageKeys:
    """[storage]: where things lie on the nodes."""

    home: str | None = key("Corral's home on the nodes", None, path_on_nodes)
    models: str | None = key(
        "folder of models, here or on the nodes: one that lies there by name is served from there",
        None,
        path_on_nodes,
    )
    shared: bool | None = key("whether the nodes see this machine's files (ssh finds out by itself)")
    hf_home: str | None = key(
        "Hugging Face home: looked in here and on the nodes; fetched to where this machine sees it and"
        " `HF_HOME` is not set",
        None,
        path_on_nodes,
    )


@dataclass(frozen=True)
class LimitKeys:
    """[limits]: what this profile may never ask for, whatever is said on the command line."""

    max_nodes: int | None = key("nodes of one deployment", None, at_least(1))
    max_gpus: int | None = key("GPUs of one deployment", None, at_least(1))
    max_time: str | None = key("time limit of one job", None, time_limit)
    max_jobs: int | None = key("jobs at the same time", None, at_least(1))


@dataclass(frozen=True)
class Shared:
    """The tables of a profile that every target may read."""

    hardware: HardwareKeys = HardwareKeys()
    network: NetworkKeys = NetworkKeys()
    storage: StorageKeys = StorageKeys()
    limits: LimitKeys = LimitKeys()


@dataclass(frozen=True)
class Flag:
    """An option of the command line that belongs to a target."""

    name: str  # --partition
    option: str  # the target's own option that it sets; empty: options by name, as KEY=VALUE
    help: str
    metavar: str | None = None
    least: int | None = None  # a whole number of at least this; None: text
    read: Callable[[str], object] | None = None  # of the text that was given


@dataclass(frozen=True)
class Size:
    """How much of a cluster is asked for, as far as it is said."""

    nodes: int = 1
    gpus_per_node: int = 0
    time_s: float = 0.0


def only_set(values: Mapping[str, object]) -> dict[str, object]:
    """Without what was not said."""
    return {name: value for name, value in values.items() if value is not None and value not in ([], {}, ())}


def number(value: object) -> int:
    """A number, also from words of the command line; what is none is for the target to refuse."""
    return int(str(value)) if str(value).isdecimal() else 0

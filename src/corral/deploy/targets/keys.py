"""The targets by name, and what each declares: keys of a profile, options of the command line, shared tables.

A key is a field of a frozen dataclass with its meaning, its check and a sample; None means: not set. The tables here
belong to no target, and every target may read what it needs of them.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from corral.base.errors import UsageError
from corral.base.wording import time_limit_s
from corral.plan.hardware.inventory import LINKS, parse_gpus

if TYPE_CHECKING:
    from corral.deploy.launch.render import PlacedFile

Check = Callable[[Any], str]  # what is expected instead; empty when the value is good
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def key(
    doc: str,
    default: Any = None,
    check: Check | None = None,
    sample: object = None,
    read: tuple[str, Callable[[str], Any]] | None = None,
) -> Any:
    """A key of a profile; `sample` is the value that a draft shows.

    `read` is for a value that people may write as text: a description of such texts, and their parser.
    """
    metadata = {"doc": doc, "check": check, "sample": sample, "read": read}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=MISSING if default is MISSING else default, metadata=metadata)


def is_placeholder(value: object) -> bool:
    """Whether a value is left for the user to fill in: `<your account>`."""
    return isinstance(value, str) and value.startswith("<") and value.endswith(">")


def one_of(*known: str) -> Check:
    return lambda value: "" if value in known else "one of " + ", ".join(known)


def at_least(least: float, most: float | None = None) -> Check:
    text = f"from {least:.15g} to {most:.15g}" if most is not None else f"{least:.15g} or more"
    return lambda value: "" if value >= least and (most is None or value <= most) else text


def time_limit(value: str) -> str:
    return "" if is_placeholder(value) or time_limit_s(value) else 'a time limit such as "4:00:00" or "1-00:00:00"'


def one_word(value: str) -> str:
    """One word of a batch script or of a command line, which cannot start another line or option."""
    good = is_placeholder(value) or (value.isprintable() and value.strip() == value and not value.startswith("-"))
    return "" if value and good else "one word that does not begin with a dash"


def a_path(value: str) -> str:
    """A file of this machine; a leading dash would make it an option of a command."""
    good = is_placeholder(value) or (value.isprintable() and value.startswith(("/", "~")))
    return "" if good else "a path of this machine that begins with / or ~"


def path_on_nodes(value: str) -> str:
    good = is_placeholder(value) or (value.isprintable() and value.startswith(("/", "~", "$")))
    return "" if good else "a path on the nodes that begins with / or ~"


def variables(value: Mapping[str, str]) -> str:
    bad = [name for name in value if not _ENV_NAME.fullmatch(name)]
    return f"names of variables on the left; {bad[0]!r} is not one" if bad else ""


def hosts(value: tuple[str, ...]) -> str:
    from corral.base.ssh import check_host

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

    gpus: str | None = key("GPUs of one node: `8xH100`", None, _gpus, "8xH100")
    nodes: int | None = key(
        "equal nodes, where the target's own table does not say how many", None, at_least(1, 4096), 1
    )
    link: str | None = key("between the nodes, as `corral plan --network` knows it", None, one_of(*LINKS), "ib-ndr")
    cpu_cores: int | None = key("CPU cores of one node, for plans", None, at_least(1), 96)
    memory_gib: float | None = key("host memory of one node in GiB, for plans", None, at_least(0.5), 1024.0)


@dataclass(frozen=True)
class NetworkKeys:
    """[network]: the network between the ranks; found where it is not named."""

    interface: str | None = key("interface between the nodes: `bond0`", None, one_word, "bond0")
    hca: str | None = key("RDMA adapters, as `NCCL_IB_HCA` takes them", None, one_word, "mlx5")
    env: Mapping[str, str] = key(
        "further network variables, such as `NCCL_IB_GID_INDEX`", {}, variables, {"NCCL_DEBUG": "WARN"}
    )


@dataclass(frozen=True)
class StorageKeys:
    """[storage]: where things lie on the nodes."""

    home: str | None = key("Corral's home on the nodes", None, path_on_nodes, "~/.local/share/corral")
    models: str | None = key(
        "folder of models, here or on the nodes: one that lies there by any of its names is served from there",
        None,
        path_on_nodes,
        "/shared/models",
    )
    shared: bool | None = key("whether the nodes see this machine's files (ssh finds out by itself)", sample=True)
    hf_home: str | None = key(
        "Hugging Face home: looked in here and on the nodes; fetched to where this machine sees it and"
        " `HF_HOME` is not set",
        None,
        path_on_nodes,
        "/shared/huggingface",
    )


@dataclass(frozen=True)
class LimitKeys:
    """[limits]: what this profile may never request, whatever the command line says."""

    max_nodes: int | None = key("nodes of one deployment", None, at_least(1), 4)
    max_gpus: int | None = key("GPUs of one deployment", None, at_least(1), 32)
    max_time: str | None = key("time limit of one job", None, time_limit, "12:00:00")
    max_jobs: int | None = key("jobs at the same time", None, at_least(1), 4)


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
    read: Callable[[str], object] | None = None  # parses the option's text
    typed: Callable[[str], object] | None = None  # the same for what a person types in a terminal: may read a file


@dataclass(frozen=True)
class Size:
    """How much of a cluster is requested, as far as it is set."""

    nodes: int = 1
    gpus_per_node: int = 0
    time_s: float = 0.0


def only_set(values: Mapping[str, object]) -> dict[str, object]:
    """The values that are set."""
    return {name: value for name, value in values.items() if value is not None and value not in ([], {}, ())}


def number(value: object) -> int:
    """A number, also from text of the command line; 0 for what is none, which the target refuses."""
    return int(str(value)) if str(value).isdecimal() else 0


class Declaration:
    """What a target says of itself before one is made: its table in profiles, its options of the command line.

    `TABLE` is a dataclass of keys (see `deploy.targets.keys`): the table of a profile that has the target's name.
    `FLAGS` are its options of the command line, `VARIABLES` those of the environment. A flag names an option of the
    target, and so does a key, unless `from_profile` maps it to another.
    """

    TITLE: ClassVar[str] = ""  # for headings: SLURM, ssh
    TABLE: ClassVar[type | None] = None
    FLAGS: ClassVar[tuple[Flag, ...]] = ()
    VARIABLES: ClassVar[Mapping[str, str]] = {}  # variable -> key of the table
    DERIVED: ClassVar[Mapping[str, str]] = {}  # key -> the key that it may come from: hosts from a hosts file
    REQUIRED: ClassVar[tuple[str, ...]] = ()  # options without which none can be made
    NODES_KNOWN: ClassVar[bool] = True  # before it starts something
    HERE: ClassVar[bool] = False  # whether its nodes are this machine
    FILES: ClassVar[tuple[PlacedFile, ...]] = ()  # of Corral's that its nodes need, beside those of every launch

    @classmethod
    def completed(cls, table: Any, folder: Path, overruled: frozenset[str]) -> Any:  # noqa: ARG003
        """The table with what it names brought in; `folder` is where its profile lies.

        The environment overrules the keys in `overruled`, on top of what the files say.
        """
        return table

    @classmethod
    def from_profile(cls, table: Any, shared: Shared) -> dict[str, object]:  # noqa: ARG003
        """The options that a profile sets."""
        return only_set(vars(table)) if table is not None else {}

    @classmethod
    def count_nodes(cls, table: Any) -> int | None:  # noqa: ARG003
        """How many nodes the table names."""
        return None

    @classmethod
    def contradictions(cls, table: Any, shared: Shared) -> Iterator[tuple[str, str, str]]:  # noqa: ARG003
        """(key, what it says, what another says) where two keys exclude each other."""
        return iter(())

    @classmethod
    def size(cls, options: Mapping[str, Any]) -> Size:  # noqa: ARG003
        """How much the options ask for."""
        return Size()

    @classmethod
    def divisible(cls, options: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """The nodes that several deployments may share; empty: a scheduler divides them."""
        return ()

    @classmethod
    def only_on(cls, options: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:  # noqa: ARG003
        """The options for some of those nodes."""
        return dict(options)


TARGETS = {
    "local": "corral.deploy.targets.local:LocalTarget",
    "ssh": "corral.deploy.targets.ssh:SshTarget",
    "slurm": "corral.deploy.targets.slurm:SlurmTarget",
}


def target_class(name: str) -> type[Declaration]:
    """The class that `TARGETS` names."""
    if name not in TARGETS:
        raise UsageError(f"there is no target {name!r}.", f"Known: {', '.join(TARGETS)}.")
    module, _, attribute = TARGETS[name].partition(":")
    loaded: type[Declaration] = getattr(importlib.import_module(module), attribute)
    return loaded


def target_tables() -> dict[str, type]:
    """The tables of profiles that belong to a target, by the target's name."""
    return _tables(tuple(TARGETS))


@functools.cache
def _tables(names: tuple[str, ...]) -> dict[str, type]:
    return {name: table for name in names if (table := target_class(name).TABLE) is not None}

"""The keys of a profile: a tree of frozen dataclasses, one per table, each key with its meaning and its check.

The tree is the only list of keys: reading, `corral profile show`, and the table of docs/profiles.md follow it. None
means: not said, so that whoever comes later decides. What `[runtime]` holds beside its name belongs to the runtime.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from corral.errors import UsageError
from corral.hardware.inventory import LINKS, parse_gpus
from corral.ssh import check_host

__all__ = ["Key", "Settings", "all_keys", "is_placeholder", "takes", "time_s"]

Check = Callable[[Any], str]  # what is expected instead, or nothing when the value is good
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d{1,2}){0,2})")


def is_placeholder(value: object) -> bool:
    """Whether a value is one that only the user can know: `<your account>`."""
    return isinstance(value, str) and value.startswith("<") and value.endswith(">")


def time_s(text: str) -> int | None:
    """A time limit as SLURM writes it (`30`, `4:00:00`, `1-12`), in seconds; None when it is none."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    parts = [int(part) for part in found["clock"].split(":")]
    if found["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = {1: (0, parts[0], 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return (hours * 60 + minutes) * 60 + seconds


def _one_of(*known: str) -> Check:
    return lambda value: "" if value in known else "one of " + ", ".join(known)


def _from(least: float, most: float | None = None) -> Check:
    words = f"from {least:g} to {most:g}" if most is not None else f"{least:g} or more"
    return lambda value: "" if value >= least and (most is None or value <= most) else words


def _time(value: str) -> str:
    return "" if is_placeholder(value) or time_s(value) else 'a time limit such as "4:00:00" or "1-00:00:00"'


def _gpus(value: str) -> str:
    try:
        parse_gpus(value)
    except UsageError as error:
        return f'GPUs of one node such as "8xH100" ({error.message} {error.remedy})'
    return ""


def _hosts(value: tuple[str, ...]) -> str:
    for host in value:
        try:
            check_host(host)
        except UsageError:
            return f"a list of hosts as ssh knows them; {host!r} is none"
    return "" if len(set(value)) == len(value) else "a list that names no host twice"


def _env(value: Mapping[str, str]) -> str:
    bad = [name for name in value if not _ENV_NAME.fullmatch(name)]
    return f"names of variables on the left; {bad[0]!r} is none" if bad else ""


def _word(value: str) -> str:
    """One word of a batch script or of a command line: nothing that could begin another line or option."""
    good = is_placeholder(value) or (value.isprintable() and value.strip() == value and not value.startswith("-"))
    return "" if value and good else "one word that does not begin with a dash"


def _path(value: str) -> str:
    good = is_placeholder(value) or (value.isprintable() and value.startswith(("/", "~", "$")))
    return "" if good else "a path on the nodes that begins with / or ~"


def _sbatch(value: Mapping[str, object]) -> str:
    for name, given in value.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            return f"names of #SBATCH options without dashes in front; {name!r} is none"
        if not isinstance(given, (str, int, bool)) or (isinstance(given, str) and not given.isprintable()):
            return f"text, numbers or true; {name} is {given!r}"
    return ""


def _key(doc: str, default: Any = None, check: Check | None = None) -> Any:
    factory: Any = type(default) if isinstance(default, dict) else MISSING
    shown = {"doc": doc, "check": check}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=shown)
    return field(default=default, metadata=shown)


@dataclass(frozen=True)
class SshKeys:
    """[ssh]: nodes reached by ssh."""

    hosts: tuple[str, ...] = _key("the nodes, head first, as ssh knows them", (), _hosts)
    hosts_file: str | None = _key("a file with one host per line instead; relative to the profile")


@dataclass(frozen=True)
class SlurmKeys:
    """[slurm]: what the batch job asks for."""

    partition: str | None = _key("`--partition`", None, _word)
    account: str | None = _key("`--account`", None, _word)
    qos: str | None = _key("`--qos`", None, _word)
    reservation: str | None = _key("`--reservation`", None, _word)
    constraint: str | None = _key("`--constraint`", None, _word)
    exclusive: bool | None = _key("`--exclusive`: whole nodes")
    mem: str | int | None = _key("`--mem` per node; 0 is all of it", None)
    gpus_per_node: int | None = _key("`--gpus-per-node` (default: from hardware.gpus)", None, _from(0, 128))
    cpus_per_task: int | None = _key("`--cpus-per-task`", None, _from(1))
    time: str | None = _key("`--time`: the time limit of the job", None, _time)
    nodes: int | None = _key("`--nodes` (default: hardware.nodes, or 1)", None, _from(1, 4096))
    signal_s: int | None = _key("seconds before the time limit at which draining begins", None, _from(1))
    modules: tuple[str, ...] = _key("modules that the job loads before anything else", ())
    extra: Mapping[str, str | int | bool] = _key("other #SBATCH options, passed on as they stand", {}, _sbatch)


@dataclass(frozen=True)
class HardwareKeys:
    """[hardware]: named facts, so that plans and dry runs need no node."""

    gpus: str | None = _key("GPUs of one node: `8xH100`", None, _gpus)
    nodes: int | None = _key(
        "equal nodes, where neither ssh.hosts nor slurm.nodes says how many", None, _from(1, 4096)
    )
    link: str | None = _key("between the nodes, as `corral plan --link` knows it", None, _one_of(*LINKS))
    cpu_cores: int | None = _key("CPU cores of one node, for plans", None, _from(1))
    memory_gib: float | None = _key("host memory of one node in GiB, for plans", None, _from(0.5))


@dataclass(frozen=True)
class RuntimeKeys:
    """[runtime]: how vLLM exists on a node; every other key is an option of that runtime."""

    name: str = _key("`managed`, `venv`, `conda`, `module`, `docker`, `podman`, `apptainer`", "managed", _word)
    options: Mapping[str, object] = field(
        default_factory=dict, metadata={"doc": "any other key: an option of the runtime", "check": None, "rest": True}
    )


@dataclass(frozen=True)
class LinkKeys:
    """[link]: how the ranks of one replica find each other."""

    name: str = _key(
        "`auto`, `native` (vLLM's own), `ray`, `single`", "auto", _one_of("auto", "native", "ray", "single")
    )


@dataclass(frozen=True)
class NetworkKeys:
    """[network]: which way the ranks talk; found by itself when nothing is said."""

    interface: str | None = _key("interface between the nodes: `bond0`", None, _word)
    hca: str | None = _key("RDMA adapters, as `NCCL_IB_HCA` takes them", None, _word)
    env: Mapping[str, str] = _key("further network variables, such as `NCCL_IB_GID_INDEX`", {}, _env)


@dataclass(frozen=True)
class StorageKeys:
    """[storage]: where things lie on the nodes."""

    home: str | None = _key("Corral's home on the nodes", None, _path)
    models: str | None = _key("folder of models: one that lies there by name is served from there", None, _path)
    shared: bool | None = _key("whether the nodes see this machine's files (ssh finds out by itself)")
    hf_home: str | None = _key("Hugging Face home to look in and fetch to, where `HF_HOME` is not set", None, _path)


@dataclass(frozen=True)
class EngineKeys:
    """[engine]: what vLLM gets beside the plan."""

    env: Mapping[str, str] = _key("environment variables of the engine", {}, _env)
    args: tuple[str, ...] = _key("arguments of `vllm serve`, as after `--`", ())


@dataclass(frozen=True)
class DefaultsKeys:
    """[defaults]: what `corral up` and `corral plan` do unless told otherwise."""

    model: str | None = _key("the model when none is named")
    context: int | None = _key("`--context`", None, _from(1))
    concurrency: int | None = _key("`--concurrency`", None, _from(1))
    goal: str | None = _key("`--goal`", None, _one_of("balanced", "latency", "throughput"))
    set: Mapping[str, str | int | float | bool] = _key("`--set`: fields of the plan, as `{tensor = 16}`", {})
    restart: int | None = _key("`--restart`", None, _from(0, 100))
    stall: float | None = _key("`--stall`, in seconds", None, _from(10))


@dataclass(frozen=True)
class EndpointKeys:
    """[endpoint]: where the server listens."""

    bind: str | None = _key("`--bind`: the address to listen on")
    expose: bool | None = _key("`--expose`: listen on the cluster's network; the key is still needed")
    port: int | None = _key("`--port`", None, _from(1, 65535))


@dataclass(frozen=True)
class LimitKeys:
    """[limits]: what this profile may never ask for, whatever is said on the command line."""

    max_nodes: int | None = _key("nodes of one deployment", None, _from(1))
    max_gpus: int | None = _key("GPUs of one deployment", None, _from(1))
    max_time: str | None = _key("time limit of one job", None, _time)
    max_jobs: int | None = _key("jobs at the same time", None, _from(1))


@dataclass(frozen=True)
class Settings:
    """A whole profile."""

    description: str = _key("one line for `corral profile list`", "")
    target: str = _key("`local`, `ssh` or `slurm`", "local", _one_of("local", "ssh", "slurm"))
    ssh: SshKeys = SshKeys()
    slurm: SlurmKeys = SlurmKeys()
    hardware: HardwareKeys = HardwareKeys()
    runtime: RuntimeKeys = RuntimeKeys()
    link: LinkKeys = LinkKeys()
    network: NetworkKeys = NetworkKeys()
    storage: StorageKeys = StorageKeys()
    engine: EngineKeys = EngineKeys()
    defaults: DefaultsKeys = DefaultsKeys()
    endpoint: EndpointKeys = EndpointKeys()
    limits: LimitKeys = LimitKeys()


@dataclass(frozen=True)
class Key:
    """One key: its table ("" for the top), its name, what values it takes, what it means."""

    table: str
    name: str
    takes: str
    doc: str
    kind: Any

    @property
    def dotted(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def takes(kind: Any) -> str:
    """A type in words: `text`, `a list of text`, `a table of text`."""
    if kind in _WORDS:
        return _WORDS[kind]
    arguments = get_args(kind)
    origin = getattr(kind, "__origin__", None)
    if origin is tuple:
        return "a list of text"
    if origin is not None and issubclass(origin, Mapping):
        return "a table of text" if arguments[1] is str else "a table"
    return " or ".join(takes(part) for part in arguments if part is not type(None))


def all_keys(kind: type = Settings, table: str = "") -> Iterator[Key]:
    """Every key there is, in the order of the tree."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        if is_dataclass(hints[entry.name]):
            yield from all_keys(hints[entry.name], entry.name)
        else:
            words = "anything" if entry.metadata.get("rest") else takes(hints[entry.name])
            yield Key(table, entry.name, words, entry.metadata["doc"], hints[entry.name])

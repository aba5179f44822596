"""The engine's own flags: are these arguments ones that this vLLM accepts?

vLLM drops and renames flags with nearly every release, and a job may wait a night in a queue before it says so.
The list for the pinned version ships with Corral; for other managed versions it is asked from the engine once and
kept; for an environment or image whose vLLM is not known, only the flags that Corral owns are refused.
Checked are names, missing values, and values of flags that take none; what a value means is left to vLLM.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from corral.base.errors import EngineError, UsageError
from corral.base.record import nearest
from corral.engines import PINNED_VERSION

# flags that documents of this field still show, and what to do instead
REMOVED = {
    "--swap-space": "vLLM no longer swaps KV blocks to host memory; leave it out",
    "--disable-log-requests": "Requests are not logged unless --enable-log-requests is given; leave it out",
    "--use-v2-block-manager": "It is the only block manager now; leave it out",
    "--num-scheduler-steps": "The engine schedules asynchronously by itself; leave it out",
    "--worker-use-ray": "Say --distributed-executor-backend ray",
    "--engine-use-ray": "Say --distributed-executor-backend ray",
    "--guided-decoding-backend": "Say --structured-outputs-config.backend",
    "--max-seq-len-to-capture": "Say --max-cudagraph-capture-size",
    "--device": "The engine's flavour decides: `--flavour cpu` or `--flavour cuda` of `corral up`",
}

# flags that Corral sets itself, and the option of `corral up` that decides them
OWNED = {
    "--host": "Put --bind before the `--`.",
    "--port": "Put --port before the `--`.",
    "--model": "Name the model before the `--`: corral up MODEL.",
    "--served-model-name": "Put --served-name before the `--`.",
    "--api-key": "Leave it out: every deployment has a key of its own, in its key file.",
    "--middleware": "Leave it out: the guard needs it.",
    "--allowed-origins": "Put --allowed-origins before the `--`.",
    "--uds": "Put --bind before the `--`.",
    "--headless": "Leave it out: the link between the nodes sets it (--hosts, --nodes, --link).",
    "--nnodes": "Leave it out: the link between the nodes sets it (--hosts, --nodes, --link).",
    "--node-rank": "Leave it out: the link between the nodes sets it (--hosts, --nodes, --link).",
    "--master-addr": "Leave it out: the link between the nodes sets it (--hosts, --nodes, --link).",
    "--master-port": "Leave it out: the link between the nodes sets it (--hosts, --nodes, --link).",
    "--config": "Leave it out: what it holds could not be checked; write its flags after `--`.",
    "--ssl-keyfile": "Leave it out: put a TLS proxy in front, or use an SSH tunnel.",
    "--ssl-certfile": "Leave it out: put a TLS proxy in front, or use an SSH tunnel.",
    "--ssl-ca-certs": "Leave it out: put a TLS proxy in front, or use an SSH tunnel.",
    "--data-parallel-rank": "Leave it out: the link between the nodes sets it (--hosts, --nodes, --link).",
    "--data-parallel-start-rank": "Leave it out: the link between the nodes sets it (--hosts, --nodes, --link).",
    "--data-parallel-address": "Leave it out: the link between the nodes sets it (--hosts, --nodes, --link).",
    "--data-parallel-external-lb": "Leave it out: one address serves all replicas.",
    "--data-parallel-hybrid-lb": "Leave it out: one address serves all replicas.",
    "--data-parallel-multi-port-external-lb": "Leave it out: one address serves all replicas.",
    "--grpc-port": "Leave it out: only the HTTP server is guarded.",
    "--help": "`vllm serve --help` in the engine's environment",
    "--root-path": "Leave it out: the guard knows paths from the root.",
    "--grpc": "Leave it out: only the HTTP server is guarded.",
}

_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


@dataclass(frozen=True)
class FlagList:
    """Every flag of one engine version: name -> whether a value follows."""

    version: str
    takes_value: Mapping[str, bool]
    complete: bool = True  # False: another version's list, good for guesses and no ground to refuse anything
    tool_parsers: frozenset[str] = frozenset()  # names that --tool-call-parser takes
    reasoning_parsers: frozenset[str] = frozenset()  # names that --reasoning-parser takes
    variables: frozenset[str] = frozenset()  # of the environment, that it reads

    @classmethod
    def parse(cls, text: str) -> FlagList:
        body = json.loads(text)
        takes_value = {name: bool(flag["takes_value"]) for name, flag in body["flags"].items()}
        tools, thoughts, variables = (
            frozenset(body.get(key, ())) for key in ("tool_parsers", "reasoning_parsers", "variables")
        )
        return cls(body["version"], takes_value, True, tools, thoughts, variables)


def shipped_flags(version: str = PINNED_VERSION) -> FlagList | None:
    """The list that came with Corral, if it knows this version."""
    file = resources.files("corral") / "data" / "engines" / f"flags-{version}.json"
    return FlagList.parse(file.read_text(encoding="utf-8")) if file.is_file() else None


def flags_or_guess(version: str, guess_from: str) -> FlagList:
    """The shipped list of a version, or for one that Corral does not know (or "") that of another as a guess."""
    if shipped := shipped_flags(version):
        return shipped
    near = shipped_flags(guess_from) or FlagList("", {})
    return replace(near, version=version or "(version unknown)", complete=False)


def flag_name(argument: str) -> str:
    """The flag's own name: without value, dotted part, and with dashes for underscores."""
    head = argument.partition("=")[0]
    if head.startswith("--"):
        return "--" + head[2:].partition(".")[0].replace("_", "-")
    if head[:2] == "-O" and head[2:].isdigit():
        return "--optimization-level"
    return head.partition(".")[0]


def takes_next(arguments: Sequence[str], index: int) -> bool:
    """Whether the word at `index` can be a flag's value: it is there, and is no flag itself."""
    return index < len(arguments) and not re.match(r"--?[A-Za-z]", arguments[index])


def boolean_with_value(
    argument: str, following: Sequence[str], name: str, known: Collection[str]
) -> UsageError | None:
    """The error for a value given to a flag that takes none (`--enable-chunked-prefill=False`), or None."""
    _, equals, value = argument.partition("=")
    if not equals:
        if not following or following[0].startswith("-"):
            return None
        value = following[0]
    positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    wanted = (value.lower() in _TRUE) == (positive == name)  # `--no-x=false` means x
    spelling = positive if wanted else f"--no-{positive[2:]}"
    if value.lower() not in (*_TRUE, *_FALSE):
        return UsageError(f"{name} takes no value, but {value!r} follows it.", "Leave the value out.")
    if spelling not in known:
        return UsageError(f"{name} takes no value, but {value!r} follows it.", f"Leave {name} out altogether.")
    return UsageError(f"{name} takes no value, but {value!r} follows it.", f"vLLM spells it {spelling} today.")


def check_arguments(arguments: Sequence[str], flags: FlagList) -> None:
    """Refuse what this engine does not know, what Corral owns, a missing value, and a value where none belongs."""
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        name = flag_name(argument)
        if not argument.startswith("-") or argument == "-":
            raise UsageError(
                f"{argument!r} after `--` is not a flag of vLLM {flags.version}.",
                "Arguments after `--` go to `vllm serve`: flags and their values only.",
            )
        if name in OWNED:
            raise UsageError(f"{name} is set by Corral, not after `--`.", OWNED[name])
        index += 1
        if not flags.complete:  # only vLLM itself knows this version's flags, and how many values each takes
            while takes_next(arguments, index):
                index += 1
            continue
        if name not in flags.takes_value:
            raise _unknown(name, flags)
        if not flags.takes_value[name]:
            if error := boolean_with_value(argument, arguments[index : index + 1], name, flags.takes_value):
                raise error
        elif "=" not in argument and not argument.startswith("-O"):
            if not takes_next(arguments, index):
                raise UsageError(f"{name} needs a value.", f"Give one: `{name} VALUE`.")
            index += 1
            while index < len(arguments) and not arguments[index].startswith("-"):
                index += 1  # flags that take several values


def _unknown(name: str, flags: FlagList) -> EngineError:
    if name in REMOVED:
        return EngineError(f"vLLM {flags.version} has no {name} any more.", f"{REMOVED[name]}.")
    guesses = nearest(name, list(flags.takes_value))
    remedy = f"Closest: {', '.join(guesses)}." if guesses else "`vllm serve --help=all` lists the flags."
    return EngineError(f"vLLM {flags.version} has no flag {name}.", remedy, flag=name, nearest=guesses)


def values_of(flag: str, arguments: Sequence[str]) -> list[str]:
    """The values that a flag is given, in either of its two forms."""
    pairs = itertools.pairwise(arguments)
    return [b for a, b in pairs if a == flag] + [a.partition("=")[2] for a in arguments if a.startswith(flag + "=")]

"""What tuning may vary for a plan and a workload, and a request with one way of setting it.

Which settings may be varied is a column of the table `engines.settings`; here are the values worth trying for a plan.
Only what leaves answers as they are is varied: no narrower weights, no narrower KV cache. What the user fixed with
`--set` stays; flags of vLLM about speed that he brought may be left out again, because such flags are often copied
from somewhere. A value whose plan does not fit is never started.

A setup is what it changes against the base (the plan, or the flags that the user came with), so that two trials of
one setup are recognised in whatever order they come. A knob's values are as `--set` or vLLM's flag take them.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from corral.deploy.lifecycle.decision import DeployRequest
from corral.engines.flags import flag_name, takes_next
from corral.engines.settings import SETTINGS, Setting, VariedBy, read_back
from corral.plan.contract import Plan
from corral.plan.settings import largest_graph, own_largest, size_for, sized_elsewhere

GIVEN = "given "  # begins the names of knobs that leave out what the user brought


class KnobKind(enum.StrEnum):
    """How a value becomes part of a start."""

    FIELD = "field"  # of the plan, as in `--set`
    SWITCH = "switch"  # of vLLM, there or not: the value is the flag itself, or empty
    BASELINE = "baseline"  # a line of vLLM's flags, as somebody else has them
    WITHOUT = "without"  # the value is what the user gave and this leaves out


@dataclass(frozen=True)
class Knob:
    """Something that may be set otherwise than in the base."""

    name: str
    values: tuple[str, ...]  # other than the base's, the most promising first
    kind: KnobKind = KnobKind.FIELD


def choice_words(knob: str, value: str) -> str:
    """One choice as people read it: a value, or what is left out."""
    return f"{knob}={value}" if value else f"without {knob.removeprefix(GIVEN)}"


@dataclass(frozen=True)
class Setup:
    """What is set otherwise than in the base, by the name of its knob, in the order of names."""

    choices: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, **choices: str) -> Setup:
        return cls(tuple(sorted(choices.items())))

    def with_(self, knob: str, value: str) -> Setup:
        return Setup(tuple(sorted({**dict(self.choices), knob: value}.items())))

    def without(self, knob: str) -> Setup:
        return Setup(tuple(pair for pair in self.choices if pair[0] != knob))

    def __str__(self) -> str:
        left_out = [name.removeprefix(GIVEN) for name, value in self.choices if not value]
        words = [f"without {', '.join(left_out)}"] if left_out else []
        return "; ".join([*words, *(choice_words(name, value) for name, value in self.choices if value)]) or "base"

    def beside(self, anchor: Setup) -> str:
        """What is set otherwise than in another setup."""
        own, theirs = dict(self.choices), dict(anchor.choices)
        back = [f"with {name.removeprefix(GIVEN)}" for name in theirs if name not in own]
        return ", ".join([*back, *(choice_words(*pair) for pair in self.choices if pair not in anchor.choices)])


BASE = Setup()

BATCHED = (8192, 16384, 4096, 2048, 32768)
FEWEST_SEQS, MOST_SEQS = 16, 4096
MOST_API_SERVERS = 16
_SWITCHES = {"prefix_caching": "--no-enable-prefix-caching"}
_OF_SPEED = {
    "--enable-chunked-prefill", "--no-enable-chunked-prefill", "--enable-prefix-caching",
    "--no-enable-prefix-caching", "--block-size", "--compilation-config", "-cc", "-O", "--optimization-level",
    "--cudagraph-capture-sizes", "--cuda-graph-sizes", "--speculative-config", "-sc", "--scheduling-policy",
    "--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold",
    "--disable-custom-all-reduce", "--disable-cascade-attn", "--no-disable-cascade-attn", "--attention-backend",
    "--enable-dbo", "--performance-mode", "--num-gpu-blocks-override", "--cpu-offload-gb",
    "--kv-cache-memory-bytes", "--enable-expert-parallel", "--no-enable-expert-parallel", "--all2all-backend",
}  # fmt: skip


def knobs_for(
    plan: Plan, request: DeployRequest, brought: Sequence[str], bursts: bool, shares_prefixes: bool
) -> tuple[Knob, ...]:
    """What may be set otherwise for this plan; `brought` are the arguments the user gave after `--`.

    `bursts`: answers may come in bursts of tokens, because nobody reads along.
    """
    read = read_back(brought)
    fixed = {name for name in request.fixed if name not in read.fields}
    knobs = [*_without(read.fields, read.rest), *_fields(plan)]
    if plan.inventory.gpu is not None:
        knobs += [Knob(name, (flag,), KnobKind.SWITCH) for name, flag in _SWITCHES.items()
                  if name != "prefix_caching" or not shares_prefixes]  # fmt: skip
    if bursts:
        knobs.append(Knob("stream_interval", _intervals(plan)))
    flags = {word.partition("=")[0] for word in read.rest}
    fixed |= {"max_graph_size"} if sized_elsewhere(read.rest) else set()
    taken = fixed | set(read.fields) | {name for name, flag in _SWITCHES.items() if flag in flags}
    return tuple(knob for knob in knobs if knob.kind is KnobKind.WITHOUT or knob.name not in taken)


def _without(fields: Mapping[str, str], rest: Sequence[str]) -> Iterator[Knob]:
    """The user's own flags, each left out, as far as only speed depends on them."""
    for name in fields:
        if not SETTINGS[name].changes_answers:
            yield Knob(f"{GIVEN}{name}", ("",), KnobKind.WITHOUT)
    for word in dict.fromkeys(word.partition("=")[0] for word in rest if flag_name(word) in _OF_SPEED):
        yield Knob(f"{GIVEN}{word}", ("",), KnobKind.WITHOUT)


def _fields(plan: Plan) -> Iterator[Knob]:
    """Settings of the plan that tuning may vary, with other values than the plan's."""
    for name, values in _VALUES.items():
        if SETTINGS[name].varied_by is VariedBy.TUNE and (tried := values(plan)) is not None:
            yield Knob(name, tried)
    for row in SETTINGS.values():
        if (
            row.varied_by is VariedBy.TUNE
            and row.name not in (*_VALUES, "stream_interval")
            and (tried := _tried(row))
        ):
            yield Knob(row.name, tried)


def _tried(row: Setting) -> tuple[str, ...]:
    """Values of a setting that the plan knows nothing of: those of its row, or the one that is not vLLM's default."""
    return row.tries or ((str(not row.unsaid).lower(),) if row.is_boolean else ())


def _seats(plan: Plan) -> tuple[str, ...]:
    now = plan.settings.max_num_seqs
    return tuple(str(n) for n in (now * 2, now // 2) if FEWEST_SEQS <= n <= MOST_SEQS)


def _batched(plan: Plan) -> tuple[str, ...]:
    now, seats = plan.settings.max_num_batched_tokens, plan.settings.max_num_seqs
    others = [n for n in BATCHED if n != now and n >= seats]
    others.sort(key=lambda n: abs(n.bit_length() - now.bit_length()))
    return tuple(map(str, others[:3]))


def _on_one_engine(plan: Plan) -> bool:
    return plan.inventory.gpu is not None and plan.parallel.data == 1


def _scheduling(plan: Plan) -> tuple[str, ...] | None:
    return (str(not plan.settings.async_scheduling).lower(),) if _on_one_engine(plan) else None


def _graphs(plan: Plan) -> tuple[str, ...] | None:
    """Larger graphs, where steps are beyond vLLM's own; where the plan has them, its own."""
    settings, gpu = plan.settings, plan.inventory.kind
    size = size_for(settings, gpu, plan.goal, plan.parallel.data)
    if not _on_one_engine(plan) or not size or settings.eager:
        return None
    return (str(size if largest_graph(settings, gpu) < size else own_largest(settings, gpu)),)


def _servers(plan: Plan) -> tuple[str, ...] | None:
    if not _on_one_engine(plan):
        return None
    now, cores = plan.settings.api_servers, plan.inventory.cpu_cores
    most = min(MOST_API_SERVERS, max(1, cores // 2)) if cores else 8
    return tuple(dict.fromkeys(str(n) for n in (now * 2, now // 2, 1) if 1 <= n <= most and n != now))


def _intervals(plan: Plan) -> tuple[str, ...]:
    return ("4",) if plan.settings.stream_interval == 1 else ("1",)


# values other than the plan's, in the order in which they are tried; None: not for this plan
_VALUES: dict[str, Callable[[Plan], tuple[str, ...] | None]] = {
    "max_num_seqs": _seats,
    "max_num_batched_tokens": _batched,
    "async_scheduling": _scheduling,
    "max_graph_size": _graphs,
    "api_servers": _servers,
}


def tuned_request(request: DeployRequest, knobs: Sequence[Knob], setup: Setup) -> DeployRequest:
    """The base with a setup's choices."""
    fixed, arguments = dict(request.fixed), list(request.extra_args)
    kinds = {knob.name: knob.kind for knob in knobs}
    for name, value in setup.choices:
        match kinds[name]:
            case KnobKind.FIELD:
                fixed[name] = value
            case KnobKind.SWITCH:
                arguments.append(value)
            case KnobKind.BASELINE:
                read = read_back(shlex.split(value))
                fixed |= read.fields
                arguments += read.rest
            case KnobKind.WITHOUT:
                brought = name.removeprefix(GIVEN)
                fixed.pop(brought, None)
                arguments = _left_out(arguments, brought)
    return replace(request, fixed=fixed, extra_args=tuple(arguments))


def _left_out(arguments: Sequence[str], flag: str) -> list[str]:
    """The arguments without a flag and its value."""
    kept: list[str] = []
    skipping = False
    for at, word in enumerate(arguments):
        if not takes_next(arguments, at):  # a flag, not a value such as -1
            skipping = word.partition("=")[0] == flag
        if not skipping:
            kept.append(word)
    return kept

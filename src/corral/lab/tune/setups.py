"""What may be varied, and one way of setting it.

A setup is what it changes against the base (the plan, or the flags that the user came with), so that two trials of
one setup are recognised in whatever order they come. A knob's values are as `--set` or vLLM's flag take them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

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

"""Sampling parameters that rows and flags may carry, with their types and ranges.

Only what is certainly wrong is refused here: a wrong type, or a value outside the range that vLLM accepts. Names that
are not in the table go through `--param` or a body unchecked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.errors import UsageError
from corral.record import nearest

__all__ = ["PARAMETERS", "from_text", "problem_with"]

_WHOLE, _NUMBER, _FLAG, _ANY = "a whole number", "a number", "true or false", ""

# name -> (type, lowest, highest)
PARAMETERS: dict[str, tuple[str, float | None, float | None]] = {
    "max_tokens": (_WHOLE, 1, None),
    "max_completion_tokens": (_WHOLE, 1, None),
    "min_tokens": (_WHOLE, 0, None),
    "temperature": (_NUMBER, 0, None),
    "top_p": (_NUMBER, 0, 1),
    "top_k": (_WHOLE, -1, None),
    "min_p": (_NUMBER, 0, 1),
    "frequency_penalty": (_NUMBER, -2, 2),
    "presence_penalty": (_NUMBER, -2, 2),
    "repetition_penalty": (_NUMBER, 0, None),
    "length_penalty": (_NUMBER, None, None),
    "seed": (_WHOLE, None, None),
    "n": (_WHOLE, 1, None),
    "stop": (_ANY, None, None),
    "stop_token_ids": (_ANY, None, None),
    "ignore_eos": (_FLAG, None, None),
    "skip_special_tokens": (_FLAG, None, None),
    "include_stop_str_in_output": (_FLAG, None, None),
    "logprobs": (_ANY, None, None),
    "top_logprobs": (_WHOLE, 0, None),
    "prompt_logprobs": (_WHOLE, 0, None),
    "logit_bias": (_ANY, None, None),
    "response_format": (_ANY, None, None),
    "structured_outputs": (_ANY, None, None),
    "chat_template_kwargs": (_ANY, None, None),
    "tools": (_ANY, None, None),
    "tool_choice": (_ANY, None, None),
}


def problem_with(values: Mapping[str, Any]) -> str:
    """What is wrong with some parameters, in words; empty when nothing is."""
    for name, value in values.items():
        rule = PARAMETERS.get(name)
        if rule is None or value is None:
            continue
        kind, low, high = rule
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (kind is _WHOLE and not (number and value == int(value))) or (kind is _NUMBER and not number):
            return f"{name} must be {kind}, not {value!r}"
        if kind is _FLAG and not isinstance(value, bool):
            return f"{name} must be {kind}, not {value!r}"
        if (low is not None and value < low) or (high is not None and value > high):
            return f"{name} is {value}, and must be {_range(low, high)}"
    return ""


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {low:g}"
    return f"from {low:g} to {high:g}"


def from_text(name: str, text: str) -> Any:
    """A parameter's value from a CSV cell or a flag; JSON where it is JSON, else the text itself."""
    import msgspec

    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        pass
    kind = PARAMETERS.get(name, (_ANY, None, None))[0]
    if kind is _FLAG and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text


def parse_assignments(given: tuple[str, ...]) -> dict[str, Any]:
    """`--param name=value` options as a mapping."""
    found: dict[str, Any] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--param {item!r} is not NAME=VALUE.", "For example: --param top_k=20")
        near = nearest(name, list(PARAMETERS), 1)
        if name not in PARAMETERS and near and _distance_one(name, near[0]):
            raise UsageError(f"there is no parameter {name!r}.", f"Did you mean {near[0]!r}?")
        found[name] = from_text(name, text)
    return found


def _distance_one(a: str, b: str) -> bool:
    """Whether one letter was dropped, added, changed or swapped: a slip, not another parameter."""
    import difflib

    return difflib.SequenceMatcher(None, a, b).ratio() > 0.85

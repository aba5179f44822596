"""Every sampling parameter that vLLM takes: its range, its meaning in one line, and the check before sending.

The table is the one place that knows them: `--help`, the range checks, the fields of a request, and the columns of a
batch that are parameters come from it. Parameters it does not know pass through as they are when they are given as
such (`--param name=value`, `extra=`), so that a newer server's can be used at once; a misspelt one is an error here,
as vLLM ignores what it does not know.

Ranges are those of vLLM 0.32's `SamplingParams`; the limit of `logprobs` is the server's `--max-logprobs` (20 unless
raised), which only the server knows.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypedDict

from corral.base.errors import UsageError
from corral.base.record import nearest

ANSWER_TOKENS = 256  # of a completion, where nothing is said: the server's own default of 16 breaks off mid-sentence


class Sampling(TypedDict, total=False):
    """The parameters by name, for type checkers; None leaves one to the server."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    json_schema: Any
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    extra: Mapping[str, Any] | None  # fields that this table does not know, sent as they are


_NUMBERS: dict[str, Any] = {"int": (int,), "float": (int, float)}


@dataclass(frozen=True)
class Parameter:
    """One sampling parameter; bounds are inclusive unless `above` says that the lower one is not."""

    name: str
    kind: str  # int, float, text, texts, ints, flag, any
    help: str
    low: float | None = None
    high: float | None = None
    above: bool = False

    @property
    def range_text(self) -> str:
        """The range as people write it, or nothing."""
        if self.low is None and self.high is None:
            return ""
        if self.high is None:
            return f"above {self.low:.15g}" if self.above else f"{self.low:.15g} or more"
        return f"above {self.low:.15g}, to {self.high:.15g}" if self.above else f"{self.low:.15g} to {self.high:.15g}"

    def checked(self, value: Any) -> Any:
        """The value, if the server accepts it; otherwise an error that names the range."""
        if self.kind in _NUMBERS:
            if isinstance(value, _NUMBERS[self.kind]) and value is not True and value is not False:
                low, high = self._bounds
                if low <= value <= high:
                    return value
            raise self._wrong_number(value)
        if self.kind == "texts":
            return self._texts(value)
        if self.kind == "ints":
            if isinstance(value, Sequence) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
                return list(value)
            raise self._wrong(value, "a list of whole numbers")
        if self.kind == "flag" and not isinstance(value, bool):
            raise self._wrong(value, "true or false")
        if self.kind == "text" and not isinstance(value, str):
            raise self._wrong(value, "text")
        return value

    @cached_property
    def _bounds(self) -> tuple[float, float]:
        """The least and the greatest number that is taken; a float is finite."""
        infinite = math.inf if self.kind == "int" else sys.float_info.max
        low = -infinite if self.low is None else self.low
        return math.nextafter(low, math.inf) if self.above else low, infinite if self.high is None else self.high

    def _wrong_number(self, value: Any) -> UsageError:
        if isinstance(value, bool) or not isinstance(value, _NUMBERS[self.kind]):
            return self._wrong(value, "a whole number" if self.kind == "int" else "a number")
        if not math.isfinite(value):
            return self._wrong(value, "a finite number")
        return UsageError(f"{self.name} cannot be {value:.15g}.", f"Its range is {self.range_text}.")

    def _texts(self, value: Any) -> list[str]:
        found: list[Any] = (
            [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
        )
        if not all(isinstance(text, str) and text for text in found):
            raise self._wrong(value, "text, or a list of texts, none empty")
        return found

    def _wrong(self, value: Any, wanted: str) -> UsageError:
        return UsageError(f"{self.name} must be {wanted}, not {value!r}.", self.help)


_TABLE = (
    Parameter("max_tokens", "int", "Longest answer in tokens; to a plain prompt 256 where nothing is said.", 1),
    Parameter("min_tokens", "int", "No end of the answer before this many tokens.", 0),
    Parameter("temperature", "float", "Spread of the choice: 0 always takes the likeliest token.", 0, 2),
    Parameter("top_p", "float", "Choose among the likeliest tokens of this total probability.", 0, 1, True),
    Parameter("top_k", "int", "Choose among this many likeliest tokens; 0 or -1: all.", -1),
    Parameter("min_p", "float", "Drop tokens less likely than this share of the likeliest one.", 0, 1),
    Parameter("frequency_penalty", "float", "Lower a token for each time it was already generated.", -2, 2),
    Parameter("presence_penalty", "float", "Lower a token once it was generated at all.", -2, 2),
    Parameter(
        "repetition_penalty", "float", "Divide the score of tokens seen in prompt or answer; 1: off.", 0, None, True
    ),
    Parameter("seed", "int", "Makes sampling repeatable.", -(2**63), 2**63 - 1),
    Parameter("stop", "texts", "End the answer at this text; repeatable."),
    Parameter("n", "int", "Answers to one prompt.", 1, 16384),
    Parameter("logprobs", "int", "Log-probability of each token, and this many alternatives; -1: all.", -1),
    Parameter("prompt_logprobs", "int", "The same for each token of the prompt.", -1),
    Parameter("ignore_eos", "flag", "Go on past the model's own end."),
    Parameter("stop_token_ids", "ints", "End the answer at one of these token ids."),
    Parameter("bad_words", "texts", "Texts that must not be generated; repeatable."),
    Parameter("allowed_token_ids", "ints", "Generate only these token ids."),
    Parameter("include_stop_str_in_output", "flag", "Keep the stop text at the end of the answer."),
    Parameter("skip_special_tokens", "flag", "Leave special tokens out of the text."),
    Parameter("truncate_prompt_tokens", "int", "Keep only this many tokens of the prompt; -1: what fits.", -1),
)
PARAMETERS: dict[str, Parameter] = {parameter.name: parameter for parameter in _TABLE}

# Fields of a request that have no option of their own
_OTHERS = (
    Parameter("max_completion_tokens", "int", "Longest answer in tokens, as chat completions call it.", 1),
    Parameter("length_penalty", "float", "Of beam search: above 1 prefers longer answers."),
    Parameter("top_logprobs", "int", "Alternatives to each token, in chat completions.", -1),
    *(Parameter(name, "any", "") for name in ("logit_bias", "response_format", "structured_outputs",
                                              "chat_template_kwargs", "tools", "tool_choice")),
)  # fmt: skip
FIELDS: dict[str, Parameter] = PARAMETERS | {parameter.name: parameter for parameter in _OTHERS}
_OWN = ("stream", "stream_options", "prompt", "messages")  # what the request is made of
_SLIP = 0.85  # so much alike are a name and its misspelling: a letter dropped, added, changed or swapped

# option -> (field of structured_outputs, help): the answer's form is enforced by the server, token by token
STRUCTURED: dict[str, tuple[str, str]] = {
    "json_schema": ("json", "The answer is JSON of this schema."),
    "regex": ("regex", "The answer matches this regular expression."),
    "choice": ("choice", "The answer is one of these texts."),
    "grammar": ("grammar", "The answer follows this EBNF grammar."),
}


def request_fields(given: Mapping[str, Any], chat: bool = False) -> dict[str, Any]:
    """The fields of a request for these parameters, checked; None values are left out."""
    for name, value in given.items():
        if value is not None and name not in PARAMETERS and name not in STRUCTURED and name != "extra":
            known = nearest(name, [*PARAMETERS, *STRUCTURED], 1)
            hint = f"Did you mean {known[0]!r}? " if known else ""
            raise UsageError(f"there is no parameter {name!r}.", hint + "Others go through `extra`.")
    plain = {name: value for name, value in given.items() if name != "extra"}
    return body_fields({**plain, **(given.get("extra") or {})}, chat)


def with_length(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A completion's fields; one that says nothing of its length gets ANSWER_TOKENS, or as many as it must have."""
    return {"max_tokens": max(ANSWER_TOKENS, fields.get("min_tokens") or 0), **fields}


def body_fields(given: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """The same, where names that the table does not know are sent as they are."""
    fields: dict[str, Any] = {}
    structured: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in _OWN:
            raise UsageError(f"{name} is not a parameter: Corral sets it itself.", "Leave it out.")
        if name in STRUCTURED:
            structured[STRUCTURED[name][0]] = _form(name, value)
        else:
            fields[name] = value if chat and _is_whether(name, value) else _checked(name, value)
    if len(structured) > 1:
        raise UsageError(
            f"{len(structured)} forms of the answer were given: {', '.join(structured)}.", "Give one of them."
        )
    if structured:
        fields["structured_outputs"] = structured
    _check_lengths(fields)
    if chat and "logprobs" in fields and not isinstance(fields["logprobs"], bool):
        fields["top_logprobs"] = fields["logprobs"]  # chat completions say it with two fields
        fields["logprobs"] = True
    return fields


def check_fields(body: Mapping[str, Any], chat: bool) -> None:
    """Refuse a whole request that the server would refuse for its parameters."""
    for name, value in body.items():  # for every row of a batch, and twice
        known = FIELDS.get(name)
        if known is not None and value is not None and not (chat and _is_whether(name, value)):
            known.checked(value)
    _check_lengths(body)


@cache
def misspelt(name: str) -> str | None:
    """The sampling parameter that this is a misspelling of, if it is one."""
    if name in FIELDS or name in STRUCTURED:
        return None
    return next(iter(difflib.get_close_matches(name, PARAMETERS, 1, _SLIP)), None)


def _checked(name: str, value: Any) -> Any:
    return FIELDS[name].checked(value) if name in FIELDS else value


def _is_whether(name: str, value: Any) -> bool:
    """In chat completions `logprobs` says only whether there are any."""
    return name == "logprobs" and isinstance(value, bool)


def _check_lengths(fields: Mapping[str, Any]) -> None:
    low, high = fields.get("min_tokens"), fields.get("max_tokens")
    if low is not None and high is not None and low > high:
        raise UsageError(f"min_tokens ({low}) is more than max_tokens ({high}).", "Lower one or raise the other.")


def _form(name: str, value: Any) -> Any:
    if name == "choice":
        if isinstance(value, str) or not value or not all(isinstance(text, str) for text in value):
            raise UsageError(f"choice must be a list of strings, not {value!r}.", "Give at least two.")
        return list(value)
    if name == "json_schema":
        if hasattr(value, "model_json_schema"):  # a pydantic class
            return value.model_json_schema()
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise UsageError(f"json_schema is not JSON: {error}.", "Give a JSON object.") from None
        if not isinstance(value, Mapping):
            raise UsageError(f"json_schema must be a JSON object, not {value!r}.", "Give a JSON object.")
        return dict(value)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be text, not {value!r}.", STRUCTURED[name][1])
    return value


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """All `--param name=value`; names that the table does not know pass, unless they are one it knows, misspelt."""
    found = dict(map(parse_assignment, texts))
    for name in found.keys() - FIELDS.keys() - STRUCTURED.keys():
        if slips := difflib.get_close_matches(name, [*FIELDS, *STRUCTURED], 1, _SLIP):
            raise UsageError(f"there is no parameter {name!r}.", f"Did you mean {slips[0]!r}?")
    return found


def parse_assignment(text: str) -> tuple[str, Any]:
    """`name=value` of `--param`: the value is JSON where it is JSON, and text otherwise."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip().isidentifier():
        raise UsageError(f"--param {text!r} is not NAME=VALUE.", "For example --param length_penalty=1.2.")
    return name.strip(), parse_cell(name.strip(), value)


def parse_cell(name: str, text: str) -> Any:
    """A parameter's value from text: JSON where it is JSON, and the text itself otherwise."""
    kind = FIELDS[name].kind if name in FIELDS else ""
    if kind == "flag" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if kind == "texts" and not isinstance(value, (str, list)) else value

"""Likelihoods: rows to score, where a continuation begins in tokens, how long texts are cut, results. Pure.

Three kinds of rows:

    {"id", "text"}                      how likely is the text: perplexity
    {"id", "context", "continuation"}   how likely is the continuation after the context
    {"id", "context", "choices": […]}   which choice is likeliest after the context ("answer", an index or one of the
                                        choices, tells which is right)

The boundary is lm-evaluation-harness's: blanks at the end of the context belong to the continuation, and the
continuation's tokens are those of `context + continuation` behind as many as `context` alone has. Before
them come the context's own tokens, also where a token of the whole crosses the boundary.

Long texts are cut as its rolling windows are: disjoint in what they score, each with `overlap` tokens of context (the
last with as many as fit). A window holds at most the model's context minus one, because vLLM generates one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.base.errors import DataError, UsageError
from corral.base.record import nearest, to_json

BYTES_PER_LOGIT = 8  # float32 logits and their log-softmax, side by side, for every prompt token of a step
LARGEST_VOCABULARY = 128_256  # Llama 3; smaller ones take less
_FIELDS = ("id", "text", "context", "continuation", "choices", "answer")


@dataclass(frozen=True)
class ScoreOptions:
    """How to score. `prefix` comes before a text without context: `auto`, `bos`, `none`, or a token."""

    too_long: str = "refuse"  # or "window"
    window: int | None = None  # tokens; None: as many as the model takes
    overlap: int = 1
    prefix: str = "auto"
    special_tokens: bool = False  # whether the tokenizer adds its own (BOS) in front of contexts
    top: int = 0
    per_token: bool = False
    concurrency: int = 64
    memory_gib: float = 2.0  # what prompt log-probabilities may take on the server at once
    vocabulary: int = LARGEST_VOCABULARY

    def __post_init__(self) -> None:
        if self.too_long not in ("refuse", "window"):
            raise UsageError(f"too_long cannot be {self.too_long!r}.", "It is `refuse` or `window`.")
        if self.window is not None and self.window < 2:
            raise UsageError(f"window cannot be {self.window}.", "It holds 2 tokens or more.")
        if self.overlap < 1 or (self.window is not None and self.overlap >= self.window):
            raise UsageError(f"overlap cannot be {self.overlap}.", "It is 1 or more, and less than the window.")
        if not 0 <= self.top <= 1000 or self.concurrency < 1 or self.memory_gib <= 0 or self.vocabulary < 1:
            raise UsageError("top, concurrency, memory_gib or vocabulary is out of range.", "Give positive numbers.")

    @property
    def tokens_in_flight(self) -> int:
        """How many prompt tokens may be with the server at once, so that their logits fit into `memory_gib`."""
        return max(1, int(self.memory_gib * 2**30 / (BYTES_PER_LOGIT * self.vocabulary)))


@dataclass(frozen=True)
class ScoreRow:
    """One thing to score."""

    id: str
    text: str | None = None
    context: str = ""
    continuations: tuple[str, ...] = ()
    kind: str = "text"  # text, continuation, choices
    answer: int | None = None
    special: bool | None = (
        None  # whether the tokenizer adds its own tokens; None: not to texts, to contexts by option
    )


def read_row(data: Any, number: int) -> ScoreRow:
    """A row from JSON data; `number` is its line, and its id when it has none."""
    if not isinstance(data, Mapping):
        raise DataError(f"row {number} is not an object.", 'For example {"id": "1", "text": "…"}.')
    fields = {name: data[name] for name in _FIELDS if data.get(name) is not None}
    name = str(fields.get("id", number))
    if "text" in fields:
        if fields.get("context") or "continuation" in fields or "choices" in fields:
            raise DataError(
                f"row {name!r} has both `text` and `context` or `continuation`.", "Give one or the other."
            )
        return ScoreRow(name, _text(fields, "text", name))
    if "choices" in fields:
        choices = fields["choices"]
        if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
            raise DataError(f"row {name!r}: choices must be a list of strings.", 'For example ["Paris", "Rome"].')
        if not all(isinstance(choice, str) and choice for choice in choices):
            raise DataError(f"row {name!r}: a choice is empty or not text.", "Correct the row.")
        context = _text(fields, "context", name)
        return ScoreRow(name, None, context, tuple(choices), "choices", _answer(fields.get("answer"), choices, name))
    if "continuation" in fields:
        return ScoreRow(
            name, None, _text(fields, "context", name), (_text(fields, "continuation", name),), "continuation"
        )
    known = nearest(next(iter(set(data) - {"id"}), ""), _FIELDS, 1)
    hint = f" Did you mean {known[0]!r}?" if known else ""
    raise DataError(f"row {name!r} has neither text, continuation nor choices.", f"Correct the row.{hint}")


def _text(fields: Mapping[str, Any], name: str, row: str) -> str:
    value = fields.get(name, "" if name == "context" else None)
    if not isinstance(value, str) or (not value and name != "context"):
        raise DataError(f"row {row!r}: {name} must be non-empty text.", "Correct the row.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"row {row!r}: {name} contains a lone surrogate (half a character).", "Correct the row."
        ) from None
    return value


def _answer(value: Any, choices: Sequence[str], row: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    if isinstance(value, str) and value in choices:
        return list(choices).index(value)
    raise DataError(
        f"row {row!r}: the answer {value!r} is not among its {len(choices)} choices.",
        "Give an index, counted from 0, or one of the choices.",
    )


def split_pair(context: str, continuation: str) -> tuple[str, str]:
    """Context and continuation with the context's last blanks moved over, as lm-evaluation-harness does."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


@dataclass(frozen=True)
class Span:
    """One request: these tokens are sent, those from `first` on are scored; `start` is its place in the whole."""

    tokens: tuple[int, ...]
    first: int
    start: int = 0


def cut(tokens: Sequence[int], first: int, capacity: int, overlap: int = 1) -> list[Span]:
    """The spans that together score every token from `first` on once."""
    at, spans = max(first, 1), []
    while at < len(tokens):
        end = at + min(len(tokens) - at, capacity - min(overlap, at))
        start = max(0, end - capacity)
        spans.append(Span(tuple(tokens[start:end]), at - start, start))
        at = end
    return spans


@dataclass(frozen=True)
class TokenScore:
    """One scored token."""

    id: int
    text: str
    logprob: float
    rank: int | None
    top: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Likelihood:
    """How likely a stretch of tokens is."""

    sum_logprob: float
    mean_logprob: float
    tokens: int
    greedy: bool  # every token is the likeliest one at its place
    perplexity: float | None  # None where it is too large for a float
    windows: int = 1
    token_scores: tuple[TokenScore, ...] = ()


def total(scores: Sequence[TokenScore], windows: int, per_token: bool) -> Likelihood:
    """The sum over scored tokens."""
    if not scores:
        raise DataError("there is nothing to score: no token has a token before it.", "Set `prefix`, or a context.")
    whole = math.fsum(score.logprob for score in scores)
    mean = whole / len(scores)
    perplexity = math.exp(-mean) if mean > -700 else None
    greedy = all(score.rank == 1 for score in scores)
    return Likelihood(whole, mean, len(scores), greedy, perplexity, windows, tuple(scores) if per_token else ())


@dataclass(frozen=True)
class Score:
    """A row's result; of a multiple choice the sums are those of the chosen one, and `choices` has them all."""

    id: str
    kind: str
    sum_logprob: float
    mean_logprob: float
    tokens: int
    greedy: bool
    perplexity: float | None
    windows: int = 1
    chosen: int | None = None
    chosen_text: str | None = None
    chosen_norm: int | None = None  # by log-probability per character, lm-evaluation-harness's acc_norm
    correct: bool | None = None
    correct_norm: bool | None = None
    choices: tuple[Likelihood, ...] = ()
    token_scores: tuple[TokenScore, ...] = field(default=())

    @classmethod
    def of(cls, row: ScoreRow, likelihoods: Sequence[Likelihood]) -> Score:
        """The result of a row from the likelihoods of its continuations."""
        best = max(range(len(likelihoods)), key=lambda i: likelihoods[i].sum_logprob)
        chosen = likelihoods[best]
        sums = (chosen.sum_logprob, chosen.mean_logprob, chosen.tokens, chosen.greedy, chosen.perplexity)
        if row.kind != "choices":
            return cls(row.id, row.kind, *sums, chosen.windows, token_scores=chosen.token_scores)
        norm = max(range(len(likelihoods)), key=lambda i: likelihoods[i].sum_logprob / len(row.continuations[i]))
        right = None if row.answer is None else best == row.answer
        right_norm = None if row.answer is None else norm == row.answer
        return cls(
            row.id, row.kind, *sums, chosen.windows, best, row.continuations[best], norm, right, right_norm,
            tuple(likelihoods),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The result as written to disk: fields that do not apply are left out."""
        body: dict[str, Any] = to_json(self)
        if self.kind != "choices":
            for name in ("chosen", "chosen_text", "chosen_norm", "correct", "correct_norm", "choices"):
                del body[name]
        else:
            del body["token_scores"]
            for choice in body["choices"]:
                if not choice["token_scores"]:
                    del choice["token_scores"]
        if not body.get("token_scores", True):
            del body["token_scores"]
        return body

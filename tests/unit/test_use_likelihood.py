"""Rows, boundaries, windows, sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.base.errors import DataError, UsageError
from corral.use.score.likelihood import Score, ScoreOptions, ScoreRow, TokenScore, cut, read_row, split_pair, total


def lm_eval_windows(tokens: list[int], prefix: int, max_seq_len: int) -> list[tuple[list[int], list[int]]]:
    """lm-evaluation-harness's `get_rolling_token_windows` with context_len=1: inputs and what they predict."""
    found: list[tuple[list[int], list[int]]] = []
    if not tokens:
        return found
    first = min(max_seq_len, len(tokens))
    found.append(([prefix, *tokens[: first - 1]], tokens[:first]))
    predicted = first
    while predicted < len(tokens):
        count = min(len(tokens) - predicted, max_seq_len)
        end = predicted + count
        found.append((tokens[end - max_seq_len - 1 : end - 1], tokens[end - count : end]))
        predicted = end
    return found


@given(st.integers(1, 60), st.integers(2, 20))
def test_windows_are_those_of_lm_eval(length: int, capacity: int) -> None:
    tokens = list(range(100, 100 + length))
    spans = cut([7, *tokens], 1, capacity, 1)
    theirs = lm_eval_windows(tokens, 7, capacity - 1)
    ours = [(list(span.tokens[:-1]), list(span.tokens[span.first :])) for span in spans]
    assert [scored for _, scored in ours] == [scored for _, scored in theirs]
    for (mine, scored), (other, _) in zip(ours, theirs, strict=True):
        # the last may have more room than theirs gives the first one; what is before the scored tokens is the same
        assert mine[-len(scored) :] == other[-len(scored) :]


@given(st.integers(2, 80), st.data())
def test_every_token_is_scored_once_with_context(length: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, length - 1))
    capacity = data.draw(st.integers(2, 30))
    overlap = data.draw(st.integers(1, capacity - 1))
    spans = cut(range(length), first, capacity, overlap)
    scored = [token for span in spans for token in span.tokens[span.first :]]
    assert scored == list(range(max(first, 1), length))
    for span in spans:
        assert len(span.tokens) <= capacity
        assert span.first >= 1
        assert span.tokens[0] == span.start
        assert span.first >= min(overlap, span.start + span.first)


def test_a_long_context_loses_its_beginning() -> None:
    (span,) = cut(range(100), 95, 20)
    assert span.tokens == tuple(range(80, 100))
    assert span.first == 15


@pytest.mark.parametrize(
    ("context", "continuation", "wanted"),
    [
        ("Paris is", " big", ("Paris is", " big")),
        ("Paris is ", "big", ("Paris is", " big")),
        ("Paris is \n", "big", ("Paris is", " \nbig")),
        ("", "big", ("", "big")),
        ("   ", "big", ("", "   big")),
    ],
)
def test_blanks_move_to_the_continuation(context: str, continuation: str, wanted: tuple[str, str]) -> None:
    assert split_pair(context, continuation) == wanted


def test_rows() -> None:
    assert read_row({"text": "a"}, 3) == ScoreRow("3", "a")
    assert read_row({"id": 5, "context": "a", "continuation": "b"}, 1).continuations == ("b",)
    row = read_row({"context": "a", "choices": ["x", "y"], "answer": "y", "topic": "kept out"}, 1)
    assert (row.kind, row.answer) == ("choices", 1)
    assert read_row({"text": None, "continuation": "b"}, 1).context == ""


@pytest.mark.parametrize(
    "bad",
    [
        [], "text", {}, {"txt": "a"}, {"text": ""}, {"text": 5}, {"text": "a", "context": "b"}, {"context": "a"},
        {"context": "a", "choices": []}, {"context": "a", "choices": "ab"}, {"context": "a", "choices": ["", "b"]},
        {"context": "a", "choices": ["b"], "answer": 1}, {"context": "a", "choices": ["b"], "answer": "c"},
        {"context": "a", "choices": ["b"], "answer": True}, {"text": "\ud800"}, {"context": 5, "continuation": "b"},
    ],
)  # fmt: skip
def test_bad_rows(bad: Any) -> None:
    with pytest.raises(DataError) as caught:
        read_row(bad, 9)
    assert "9" in caught.value.message
    assert caught.value.remedy


def scored(*values: float, rank: int = 1) -> list[TokenScore]:
    return [TokenScore(1, "a", value, rank) for value in values]


def test_totals() -> None:
    found = total(scored(-1.0, -3.0), 1, False)
    assert (found.sum_logprob, found.mean_logprob, found.tokens, found.greedy) == (-4.0, -2.0, 2, True)
    assert found.perplexity == pytest.approx(math.exp(2))
    assert not total(scored(-1.0, rank=2), 1, False).greedy
    assert total(scored(-9999.0), 1, False).perplexity is None
    with pytest.raises(DataError):
        total([], 1, False)


def test_choices_by_sum_and_by_length() -> None:
    row = read_row({"id": "q", "context": "c", "choices": [" yes", " certainly not"], "answer": 1}, 1)
    score = Score.of(row, [total(scored(-2.0), 1, False), total(scored(-1.0, -2.0), 1, False)])
    assert (score.chosen, score.chosen_text, score.correct) == (0, " yes", False)
    assert (score.chosen_norm, score.correct_norm) == (1, True)
    assert score.sum_logprob == -2.0
    body = score.to_json()
    assert [choice["sum_logprob"] for choice in body["choices"]] == [-2.0, -3.0]
    assert "token_scores" not in body
    plain = Score.of(ScoreRow("t", "text"), [total(scored(-2.0), 1, True)]).to_json()
    assert "choices" not in plain
    assert plain["token_scores"][0]["logprob"] == -2.0


def test_memory_bounds_what_is_in_flight() -> None:
    assert ScoreOptions().tokens_in_flight == 2092  # 2 GiB of 8-byte logits over Llama 3's vocabulary
    assert ScoreOptions(vocabulary=49152).tokens_in_flight > 5000
    for bad in ({"too_long": "x"}, {"window": 1}, {"overlap": 0}, {"window": 4, "overlap": 4}, {"memory_gib": 0}):
        with pytest.raises(UsageError):
            ScoreOptions(**bad)

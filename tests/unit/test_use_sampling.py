"""Sampling parameters: the table, the ranges, structured answers."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from corral.base.errors import UsageError
from corral.client.sampling import (
    PARAMETERS,
    STRUCTURED,
    Sampling,
    parse_assignment,
    parse_assignments,
    request_fields,
)


def test_the_types_name_every_parameter() -> None:
    assert set(typing.get_type_hints(Sampling)) == {*PARAMETERS, *STRUCTURED, "extra"}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", [1, 100000], [0, -1, 1.5, "7", True]),
        ("min_tokens", [0, 5], [-1]),
        ("temperature", [0, 0.5, 2], [-0.1, 2.1, float("nan"), float("inf"), "1"]),
        ("top_p", [0.01, 1], [0, 1.01]),
        ("top_k", [-1, 0, 50], [-2, 1.0]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 5], [0, -1]),
        ("seed", [0, -(2**63), 2**63 - 1], [2**63]),
        ("stop", ["a", ["a", "b"]], ["", [""], [1], 5]),
        ("n", [1, 16384], [0]),
        ("logprobs", [-1, 0, 20], [-2]),
        ("prompt_logprobs", [-1, 0, 20], [-2, True]),
        ("ignore_eos", [True, False], [1]),
        ("stop_token_ids", [[1, 2]], [["a"], [True]]),
    ],
)
def test_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert name in request_fields({name: value})
    for value in bad:
        with pytest.raises(UsageError) as caught:
            request_fields({name: value})
        assert name in caught.value.message
        assert caught.value.remedy


def test_a_range_is_told() -> None:
    with pytest.raises(UsageError) as caught:
        request_fields({"temperature": 3})
    assert "0 to 2" in caught.value.remedy


def test_misspelt_names_are_errors_and_extra_passes() -> None:
    with pytest.raises(UsageError) as caught:
        request_fields({"max_token": 7})
    assert "max_tokens" in caught.value.remedy
    assert request_fields({"extra": {"length_penalty": 1.2}}) == {"length_penalty": 1.2}
    with pytest.raises(UsageError):
        request_fields({"extra": {"temperature": 9}})


def test_none_leaves_it_to_the_server() -> None:
    assert request_fields({"temperature": None, "regex": None, "extra": None}) == {}


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(UsageError, match="min_tokens"):
        request_fields({"min_tokens": 9, "max_tokens": 8})


def test_chat_says_logprobs_with_two_fields() -> None:
    assert request_fields({"logprobs": 3}, chat=True) == {"logprobs": True, "top_logprobs": 3}
    assert request_fields({"logprobs": 3}) == {"logprobs": 3}


def test_structured_answers() -> None:
    schema = {"type": "object"}
    assert request_fields({"json_schema": schema}) == {"structured_outputs": {"json": schema}}
    assert request_fields({"json_schema": '{"type": "object"}'}) == {"structured_outputs": {"json": schema}}
    assert request_fields({"regex": "a+"}) == {"structured_outputs": {"regex": "a+"}}
    assert request_fields({"choice": ["a", "b"]}) == {"structured_outputs": {"choice": ["a", "b"]}}
    for bad in ({"regex": "a", "choice": ["b"]}, {"choice": "ab"}, {"json_schema": "{"}, {"json_schema": "[]"}):
        with pytest.raises(UsageError):
            request_fields(bad)


def test_a_pydantic_class_is_a_schema() -> None:
    class Answer:
        @staticmethod
        def model_json_schema() -> dict[str, str]:
            return {"title": "Answer"}

    assert request_fields({"json_schema": Answer}) == {"structured_outputs": {"json": {"title": "Answer"}}}


def test_assignments() -> None:
    assert parse_assignment("a=1") == ("a", 1)
    assert parse_assignment('a={"b": [true]}') == ("a", {"b": [True]})
    assert parse_assignment("a=x=y") == ("a", "x=y")
    for bad in ("a", "=1", "a b=1"):
        with pytest.raises(UsageError):
            parse_assignment(bad)
    assert parse_assignments(["top_k=20", 'stop=["a"]', "note=x"]) == {"top_k": 20, "stop": ["a"], "note": "x"}
    with pytest.raises(UsageError) as raised:
        parse_assignments(["temperatur=1"])
    assert "temperature" in raised.value.remedy

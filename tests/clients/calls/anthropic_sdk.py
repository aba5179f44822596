"""Anthropic's SDK: messages, streams, tools, counts, and its names for errors."""

from __future__ import annotations

import os
from typing import Any

import anthropic

MODEL = os.environ["MODEL"]
client = anthropic.Anthropic(max_retries=0)
ASKED: Any = {
    "model": MODEL,
    "max_tokens": 8,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
NUMBER = {"type": "integer", "maximum": 99}
SHAPE = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "add", "strict": True, "input_schema": SHAPE}]


def call_message() -> None:
    answer = client.messages.create(**ASKED, system="Answer in one sentence.")
    assert answer.content[0].type == "text"
    assert answer.usage.output_tokens <= 8


def call_stream() -> None:
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        assert text
        assert stream.get_final_message().usage.output_tokens <= 8


def call_tools() -> None:
    asked = {**ASKED, "max_tokens": 80, "tools": TOOLS, "messages": [{"role": "user", "content": "Add 2 and 3."}]}
    (made,) = [part for part in client.messages.create(**asked, tool_choice={"type": "any"}).content
               if part.type == "tool_use"][:1]  # fmt: skip
    assert set(made.input) == {"a", "b"}
    named = client.messages.create(**asked, tool_choice={"type": "tool", "name": "add"})
    assert "add" in [part.name for part in named.content if part.type == "tool_use"]
    assert client.messages.create(**{**asked, "max_tokens": 8}, tool_choice={"type": "auto"}).stop_reason


def call_count_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=ASKED["messages"]).input_tokens > 5


def call_wrong_key() -> None:
    with anthropic.Anthropic(api_key="wrong", max_retries=0) as stranger:
        try:
            stranger.messages.create(**ASKED)
        except anthropic.AuthenticationError:
            return
    raise AssertionError("a wrong key was taken")


def call_too_long() -> None:
    try:
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "word " * 20_000}]})
    except anthropic.BadRequestError:
        return
    raise AssertionError("a prompt that is too long was taken")

"""LiteLLM as a library."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import litellm

litellm.telemetry = False
ASKED: Any = {
    "model": f"openai/{os.environ['MODEL']}", "temperature": 0, "max_tokens": 8, "num_retries": 0,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}  # fmt: skip
NUMBER = {"type": "integer", "maximum": 99}
SHAPE = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": SHAPE}}]


def refused(kind: type[Exception], **more: Any) -> None:
    try:
        litellm.completion(**{**ASKED, **more})
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def call_completion() -> None:
    assert "Paris" in litellm.completion(**ASKED).choices[0].message.content
    assert "Paris" in asyncio.run(litellm.acompletion(**ASKED)).choices[0].message.content


def call_stream() -> None:
    parts = litellm.completion(**ASKED, stream=True)
    assert "Paris" in "".join(part.choices[0].delta.content or "" for part in parts)


def call_tools() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    answer = litellm.completion(**{**ASKED, "max_tokens": 60}, tools=TOOLS, tool_choice=named)
    (made,) = answer.choices[0].message.tool_calls
    assert set(json.loads(made.function.arguments)) == {"a", "b"}


def call_wrong_key() -> None:
    refused(litellm.AuthenticationError, api_key="wrong")


def call_too_long() -> None:
    refused(litellm.BadRequestError, messages=[{"role": "user", "content": "word " * 20_000}])


def call_text_completion() -> None:
    model = f"text-completion-openai/{os.environ['MODEL']}"
    assert litellm.text_completion(model=model, prompt="The capital of France is", max_tokens=4).choices[0].text

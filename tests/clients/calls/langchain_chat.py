"""LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio
import os

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

ASKED = "What is the capital of France?"
NUMBER = {"type": "integer", "maximum": 99}
SUM = {"title": "sum", "type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"],
       "additionalProperties": False}  # fmt: skip


def chat(tokens: int = 8) -> ChatOpenAI:
    return ChatOpenAI(model=os.environ["MODEL"], temperature=0, max_completion_tokens=tokens, max_retries=0)


@tool  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def call_invoke() -> None:
    answer = chat().invoke(ASKED)
    assert "Paris" in answer.text
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] <= 8


def call_stream() -> None:
    assert "Paris" in "".join(part.text for part in chat().stream(ASKED))


def call_batch_async() -> None:
    assert all("Paris" in answer.text for answer in asyncio.run(chat().abatch([ASKED, ASKED])))


def call_structured_output() -> None:
    found = chat(60).with_structured_output(SUM, method="json_schema", strict=True).invoke("Add 2 and 3.")
    assert set(found) == {"a", "b"}


def call_tools() -> None:
    for choice in ("any", "add"):
        made = chat(60).bind_tools([add], tool_choice=choice, strict=True).invoke("Add 2 and 3.").tool_calls
        assert made[0]["name"] == "add"
        assert set(made[0]["args"]) == {"a", "b"}
    assert chat().bind_tools([add]).invoke("Add 2 and 3.").response_metadata["finish_reason"]


def call_wrong_key() -> None:
    try:
        ChatOpenAI(model=os.environ["MODEL"], api_key="wrong", max_retries=0).invoke("a")
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key was taken")

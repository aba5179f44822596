"""LlamaIndex's OpenAILike."""

from __future__ import annotations

import os

import openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

ASKED = [ChatMessage(role="user", content="What is the capital of France?")]


def model(key: str = "") -> OpenAILike:
    found = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": key or os.environ["OPENAI_API_KEY"]}
    return OpenAILike(
        model=os.environ["MODEL"], is_chat_model=True, max_tokens=8, temperature=0, max_retries=0, **found
    )


def call_chat() -> None:
    assert "Paris" in model().chat(ASKED).message.content


def call_stream() -> None:
    assert "Paris" in "".join(part.delta or "" for part in model().stream_chat(ASKED))


def call_complete() -> None:
    plain = model()
    plain.is_chat_model = False
    assert plain.complete("The capital of France is").text


def call_wrong_key() -> None:
    try:
        model("wrong").chat(ASKED)
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key was taken")

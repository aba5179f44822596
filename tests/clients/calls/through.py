"""The openai SDK at whatever answers OpenAI's paths in front of the model."""

from __future__ import annotations

import os
from typing import Any

import openai

client = openai.OpenAI(max_retries=0)
ASKED: Any = {
    "model": os.environ["MODEL"], "max_tokens": 8, "temperature": 0,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}  # fmt: skip


def call_chat() -> None:
    assert "Paris" in (client.chat.completions.create(**ASKED).choices[0].message.content or "")


def call_stream() -> None:
    parts = client.chat.completions.create(**ASKED, stream=True)
    assert "Paris" in "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def call_models() -> None:
    assert os.environ["MODEL"] in [model.id for model in client.models.list()]

"""Runs inside an engine's environment: counts the tokens of prompts as the server will.

    python count_tokens.py MODEL_FOLDER < questions

A line of the input is `{"prompt": …}` or `{"messages": …}`, a line of the output a number; 0 where it is unknown.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def count(tokenizer: Any, question: dict[str, Any]) -> int:
    if "messages" in question:
        text = tokenizer.apply_chat_template(question["messages"], tokenize=False, add_generation_prompt=True)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])
    prompt = question["prompt"]
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    return len(prompt) if all(isinstance(token, int) for token in prompt) else 0


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(sys.argv[1])
    for line in sys.stdin:
        try:
            tokens = count(tokenizer, json.loads(line))
        except Exception:  # a template that refuses these messages: the server will say so
            tokens = 0
        sys.stdout.write(f"{tokens}\n")


if __name__ == "__main__":
    main()

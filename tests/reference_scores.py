"""Log-probabilities by transformers' own logits. Runs in an engine's environment: `python this MODEL DTYPE < rows`.

The boundary is lm-evaluation-harness's `_encode_pair`, written down here a second time on purpose.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    spaces = len(context) - len(context.rstrip())
    if spaces > 0:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    before = tokenizer.encode(context, add_special_tokens=False)
    return before, whole[len(before) :]


def main() -> None:
    path, dtype = sys.argv[1:3]
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    for line in sys.stdin:
        row = json.loads(line)
        before, after = encode_pair(tokenizer, row["context"], row["continuation"])
        if not before:  # the first token has nothing before it
            before, after = after[:1], after[1:]
        with torch.no_grad():
            logits = model(torch.tensor([before + after])).logits[0].float()
        logprobs = torch.log_softmax(logits, -1)
        places = range(len(before) - 1, len(before) + len(after) - 1)
        values = [logprobs[at, token].item() for at, token in zip(places, after, strict=True)]
        greedy = [int(logits[at].argmax()) == token for at, token in zip(places, after, strict=True)]
        print(json.dumps({"id": row["id"], "tokens": after, "logprobs": values, "greedy": all(greedy)}))


main()

"""What is sent: prompts from a seed or a file, as `Prompt` values that become request bodies.

A new dataset is one function and one row of `LOADERS`. Files are read whole before anything is sent, and a line that
cannot be used is named by its number. Formats are those of `vllm bench serve`: ShareGPT JSON, custom JSONL with
`prompt` and `output_tokens`; further the batch file of `corral batch`, and traces with `timestamp` (ms),
`input_length` and `output_length`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from corral.bench.spec import Workload
from corral.bench.vocabulary import Vocabulary
from corral.errors import DataError

__all__ = ["Prompt", "body_of", "load_prompts", "path_of"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to make; with `turns`, the user's later words in the same conversation."""

    content: str | list[int] | list[dict[str, Any]]  # text, token ids, or chat messages
    input_tokens: int | None
    output_tokens: int
    at_s: float | None = None
    turns: tuple[str, ...] = ()
    body: dict[str, Any] | None = None  # a batch file's own body


def path_of(prompt: Prompt, workload: Workload) -> str:
    if prompt.body is not None:
        return CHAT if "messages" in prompt.body else COMPLETIONS
    return CHAT if workload.chat or workload.dataset == "multi_turn" or _is_chat(prompt.content) else COMPLETIONS


def _is_chat(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and isinstance(content[0], dict)


def body_of(
    prompt: Prompt, workload: Workload, model: str, number: int, history: list[dict[str, Any]] | None = None
) -> bytes:
    """The request's JSON; `history` replaces the content for later turns of a conversation."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if prompt.body is not None:
        return _encode({**prompt.body, **body})
    if path_of(prompt, workload) == CHAT:
        body["messages"] = history or (
            prompt.content if _is_chat(prompt.content) else [{"role": "user", "content": prompt.content}]
        )
        body["max_completion_tokens"] = prompt.output_tokens
    else:
        body |= {"prompt": prompt.content, "max_tokens": prompt.output_tokens}
    body |= {"temperature": workload.temperature, "seed": (workload.seed * 1_000_003 + number) % 2**31}
    if workload.ignore_eos:
        body["ignore_eos"] = True
    return _encode(body)


def load_prompts(workload: Workload, vocabulary: Vocabulary | None) -> list[Prompt]:
    """All prompts of a run, in the order of sending."""
    prompts = LOADERS[workload.dataset](workload, vocabulary or Vocabulary(("word",), exact=False))
    if not prompts:
        raise DataError(f"{workload.file} holds no request.", "Give a file with at least one line.")
    return prompts


def _dice(workload: Workload) -> random.Random:
    return random.Random(workload.seed)  # noqa: S311 - not for secrets


def _around(length: int, ratio: float, dice: random.Random) -> int:
    return length if not ratio else max(1, dice.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))


def _random(workload: Workload, words: Vocabulary) -> list[Prompt]:
    dice, prompts = _dice(workload), []
    for _ in range(workload.num_prompts):
        length = _around(workload.input_len, workload.range_ratio, dice)
        output = _around(workload.output_len, workload.range_ratio, dice)
        prompts.append(Prompt(words.draw(length, dice), length if words.exact else None, output))
    return prompts


def _prefix_repetition(workload: Workload, words: Vocabulary) -> list[Prompt]:
    dice = _dice(workload)
    prefixes = [words.draw(workload.prefix_len + words.added, dice) for _ in range(workload.num_prefixes)]
    prompts = []
    for n in range(workload.num_prompts):
        prefix, rest = prefixes[n % len(prefixes)], words.draw(workload.input_len + words.added, dice)
        content: Any = [*prefix, *rest] if isinstance(prefix, list) else f"{prefix} {rest}"
        length = workload.prefix_len + workload.input_len + (0 if words.ids else words.added)
        prompts.append(Prompt(content, length if words.exact else None, workload.output_len))
    return prompts


def _multi_turn(workload: Workload, words: Vocabulary) -> list[Prompt]:
    """Conversations; `num_prompts` counts them, each with `turns` requests that carry all that was said before."""
    dice = _dice(workload)
    plain = Vocabulary(words.words, words.added)

    def said() -> str:
        return str(plain.draw(workload.input_len + words.added, dice))

    return [
        Prompt(said(), None, workload.output_len, turns=tuple(said() for _ in range(workload.turns - 1)))
        for _ in range(workload.num_prompts)
    ]


def _lines(workload: Workload) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; blank lines are skipped."""
    path = Path(str(workload.file)).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Check --dataset-path.") from error
    except UnicodeDecodeError as error:
        at = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"line {at} of {path} is not UTF-8 text.", "Save the file as UTF-8.") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"line {number} of {path} is not JSON: {error}.", "Correct the line.") from error
        if not isinstance(value, dict):
            raise DataError(f"line {number} of {path} is not a JSON object.", "Correct the line.")
        yield number, value


def _field(workload: Workload, number: int, value: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value.get(name), kind) or isinstance(value.get(name), bool):
        raise DataError(f'line {number} of {workload.file} has no usable "{name}".', "Correct the line.")
    return value[name]


def _custom(workload: Workload, _: Vocabulary) -> list[Prompt]:
    prompts = []
    for number, value in _lines(workload):
        content = _field(workload, number, value, "prompt", (str, list))
        output = workload.output_len
        if value.get("output_tokens") is not None:
            output = int(_field(workload, number, value, "output_tokens", (int, float)))
        stamp = value.get("timestamp")
        prompts.append(Prompt(content, None, max(1, output), float(stamp) if stamp is not None else None))
        if len(prompts) == workload.num_prompts:
            break
    return prompts


def _trace(workload: Workload, words: Vocabulary) -> list[Prompt]:
    dice, prompts = _dice(workload), []
    for number, value in _lines(workload):
        stamp = _field(workload, number, value, "timestamp", (int, float)) / 1000
        length = _field(workload, number, value, "input_length", int)
        output = _field(workload, number, value, "output_length", int)
        prompts.append(Prompt(words.draw(length, dice), length if words.exact else None, max(1, output), stamp))
        if len(prompts) == workload.num_prompts:
            break
    return prompts


def _batch(workload: Workload, _: Vocabulary) -> list[Prompt]:
    prompts = []
    for number, value in _lines(workload):
        body = _field(workload, number, value, "body", dict)
        if not ("messages" in body or "prompt" in body):
            raise DataError(f"line {number} of {workload.file} asks for no completion.", "Leave such lines out.")
        output = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        prompts.append(Prompt("", None, int(output), body={k: v for k, v in body.items() if k != "model"}))
        if len(prompts) == workload.num_prompts:
            break
    return prompts


def _sharegpt(workload: Workload, _: Vocabulary) -> list[Prompt]:
    """First turns of two-turn conversations, shuffled by the seed; answers of `output_len` tokens."""
    path = Path(str(workload.file)).expanduser()
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
        talks = [talk["conversations"] for talk in data if len(talk["conversations"]) >= 2]
        texts = [str(talk[0]["value"]) for talk in talks]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Check --dataset-path.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a ShareGPT file: {error}.", "Give a list of conversations as JSON."
        ) from error
    _dice(workload).shuffle(texts)
    return [Prompt(text, None, workload.output_len) for text in texts[: workload.num_prompts]]


LOADERS: dict[str, Callable[[Workload, Vocabulary], list[Prompt]]] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "multi_turn": _multi_turn,
    "custom": _custom,
    "sharegpt": _sharegpt,
    "batch": _batch,
    "trace": _trace,
}

"""What is sent: prompts from a seed or a file, as `Prompt` values that become request bodies.

A new dataset is one function and one row of `LOADERS`. Files are read whole before anything is sent, and a line that
cannot be used is named by its number. Formats are those of `vllm bench serve`: ShareGPT JSON, custom JSONL with
`prompt` and `output_tokens`; also the rows of `corral batch` (JSONL), and traces (`corral.client.trace`).

Random prompts have an exact number of tokens. Most tokenizers split text at spaces first, so a text of n words that
are one token each has n tokens (and the fixed few that the server adds). Each word is checked with `/tokenize`, and
so is one whole prompt. For other tokenizers prompts are lists of token ids that it has returned; where there is no
`/tokenize`, they are words, and `exact` is False.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from corral.base.errors import DataError
from corral.base.files import existing_file
from corral.client.client import Client
from corral.client.errors import RequestError
from corral.client.pooling import CLASSIFY, EMBEDDINGS, RERANK
from corral.client.trace import read_trace
from corral.lab.bench.spec import Workload

WORDS = tuple(
    """a about act add age ago air all also an and any arm art as ask at away bad bag ball bank bar base bed best big
    bit book both box boy but buy by call can car care case cat city cost cup cut dark day deep did die dog door down
    draw dry due each ear east easy eat edge egg end even eye face fact fall far fast feel few fig file fill film find
    fine fire fish fit five flat fly food foot for form four free from full game gas get girl give go goal gold good
    gun hair half hall hand hard has hat have he head hear heat her here high him his hit hold home hot hour how huge
    ice idea if in into iron it its job join jump just keep key kid kind king know lack land last late law lay lead
    leg less let lie life line list live long look lose lot love low main make man many map mark may me mean meet men
    mile mind miss month more most move much must my name near need net new news next night no nor north not note now
    of off oil old on once one only open or our out over own page pair part pass past pay per pick plan play poor
    port post pull push put race rain rate raw read real red rest rich ride right ring rise road rock role roof room
    row rule run sad safe salt same sat save sea seat see sell send set seven shall she ship shop short show shut
    side sign sing sir sit six size skin sky slow small snow so soft soil sold some son song soon sort south star
    stay step still stop sun sure table take talk tax team tell ten test than that the them then they thin this tie
    time tiny to top town tree trip true try turn two type under unit until up us use very view wait wall want war
    warm was wash way we wear week well west wet what when who why wide wife will wind win wine wish with wood word
    work yard year yes yet you young""".split()  # noqa: SIM905 - a page of quotes helps nobody
)
_ANCHOR = "the"


@dataclass(frozen=True)
class Vocabulary:
    """The words or token ids that random prompts are made of."""

    words: tuple[str, ...]
    added: int = 0  # tokens that the server adds to a text
    ids: tuple[int, ...] = ()  # used instead of words when not empty
    exact: bool = True
    note: str = ""

    def draw(self, count: int, dice: random.Random) -> str | list[int]:
        """A prompt of `count` tokens, counted as the server counts them."""
        if self.ids:
            return dice.choices(self.ids, k=count)
        return " ".join(dice.choices(self.words, k=max(1, count - self.added)))


async def _count(client: Client, text: str) -> tuple[int, list[int]]:
    page = await client.page("/tokenize", {"model": client.endpoint.model, "prompt": text}, timeout_s=30)
    if page.status != 200:
        raise LookupError(page.status)
    body = page.json()
    return int(body["count"]), list(body["tokens"])


async def learn_vocabulary(client: Client, candidates: tuple[str, ...] = WORDS) -> Vocabulary:
    """Ask the server which words are one token."""
    try:
        alone, _ = await _count(client, _ANCHOR)
        pairs = await asyncio.gather(*(_count(client, f"{_ANCHOR} {word}") for word in candidates))
        starts = await asyncio.gather(*(_count(client, word) for word in candidates))
        single = tuple(
            word
            for word, (pair, _), (start, _) in zip(candidates, pairs, starts, strict=True)
            if pair == alone + 1 and start == alone
        )
        added = alone - 1
        if len(single) >= 64:
            text = " ".join(random.Random(1).choices(single, k=200))  # noqa: S311
            if (await _count(client, text))[0] == 200 + added:
                return Vocabulary(single, added)
        seen = sorted({token for _, tokens in pairs for token in tokens[added:]})
    except (LookupError, RequestError, ValueError, KeyError, TypeError):
        note = "the server has no /tokenize: prompts are words, and their token counts are the server's own"
        return Vocabulary(candidates, exact=False, note=note)
    note = "the tokenizer does not split at words: prompts are token ids"
    return Vocabulary(candidates, ids=tuple(seen), note=note)


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send; `turns` are the user's later messages in the same conversation."""

    content: str | list[int] | list[dict[str, Any]]  # text, token ids, or chat messages
    input_tokens: int | None
    output_tokens: int
    at_s: float | None = None
    turns: tuple[str, ...] = ()
    body: dict[str, Any] | None = None  # a batch file's own body


def path_of(prompt: Prompt, workload: Workload) -> str:
    if not workload.writes:
        return _PATHS[workload.task]
    if prompt.body is not None:
        return CHAT if "messages" in prompt.body else COMPLETIONS
    return CHAT if workload.chat or workload.dataset == "multi_turn" or _is_chat(prompt.content) else COMPLETIONS


def _is_chat(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and isinstance(content[0], dict)


def body_of(
    prompt: Prompt, workload: Workload, model: str, number: int, history: list[dict[str, Any]] | None = None
) -> bytes:
    """The request's JSON; `history` replaces the content for later turns of a conversation."""
    if not workload.writes:
        return _encode({"model": model, **_pooled(prompt.content, workload.task)})
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


_PATHS = {"embed": EMBEDDINGS, "rerank": RERANK, "classify": CLASSIFY}


def _pooled(content: Any, task: str) -> dict[str, Any]:
    """The fields of a request whose answer has no tokens; what is ranked is half query, half document."""
    if task != "rerank":
        return {**({"encoding_format": "float"} if task == "embed" else {}), "input": content}
    words = str(content).split()
    half = max(1, len(words) // 2)
    return {"query": " ".join(words[:half]), "documents": [" ".join(words[half:]) or words[0]]}


def load_prompts(workload: Workload, vocabulary: Vocabulary | None) -> list[Prompt]:
    """All prompts of a run, in the order of sending."""
    prompts = LOADERS[workload.dataset](workload, vocabulary or Vocabulary(("word",), exact=False))
    if not prompts:
        raise DataError(f"{workload.file} contains no requests.", "Give a file with at least one line.")
    return prompts


def _dice(workload: Workload) -> random.Random:
    return random.Random(workload.seed)  # noqa: S311 - not for secrets


def varied(length: int, ratio: float, dice: random.Random) -> int:
    """A length that differs by at most ± a share."""
    return length if not ratio else max(1, dice.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))


def _random(workload: Workload, words: Vocabulary) -> list[Prompt]:
    dice, prompts = _dice(workload), []
    for _ in range(workload.num_prompts):
        length = varied(workload.input_len, workload.range_ratio, dice)
        output = varied(workload.output_len, workload.range_ratio, dice)
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
    """Conversations; `num_prompts` counts them, each with `turns` requests that carry all earlier messages."""
    dice = _dice(workload)
    plain = Vocabulary(words.words, words.added)

    def message() -> str:
        return str(plain.draw(workload.input_len + words.added, dice))

    return [
        Prompt(message(), None, workload.output_len, turns=tuple(message() for _ in range(workload.turns - 1)))
        for _ in range(workload.num_prompts)
    ]


def _texts(workload: Workload) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers; blank ones are skipped."""
    path = existing_file(str(workload.file))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Check its permissions.") from error
    except UnicodeDecodeError as error:
        at = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"line {at} of {path} is not UTF-8 text.", "Save the file as UTF-8.") from error
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _lines(workload: Workload) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers."""
    for number, line in _texts(workload):
        where = f"line {number} of {workload.file}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}.", "Correct the line.") from error
        if not isinstance(value, dict):
            raise DataError(f"{where} is not a JSON object.", "Correct the line.")
        if "\\u" in line:
            _check_text(json.dumps(value, ensure_ascii=False), where)
        yield number, value


def _check_text(text: str, where: str) -> None:
    """JSON can name half of a character, which no request can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise DataError(f"{where} contains half of a surrogate pair: {half}.", "Correct the text.") from error


def _field(workload: Workload, number: int, value: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    found = value.get(name)
    if not isinstance(found, kind) or isinstance(found, bool):
        raise _unusable(workload, number, value, name)
    return found


def _number(workload: Workload, number: int, value: dict[str, Any], name: str, low: float, high: float) -> float:
    found: float = _field(workload, number, value, name, (int, float))
    if not low <= found <= high:  # nor is NaN
        raise _unusable(workload, number, value, name)
    return found


def _unusable(workload: Workload, number: int, value: dict[str, Any], name: str) -> DataError:
    shown = f": {ascii(value[name])[:60]}" if name in value else ""
    return DataError(f'line {number} of {workload.file} has no usable "{name}"{shown}.', "Correct the line.")


_LONGEST = 10**8  # tokens, as for --input-len
_LATEST = 1e18


def _custom(workload: Workload, _: Vocabulary) -> list[Prompt]:
    prompts = []
    for number, value in _lines(workload):
        content = _field(workload, number, value, "prompt", (str, list))
        output, stamp = workload.output_len, None
        if value.get("output_tokens") is not None:
            output = int(_number(workload, number, value, "output_tokens", 0, _LONGEST))
        if value.get("timestamp") is not None:
            stamp = float(_number(workload, number, value, "timestamp", -_LATEST, _LATEST))
        prompts.append(Prompt(content, None, max(1, output), stamp))
        if len(prompts) == workload.num_prompts:
            break
    return prompts


def _trace(workload: Workload, words: Vocabulary) -> list[Prompt]:
    dice, prompts = _dice(workload), []
    for one in itertools.islice(read_trace(str(workload.file)), workload.num_prompts):
        length, output = one.prompt_tokens, max(1, one.output_tokens)
        prompts.append(Prompt(words.draw(length, dice), length if words.exact else None, output, one.time_s))
    return prompts


def _batch(workload: Workload, _: Vocabulary) -> list[Prompt]:
    """Rows as `corral batch` reads them: whole requests, or prompts and messages with their parameters."""
    from corral.use.batch.input.recipe import PLAIN, Recipe, max_answer_tokens  # only this dataset needs it

    prompts, recipe = [], Recipe()
    for number, line in _texts(workload):
        try:
            recipe = recipe.settled(line.encode())
            if recipe.kind == PLAIN and workload.chat:
                recipe = replace(recipe, chat=True)
            body = recipe.read(line.encode(), number).body
        except (DataError, RecursionError) as error:
            raise DataError(
                f"line {number} of {workload.file} {error}.", "Correct the line, or leave it out."
            ) from error
        prompts.append(
            Prompt("", None, max_answer_tokens(body), body={k: v for k, v in body.items() if k != "model"})
        )
        if len(prompts) == workload.num_prompts:
            break
    return prompts


def _sharegpt(workload: Workload, _: Vocabulary) -> list[Prompt]:
    """First turns of two-turn conversations, shuffled by the seed; answers of `output_len` tokens."""
    path = existing_file(str(workload.file))
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
        talks = [(n, talk["conversations"]) for n, talk in enumerate(data, 1) if len(talk["conversations"]) >= 2]
        texts = [(n, str(talk[0]["value"])) for n, talk in talks]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Check its permissions.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a ShareGPT file: {error}.", "Give a list of conversations as JSON."
        ) from error
    for n, text in texts:
        _check_text(text, f"conversation {n} of {path}")
    _dice(workload).shuffle(texts)
    return [Prompt(text, None, workload.output_len) for _, text in texts[: workload.num_prompts]]


LOADERS: dict[str, Callable[[Workload, Vocabulary], list[Prompt]]] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "multi_turn": _multi_turn,
    "custom": _custom,
    "sharegpt": _sharegpt,
    "batch": _batch,
    "trace": _trace,
}

"""Scoring against a server: rows in, likelihoods out, with no more prompt tokens in flight than its memory allows.

The tokens are made by the server's own tokenizer (`/tokenize`) and sent as ids to `/v1/completions` with
`prompt_logprobs`, so that exactly those tokens are scored. vLLM computes the logits of all prompt tokens of a step at
once, in float32 over the whole vocabulary; too many of them end the engine (vllm 38830). `ScoreOptions.memory_gib`
bounds what is in flight; a single row beyond the bound goes alone, or in windows if that is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from corral.base.errors import CorralError, DataError, UsageError
from corral.client.client import COMPLETIONS, Client
from corral.client.errors import MalformedReplyError, PromptTooLongError, RequestError, error_from_status
from corral.client.fanout import retried, run_workers
from corral.client.pool import Page
from corral.client.reply import Reply
from corral.use.batch.core.runner import RowRequest
from corral.use.score.likelihood import (
    Likelihood,
    Score,
    ScoreOptions,
    ScoreRow,
    Span,
    TokenScore,
    cut,
    read_row,
    split_pair,
    total,
)


class TokenGate:
    """Lets requests through up to a number of tokens, first come first served; a larger request goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, tokens: int) -> AsyncIterator[None]:
        """Hold this many tokens of the limit."""
        amount = min(tokens, self._limit)
        if self._queue or amount > self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append((amount, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_back(amount)
                raise
        else:
            self._free -= amount
        try:
            yield
        finally:
            self._give_back(amount)

    def _give_back(self, amount: int) -> None:
        self._free += amount
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self._free):
            tokens, turn = self._queue.popleft()
            if not turn.cancelled():
                self._free -= tokens
                turn.set_result(None)


T = TypeVar("T")
Steps = Generator[Sequence[RowRequest], Sequence[Any], T]  # gives requests, receives their answers, returns a result


class Scoring:
    """The requests that score a row, step by step; the model's length and prefix are learnt once for all rows."""

    def __init__(self, options: ScoreOptions) -> None:
        self.options = options
        self.context = 0  # of the model, in tokens
        self._capacity = 0
        self._prefix: tuple[int, ...] | None = None

    def steps(self, row: ScoreRow) -> Steps[Score]:
        """The steps of one row; raises what is wrong with it."""
        if self._prefix is None:
            yield from self.learn()
        prefix = self._prefix or ()
        special = self.options.special_tokens if row.special is None else row.special
        if row.text is not None:
            [tokens] = yield from self.tokens([(row.text, bool(row.special))])
            return Score.of(row, (yield from self._likelihoods(row, [[*prefix, *tokens]], len(prefix))))
        pairs = [split_pair(row.context, continuation) for continuation in row.continuations]
        if not pairs[0][0]:
            found = yield from self.tokens([(continuation, False) for _, continuation in pairs])
            wholes = [tokens if prefix and tokens[:1] == [*prefix] else [*prefix, *tokens] for tokens in found]
            return Score.of(row, (yield from self._likelihoods(row, wholes, len(prefix))))
        texts = [pairs[0][0], *(context + continuation for context, continuation in pairs)]
        context, *wholes = yield from self.tokens([(text, special) for text in texts])
        wholes = [[*context, *whole[len(context) :]] for whole in wholes]  # "Par" + "is" is not "Paris" there
        return Score.of(row, (yield from self._likelihoods(row, wholes, len(context))))

    def learn(self) -> Steps[None]:
        """Learn the model's length, and the token before texts."""
        wanted = self.options.prefix
        if wanted == "bos":  # as lm-eval: the first token, or the last one where a model has no first
            [info] = yield [RowRequest("/tokenizer_info", b"", page=True)]
            wanted = _special_token(info)
        named = [] if wanted in ("auto", "none") else [_tokenize(wanted, False)]
        first, *rest = yield [_tokenize("", True), *named]
        answer = read_tokens(first)
        prefix = answer["tokens"] if wanted == "auto" else []
        if rest:
            prefix = read_tokens(rest[0])["tokens"]
            if len(prefix) != 1:
                raise UsageError(
                    f"the prefix {wanted!r} is {len(prefix)} tokens.", "Give one, such as <|endoftext|>."
                )
        self.context = int(answer["max_model_len"])
        self._capacity = min(self.context - 1, self.options.window or sys.maxsize)
        self._prefix = tuple(prefix)

    def tokens(self, texts: Sequence[tuple[str, bool]]) -> Steps[list[list[int]]]:
        """The tokens of texts, each with or without those that the tokenizer adds."""
        answers = yield [_tokenize(text, special) for text, special in texts]
        return [read_tokens(answer)["tokens"] for answer in answers]

    def _likelihoods(self, row: ScoreRow, wholes: Sequence[Sequence[int]], first: int) -> Steps[list[Likelihood]]:
        cuts = [self._cut(row, tokens, first) for tokens in wholes]
        answers = iter((yield [self._request(span) for spans in cuts for span in spans]))
        kept = self.options.per_token or self.options.top > 0
        found = []
        for spans in cuts:
            scores = [score for span in spans for score in self._scores(span, next(answers))]
            found.append(total(scores, len(spans), kept))
        return found

    def _cut(self, row: ScoreRow, tokens: Sequence[int], first: int) -> list[Span]:
        if first >= len(tokens):
            raise DataError(f"row {row.id!r}: the continuation adds no token to its context.", "Correct the row.")
        if len(tokens) > self._capacity and self.options.too_long == "refuse":
            raise PromptTooLongError(
                f"row {row.id!r} has {len(tokens)} tokens, and a window holds {self._capacity}.",
                "Score it in windows (--too-long window), or serve the model with a longer context.",
            )
        if not (spans := cut(tokens, first, self._capacity, self.options.overlap)):
            total([], 0, False)  # raises: there is nothing to score
        return spans

    def _request(self, span: Span) -> RowRequest:
        body = {"prompt": span.tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self.options.top}
        return RowRequest(COMPLETIONS, body, weight=len(span.tokens))

    def _scores(self, span: Span, reply: Reply) -> list[TokenScore]:
        values = reply.choices[0].prompt_logprobs
        if not isinstance(values, list) or len(values) != len(span.tokens):
            raise MalformedReplyError(
                "the server did not give the prompt's log-probabilities.", "Scoring needs vLLM."
            )
        return [
            _token_score(span.tokens[at], values[at], self.options.top) for at in range(span.first, len(span.tokens))
        ]


def _tokenize(text: str, special: bool) -> RowRequest:
    return RowRequest("/tokenize", {"prompt": text, "add_special_tokens": special}, page=True)


def read_tokens(page: Page) -> dict[str, Any]:
    """What `/tokenize` answered."""
    try:
        found: dict[str, Any] = page.json()
        return {"tokens": list(found["tokens"]), "max_model_len": found["max_model_len"]}
    except (ValueError, KeyError, TypeError):
        raise MalformedReplyError("/tokenize did not answer with tokens.", "Scoring needs vLLM's.") from None


def _special_token(page: Page) -> str:
    try:
        found = page.json()
        token = next(found[name] for name in ("bos_token", "eos_token") if found.get(name))
        return str(token["content"] if isinstance(token, dict) else token)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise MalformedReplyError(
            "/tokenizer_info has neither a first nor a last token.", "Name the token: --prefix TOKEN."
        ) from None


class Scorer:
    """Scores rows that are in memory, on one server."""

    def __init__(self, client: Client, options: ScoreOptions) -> None:
        self.client = client
        self._scoring = Scoring(options)
        self._gate = TokenGate(options.tokens_in_flight)

    async def score(self, row: ScoreRow) -> Score:
        """The result of one row; raises the error of the row or of the server."""
        steps = self._scoring.steps(row)
        requests = next(steps)
        while True:
            answers = await asyncio.gather(*map(self._answer, requests))
            try:
                requests = steps.send(answers)
            except StopIteration as end:
                score: Score = end.value
                return score

    async def _answer(self, request: RowRequest) -> Reply | Page:
        if request.page:
            return await retried(partial(self._page, request))
        async with self._gate.hold(request.weight):
            return await retried(partial(self.client.request, request.path, request.body))

    async def _page(self, request: RowRequest) -> Page:
        endpoint = self.client.endpoint
        body = None if isinstance(request.body, bytes) else {"model": endpoint.model, **request.body}
        page = await self.client.page(request.path, body, timeout_s=120)
        if page.status != 200:
            raise error_from_status(page.status, page.body, None, endpoint.root)
        return page


def _token_score(token: int, values: Mapping[str, Any], top: int) -> TokenScore:
    own = values[str(token)]
    best = sorted(values.items(), key=lambda item: item[1]["rank"])[:top] if top else []
    alternatives = tuple(
        {"id": int(number), "text": value.get("decoded_token") or "", "logprob": value["logprob"]}
        for number, value in best
    )
    return TokenScore(token, own.get("decoded_token") or "", own["logprob"], own.get("rank"), alternatives)


@dataclass(frozen=True)
class BadRow:
    """A row that could not be scored, and why."""

    id: str
    number: int
    kind: str
    message: str
    remedy: str


class Scores(Sequence[Score]):
    """Results in the order of their rows; `bad` has those that could not be scored."""

    def __init__(self, scores: Sequence[Score], bad: Sequence[BadRow]) -> None:
        self._scores, self.bad = tuple(scores), tuple(bad)

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, index: Any) -> Any:
        return self._scores[index]

    def __iter__(self) -> Iterator[Score]:
        return iter(self._scores)

    def __repr__(self) -> str:
        return f"Scores({len(self)} rows, {len(self.bad)} bad)"

    def to_dicts(self) -> list[dict[str, Any]]:
        """The results as `corral score` writes them."""
        return [score.to_json() for score in self._scores]

    def to_pandas(self) -> Any:
        """A data frame with one row for each result."""
        try:
            import pandas as pd
        except ImportError:
            raise UsageError("pandas is not installed.", "pip install pandas, or use to_dicts().") from None
        return pd.DataFrame(self.to_dicts())

    def summary(self) -> dict[str, Any]:
        """Counts and means over all rows."""
        return summary([score.to_json() for score in self._scores], len(self.bad))


def summary(results: Iterable[Mapping[str, Any]], bad: int) -> dict[str, Any]:
    """Totals of a run: rows, tokens, mean log-probability per token, perplexity, accuracy where answers are known.

    Of rows of several kinds the means are in `kinds`: one perplexity over texts and choices means nothing.
    """
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    whole: dict[str, float] = {}
    rights: list[bool] = []
    norms: list[bool] = []
    for result in results:
        kind = result["kind"]
        rows[kind] += 1
        tokens[kind] += result["tokens"]
        whole[kind] = whole.get(kind, 0.0) + result["sum_logprob"]
        if result.get("correct") is not None:
            rights.append(result["correct"])
            norms.append(result["correct_norm"])
    totals: dict[str, Any] = {"rows": rows.total(), "bad": bad, "tokens": tokens.total()}
    means = {kind: _means(whole[kind] / tokens[kind]) for kind in rows if tokens[kind]}
    if len(means) > 1:
        totals["kinds"] = {kind: {"rows": rows[kind], "tokens": tokens[kind], **of} for kind, of in means.items()}
    else:
        totals |= next(iter(means.values()), {})
    if rights:
        totals |= {"accuracy": statistics.fmean(rights), "accuracy_norm": statistics.fmean(norms)}
    return totals


def _means(mean: float) -> dict[str, float | None]:
    return {"mean_logprob": mean, "perplexity": math.exp(-mean) if mean > -700 else None}


async def score_rows(client: Client, rows: Iterable[Mapping[str, Any]], options: ScoreOptions) -> Scores:
    """Score rows that are in memory; bad ones are set apart, a failure of the server is raised."""
    scorer = Scorer(client, options)
    scores: dict[int, Score] = {}
    bad: list[BadRow] = []
    numbered = enumerate(rows, 1)

    async def worker() -> None:
        for number, data in numbered:
            try:
                scores[number] = await scorer.score(read_row(data, number))
            except (DataError, UsageError) as error:
                if isinstance(error, UsageError) and not isinstance(error, RequestError):
                    raise
                bad.append(bad_row(data, number, error))

    await run_workers(worker, options.concurrency)
    return Scores([scores[number] for number in sorted(scores)], sorted(bad, key=lambda row: row.number))


def bad_row(data: Any, number: int, error: CorralError) -> BadRow:
    """The record of a row that could not be scored."""
    name = str(data.get("id", number)) if isinstance(data, Mapping) else str(number)
    return BadRow(name, number, type(error).__name__, error.message, error.remedy)

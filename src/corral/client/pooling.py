"""Requests to models that answer in numbers, and their answers: embeddings, scores, rankings.

vLLM's shapes: `/v1/embeddings` is OpenAI's; `/v1/rerank` is that of Jina and Cohere; `/v1/score` compares pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from corral.client.errors import MalformedReplyError
from corral.client.pool import Page

EMBEDDINGS, RERANK, SCORE, RESPONSES = "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/responses"
CLASSIFY, TRANSCRIPTIONS = "/classify", "/v1/audio/transcriptions"
NEEDED: dict[str, tuple[str, ...]] = {  # the fields that a request to each path must have
    EMBEDDINGS: ("input",), RERANK: ("query", "documents"), SCORE: (), RESPONSES: ("input",),
    TRANSCRIPTIONS: ("file",),
}  # fmt: skip


@dataclass(frozen=True)
class RankedDocument:
    """One document of a ranking: its place in the request, its text, and how well it answers the query."""

    index: int
    document: str
    score: float


def embed_body(texts: str | Sequence[str], dimensions: int | None = None) -> dict[str, Any]:
    """A request for the vectors of texts."""
    body = {"input": texts if isinstance(texts, str) else list(texts), "encoding_format": "float"}
    return body if dimensions is None else {**body, "dimensions": dimensions}


def vectors(page: Page, count: int) -> list[list[float]]:
    """The vectors of an answer, in the order of the texts."""
    found: dict[Any, Any] = {row.get("index"): row.get("embedding") for row in _rows(page, "data")}
    rows = [found.get(index) for index in range(count)]
    if not all(isinstance(one, list) and all(isinstance(n, (int, float)) for n in one) for one in rows):
        raise _malformed(page)
    return [[float(number) for number in row] for row in rows if row is not None]


def ranking(page: Page, documents: Sequence[str]) -> list[RankedDocument]:
    """The documents of an answer, the best first."""
    found = []
    for row in _rows(page, "results"):
        index, score = row.get("index"), row.get("relevance_score")
        if not isinstance(index, int) or not 0 <= index < len(documents) or not isinstance(score, (int, float)):
            raise _malformed(page)
        found.append(RankedDocument(index, documents[index], float(score)))
    return sorted(found, key=lambda one: -one.score)


def text_of(page: Page) -> str:
    """What was said in a recording."""
    text = _object(page).get("text")
    if not isinstance(text, str):
        raise _malformed(page)
    return text


def prompt_tokens(page: Page) -> int | None:
    """What the server read, where it says so."""
    usage = _object(page).get("usage")
    number = usage.get("prompt_tokens", usage.get("total_tokens")) if isinstance(usage, Mapping) else None
    return number if isinstance(number, int) else None


def _rows(page: Page, name: str) -> list[Mapping[str, Any]]:
    rows = _object(page).get(name)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise _malformed(page)
    return rows


def checked_body(page: Page) -> bytes:
    """The answer as it is, once it is known to be a JSON object."""
    _object(page)
    return page.body


def _object(page: Page) -> Mapping[str, Any]:
    try:
        body = page.json()
    except (msgspec.MsgspecError, ValueError):
        raise _malformed(page) from None
    if not isinstance(body, Mapping):
        raise _malformed(page)
    return body


def _malformed(page: Page) -> MalformedReplyError:
    shown = page.body[:100].decode("utf-8", "replace")
    return MalformedReplyError(f"the server's answer is not what was asked for: {shown}", "Is it vLLM?")

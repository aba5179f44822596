"""Tokens for the page: their true texts, learnt from the server by id and remembered while the console runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from corral.client.client import Client
from corral.client.reply import Token
from corral.use.llm import token_bytes
from corral.use.llm.token_view import Character, are_logits, characters, label

MOST_SERVERS, MOST_TOKENS = 8, 300_000  # a vocabulary has some 150,000


class Spellings:
    """What ids mean, by server and model; what is unknown is asked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[int, bytes | None]] = {}

    async def exact(self, client: Client, tokens: Sequence[Token], texts: Iterable[str]) -> tuple[Token, ...]:
        """The tokens with their true bytes and texts; `texts` are where most of them come from."""
        known = self._of(client)
        missing = [number for number in token_bytes.all_ids(tokens) if number not in known]
        if missing:
            learnt = await token_bytes.learn(client, missing, texts)
            if len(known) + len(learnt) > MOST_TOKENS:
                known.clear()
            known |= learnt
        return tuple(token_bytes.exact(token, known) for token in tokens)

    def _of(self, client: Client) -> dict[int, bytes | None]:
        key = (client.endpoint.root, client.endpoint.model)
        while len(self._known) >= MOST_SERVERS and key not in self._known:
            del self._known[next(iter(self._known))]
        return self._known.setdefault(key, {})


def shown(tokens: Sequence[Token]) -> dict[str, Any]:
    """Tokens as stretches of whole characters, each with the tokens that make it and their alternatives."""
    return {"spans": [_span(one) for one in characters(tokens)], "logits": are_logits(tokens)}


def _span(one: Character) -> dict[str, Any]:
    return {"text": one.text, "logprob": one.logprob, "tokens": [_token(token, top=True) for token in one.tokens]}


def _token(token: Token, top: bool = False) -> dict[str, Any]:
    found = {"label": label(token), "text": token.text, "id": token.id, "logprob": token.logprob, "rank": token.rank}
    return {**found, "top": [_token(one) for one in token.top]} if top else found

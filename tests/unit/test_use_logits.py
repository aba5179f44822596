"""Raw logits are shown as such: a value above 0 is no log-probability."""

from __future__ import annotations

from corral.client.reply import Token
from corral.use.llm.token_view import TokenView, are_logits, characters


def token(text: str, value: float, *others: tuple[str, float]) -> Token:
    top = tuple(Token(text=word, logprob=score, id=None, bytes=None, rank=None, top=()) for word, score in others)
    return Token(text=text, logprob=value, id=1, bytes=tuple(text.encode()), rank=1, top=top)


def test_logits_have_no_probabilities() -> None:
    tokens = (token("city", 17.25, ("city", 17.25), ("place", -1.5)),)
    assert are_logits(tokens)
    table = TokenView((), tokens).table()
    assert "LOGIT" in table
    assert "LOGPROB" not in table
    assert "%" not in table
    assert "17.2500" in table
    assert "place -1.5000" in table
    assert characters(tokens)[0].probability is None
    assert "city" in TokenView((), tokens).ansi()


def test_log_probabilities_are_shown_as_before() -> None:
    tokens = (token("city", -0.1, ("city", -0.1)),)
    assert not are_logits(tokens)
    table = TokenView((), tokens).table()
    assert "LOGPROB" in table
    assert "90.5%" in table
    assert not are_logits((token("sure", 1e-7),))  # rounding

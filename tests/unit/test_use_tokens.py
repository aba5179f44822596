"""Tokens as people see them: pieces of characters, blanks, colours; and how their bytes are learnt."""

from __future__ import annotations

import math
import re

import pytest

from corral.client.reply import Token
from corral.use.llm.token_bytes import exact, spelling, token_id
from corral.use.llm.token_view import TokenView, characters, harmless, label, visible, width


def token(piece: bytes, p: float | None = 0.5, number: int = 1, rank: int | None = 1) -> Token:
    logprob = None if p is None else math.log(p)
    return Token(piece.decode("utf-8", "replace"), logprob, rank, number, tuple(piece))


PARTY = "🎉".encode()


def test_an_emoji_of_three_tokens_is_one_sign_of_joint_probability() -> None:
    found = characters([token(b"a", 0.9), token(PARTY[:2], 0.5), token(PARTY[2:3], 0.5), token(PARTY[3:], 0.4)])
    assert [character.text for character in found] == ["a", "🎉"]
    assert found[1].probability == pytest.approx(0.1)
    assert len(found[1].tokens) == 3


def test_broken_bytes_do_not_swallow_what_follows() -> None:
    assert [character.text for character in characters([token(b"\xf0\x9f"), token(b"abc")])] == ["\ufffdabc"]
    assert [character.text for character in characters([token(b"\xff"), token(b"abc")])] == ["\ufffd", "abc"]
    assert [character.text for character in characters([token(b"ok"), token(b"\xe4\xb8")])] == ["ok", "\ufffd"]


def test_a_token_that_ends_one_sign_and_begins_another() -> None:
    two = "東京".encode()
    found = characters([token(two[:2]), token(two[2:4]), token(two[4:])])
    assert "".join(character.text for character in found) == "東京"


def test_tokens_of_unknown_bytes_stand_alone() -> None:
    unknown = Token("", -1.0, 1, 77)
    assert [character.text for character in characters([token(b"a"), unknown, token(b"b")])] == ["a", "�", "b"]
    assert label(unknown) == "⟨id 77⟩"
    assert label(Token("�", -1.0)) == "⟨part of a character⟩"


def test_labels() -> None:
    assert label(token(b" the")) == "·the"
    assert label(token(b"\n\t")) == "⏎⇥"
    assert label(token(PARTY[:2])) == "⟨F0 9F⟩"
    assert label(token("東".encode())) == "東"
    assert visible("a\x1b[31m") == "a⟨U+001B⟩[31m"
    assert width("東a") == 3


def test_no_control_sign_of_a_model_reaches_the_terminal() -> None:
    view = TokenView((), (token(b"\x1b]0;evil\x07", 0.9), token(b"\x9b31m", 0.5)))
    for text in (view.ansi(), view.table()):
        assert "\x07" not in text
        assert "\x1b" not in re.sub(r"\x1b\[[\d;]*m", "", text)


def test_harmless_text() -> None:
    assert harmless("a\tb\n東京 🎉\u200d") == "a\tb\n東京 🎉\u200d"
    assert harmless("a\x1b[2J\x07\x9b\rb") == "a\ufffd[2J\ufffd\ufffd\ufffdb"


def test_views() -> None:
    alternative = token(b" cat", 0.3, 9, 2)
    chosen = Token(" dog", math.log(0.6), 1, 8, tuple(b" dog"), (token(b" dog", 0.6, 8, 1), alternative))
    view = TokenView((Token("", None, None, 5, tuple(b"<s>")),), (chosen, Token("x", math.log(1e-5), None, 3)))
    table = view.table()
    assert "·dog" in table
    assert "60.0%" in table
    assert "·cat 30.0%" in table
    assert "1.0e-03%" in table
    assert "<s>" in table
    assert view.text == " dogx"
    html = view._repr_html_()
    assert "&lt;s&gt;" in html
    assert "·cat 30.0%" in html
    ansi = view.ansi()
    assert "\x1b[30;48;5;157m dog\x1b[0m" in ansi  # 60%
    assert "\x1b[30;48;5;203mx\x1b[0m" in ansi  # one in 100,000


def test_line_ends_do_not_bleed_colour() -> None:
    for line in TokenView((), (token(b"a\n\nb", 0.9),)).ansi().splitlines():
        assert line.count("\x1b[30") == line.count("\x1b[0m")


def test_spelling_of_byte_level_and_sentencepiece_tokenizers() -> None:
    assert spelling(["Hi", "ĠðŁ", "İ", "ī"], "Hi 🎉") == [b"Hi", b" \xf0\x9f", b"\x8e", b"\x89"]
    assert spelling(["<s>", "▁Hi", "<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"], "Hi🎉") == [
        b"<s>", b" Hi", b"\xf0", b"\x9f", b"\x8e", b"\x89",
    ]  # fmt: skip
    assert spelling(["▁東", "京"], " 東京") == [" 東".encode(), "京".encode()]
    assert spelling(["abc"], "abd") is None
    assert spelling([], "a") is None


def test_exact_tokens_by_id() -> None:
    told = Token("token_id:7", -1.0, 1, 7, None, (Token("token_id:7", -1.0, 1), Token("token_id:8", -2.0, 2)))
    found = exact(told, {7: b" a"})
    assert (found.text, found.bytes, found.id) == (" a", tuple(b" a"), 7)
    assert [t.id for t in found.top] == [7, 8]
    assert found.top[1].bytes is None
    assert label(found.top[1]) == "⟨id 8⟩"
    assert token_id(Token("token_id:12", None)) == 12
    assert exact(Token("plain", -1.0), {}).bytes == tuple(b"plain")
    # the server guesses a character from the bytes before; of a piece with unknown bytes only the id is certain
    assert label(exact(Token("🎭", -1.0, 2, 9), {9: None})) == "⟨id 9⟩"

"""Tokens with their probabilities, for people: a table, a heat map for terminals, and the same as HTML for notebooks.

Characters made of several tokens (an emoji, a rare ideograph) are drawn once, in the colour of their joint
probability; the table has each token of its own, pieces of characters as bytes. Control characters and blanks are
made visible.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from corral.client.reply import Token

# probability at least -> (256-colour background for terminals, the same for HTML)
_SHADES = (
    (0.9, 120, "#87ff87"), (0.6, 157, "#afffaf"), (0.3, 229, "#ffffaf"), (0.1, 222, "#ffd787"),
    (0.03, 216, "#ffaf87"), (0.01, 210, "#ff8787"), (0.0, 203, "#ff5f5f"),
)  # fmt: skip
_ZERO = 1e-3  # log-probabilities are never above 0
_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_BETWEEN = "  "  # alternatives
_SPARED = (2, 4, 5)  # columns that a narrow table leaves out: id, log-probability, rank


@dataclass(frozen=True)
class Character:
    """A stretch of text that one token, or several together, make."""

    text: str
    logprob: float | None
    tokens: tuple[Token, ...]

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None or self.logprob > _ZERO else math.exp(self.logprob)


def _is_cut_character(data: bytes) -> bool:
    """Whether more bytes could complete the last character: cut UTF-8, not broken UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.end == len(data)
    return False


def characters(tokens: Sequence[Token]) -> list[Character]:
    """The tokens put together into whole characters."""
    found: list[Character] = []
    held: list[Token] = []
    data = b""
    for token in tokens:
        if token.bytes is None:
            found += _flush(held, data)
            held, data = [], b""
            found.append(Character(token.text or "�", token.logprob, (token,)))
            continue
        held.append(token)
        data += bytes(token.bytes)
        if not _is_cut_character(data):
            found += _flush(held, data)
            held, data = [], b""
    return found + _flush(held, data)


def _flush(held: list[Token], data: bytes) -> list[Character]:
    if not held:
        return []
    values = [token.logprob for token in held]
    known = [value for value in values if value is not None]
    return [
        Character(data.decode("utf-8", "replace"), sum(known) if len(known) == len(values) else None, tuple(held))
    ]


def label(token: Token) -> str:
    """A token in one visible word: text as it is, blanks marked, pieces of characters as their bytes."""
    if token.bytes is not None:
        try:
            text = bytes(token.bytes).decode()
        except UnicodeDecodeError:
            return "⟨" + " ".join(f"{byte:02X}" for byte in token.bytes) + "⟩"
    else:
        text = token.text
        if not text or "\ufffd" in text:
            return f"⟨id {token.id}⟩" if token.id is not None else "⟨part of a character⟩"
    return visible(text)


def visible(text: str) -> str:
    """Text with its blanks and control characters made visible."""
    return "".join(
        "·"
        if character == " "
        else _VISIBLE.get(character) or (character if _printable(character) else f"⟨U+{ord(character):04X}⟩")
        for character in text
    )


def harmless(text: str) -> str:
    """Text for a terminal, without control characters: a model could move the cursor or set the title with them."""
    if text.isprintable():
        return text
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else "\ufffd"
        for character in text
    )


def _printable(character: str) -> bool:
    return character.isprintable() and not unicodedata.combining(character)


def width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    return sum(
        2 if unicodedata.east_asian_width(character) in "WF" else 0 if character in "\u200d\ufe0f" else 1
        for character in text
    )


def are_logits(tokens: Sequence[Token]) -> bool:
    """Whether the values are raw scores (`--logprobs-mode raw_logits`): one above 0 is no log-probability."""
    values = [token.logprob for chosen in tokens for token in (chosen, *chosen.top)]
    return any(value is not None and value > _ZERO for value in values)


def percent(logprob: float | None) -> str:
    if logprob is None:
        return "-"
    share = 100 * math.exp(logprob)
    return f"{share:.1f}%" if share >= 0.1 else f"{share:.1e}%"


def table_rows(tokens: Sequence[Token]) -> list[list[str]]:
    """One row for each token: position, token, id, probability, log-probability, rank, alternatives."""
    rows = []
    shown = _score if are_logits(tokens) else percent
    for position, token in enumerate(tokens):
        others = _BETWEEN.join(f"{label(other)} {shown(other.logprob)}" for other in token.top)
        value = "-" if token.logprob is None else f"{token.logprob:.4f}"
        rank = str(token.rank) if token.rank is not None else "-" if token.logprob is None else f">{len(token.top)}"
        number = "-" if token.id is None else str(token.id)
        probability = "-" if shown is _score else percent(token.logprob)
        rows.append([str(position), label(token), number, probability, value, rank, others])
    return rows


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _shade(probability: float | None) -> tuple[int, str] | None:
    if probability is None:
        return None
    return next((colour, name) for least, colour, name in _SHADES if probability >= least)


@dataclass(frozen=True)
class TokenView:
    """The tokens of a prompt and of its answer, to be shown."""

    prompt_tokens: tuple[Token, ...]
    tokens: tuple[Token, ...]

    HEADINGS = ("#", "TOKEN", "ID", "PROBABILITY", "LOGPROB", "RANK", "ALTERNATIVES")

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(character.text for character in characters(self.tokens))

    def table(self, columns: int | None = None) -> str:
        """The table as plain text, prompt first; within so many columns, alternatives go on below each other."""
        parts = []
        for title, tokens in (("prompt", self.prompt_tokens), ("answer", self.tokens)):
            if tokens:
                heads = ["LOGIT" if head == "LOGPROB" and are_logits(tokens) else head for head in self.HEADINGS]
                parts += [title, *_aligned([heads, *table_rows(tokens)], columns), ""]
        return "\n".join(parts)

    def ansi(self) -> str:
        """The heat map for a terminal: prompt, then answer, each character on the colour of its probability."""
        parts = []
        for title, tokens in (("prompt", self.prompt_tokens), ("answer", self.tokens)):
            if tokens:
                parts += [title, "".join(map(_painted, characters(tokens))), ""]
        scale = "".join(
            f"\033[30;48;5;{colour}m {'≥' if least else '<'}{least or _SHADES[-2][0]:.0%} \033[0m"
            for least, colour, _ in _SHADES
        )
        return "\n".join([*parts, scale])

    def _repr_html_(self) -> str:
        blocks = []
        for title, tokens in (("prompt", self.prompt_tokens), ("answer", self.tokens)):
            if tokens:
                blocks.append(
                    f"<div><b>{title}</b></div><div>{''.join(map(_html_character, characters(tokens)))}</div>"
                )
        scale = "".join(
            f'<span style="background:{name};color:#000;padding:0 .5em">'
            f"{'≥' if least else '&lt;'}{least or _SHADES[-2][0]:.0%}</span>"
            for least, _, name in _SHADES
        )
        style = "font-family:monospace;line-height:1.7"
        return f'<div style="{style}">{"".join(blocks)}<div style="margin-top:.5em">{scale}</div></div>'


def _aligned(rows: list[list[str]], columns: int | None) -> list[str]:
    """Aligned lines; the last column is wrapped where it does not fit, and others are left out if need be."""
    widths = [max(width(row[column]) for row in rows) for column in range(len(rows[0]))]
    kept = list(range(len(widths)))
    least = max(width(word) for row in rows for word in row[-1].split(_BETWEEN))
    for spared in _SPARED:
        if columns is None or sum(widths[i] + 2 for i in kept[:-1]) + 2 + least <= columns:
            break
        kept.remove(spared)
    lines = []
    for row in rows:
        first = "  " + "".join(row[i] + " " * (widths[i] - width(row[i]) + 2) for i in kept[:-1])
        room = None if columns is None else columns - width(first)
        pieces = _broken(row[-1].split(_BETWEEN), room)
        lines += [(first if number == 0 else " " * width(first)) + piece for number, piece in enumerate(pieces)]
    return [line.rstrip() for line in lines]


def _broken(words: list[str], room: int | None) -> list[str]:
    """Words beside each other, as many in a line as fit."""
    lines = [words[0]]
    for word in words[1:]:
        if room is not None and width(lines[-1]) + len(_BETWEEN) + width(word) > room:
            lines.append(word)
        else:
            lines[-1] += _BETWEEN + word
    return lines


def _painted(character: Character) -> str:
    shade = _shade(character.probability)
    text = character.text.replace("\t", "    ").replace("\r", "␍")
    text = "".join(s if s == "\n" or s.isprintable() or s in "\u200d\ufe0f" else "�" for s in text)
    if shade is None:
        return text
    # a line end inside a coloured stretch would colour the rest of the line
    return "\n".join(
        f"\033[30;48;5;{shade[0]}m{part}\033[0m" if part else "" for part in text.replace("\n", "⏎\n").split("\n")
    )


def _html_character(character: Character) -> str:
    shade = _shade(character.probability)
    lines = [f"{label(token)}: {percent(token.logprob)}, rank {token.rank or '-'}" for token in character.tokens]
    lines += [f"  {label(other)} {percent(other.logprob)}" for other in character.tokens[-1].top]
    title = html.escape("\n".join(lines), quote=True)
    shown = (
        html.escape(character.text).replace("\n", "⏎<br>").replace(" ", "&nbsp;" if character.text == " " else " ")
    )
    background = f"background:{shade[1]};color:#000" if shade else ""
    return f'<span title="{title}" style="{background}">{shown}</span>'

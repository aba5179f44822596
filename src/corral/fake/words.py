"""The fake model: a reversible tokenizer and answers that are a pure function of the request.

Tokenizer. Text is UTF-8 bytes. A token is a space and up to three bytes that are not spaces, or up to four bytes
that are not spaces; the split is greedy from the left. So "San Francisco is a" is `San| Fra|ncis|co| is| a`. A
token's id numbers all byte strings of one to four bytes in order of length, then of value; `EOS` comes after the
last. Joining the pieces gives the text back, whatever it is; no special tokens are added.

Answers. A 64-bit hash of the prompt and of the sampling parameters (seed included, length not) chooses three head
words (30 bits: two prompts almost never share an answer) and a place on a fixed tape of words, which is then read
on. A larger `max_tokens` therefore extends the same answer. Words are four bytes long, some with letters outside
ASCII; full stops, commas and line ends are tokens of their own. Tokenizing an answer gives the answer's tokens.

Log-probabilities depend on the token before and the token itself: rank 1 has a probability p between 0.5 and 0.99,
rank r has (1 - p) / 2^(r-1). At temperature 0 every generated token has rank 1.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import math
import re
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_PIECE = re.compile(rb" [^ ]{0,3}|[^ ]{1,4}")
_FIRST_ID = (0, 0, 1 << 8, (1 << 8) + (1 << 16), (1 << 8) + (1 << 16) + (1 << 24))
EOS = (1 << 8) + (1 << 16) + (1 << 24) + (1 << 32)
EOS_TEXT = "</s>"
FIRST = "<s>"  # a word like others: nothing adds it
_TAPE_TOKENS = 1 << 16
_HEAD_TOKENS = 3
_CONSONANTS = "bcdfghjklmnprstv"


DIMENSIONS = 16


def vector(text: str, dimensions: int = DIMENSIONS) -> list[float]:
    """A vector of length 1 that texts with common tokens share parts of; numbers that 32 bits hold."""
    counts = [0.0] * dimensions
    for piece in pieces(text.lower().encode("utf-8", "replace")):
        place = zlib.crc32(piece.strip())
        counts[place % dimensions] += 1.0 if place >> 31 else -1.0
    size = math.sqrt(sum(count * count for count in counts)) or 1.0
    return array("f", (count / size for count in counts)).tolist()


def nearness(one: str, other: str) -> float:
    """How near two texts are: the cosine of their vectors."""
    return round(sum(a * b for a, b in zip(vector(one, 256), vector(other, 256), strict=True)), 6)


def pieces(text: bytes) -> list[bytes]:
    """The tokens of a text, as bytes."""
    return _PIECE.findall(text)


def encode(text: bytes) -> list[int]:
    """The token ids of a text."""
    return [_FIRST_ID[len(piece)] + int.from_bytes(piece, "big") for piece in _PIECE.findall(text)]


def decode(ids: Sequence[int]) -> bytes:
    """The text of token ids; `EOS` has none, an id outside the vocabulary raises ValueError."""
    return b"".join(map(piece_of, ids))


def piece_of(token: int) -> bytes:
    """The bytes of one token."""
    if token == EOS:
        return b""
    if not 0 <= token < EOS:
        raise ValueError(f"Token id {token} is out of vocabulary")
    length = next(n for n in (4, 3, 2, 1) if token >= _FIRST_ID[n])
    return (token - _FIRST_ID[length]).to_bytes(length, "big")


@dataclass(frozen=True, slots=True)
class Tape:
    """The fixed sequence of words every answer is read from, doubled so that a read never wraps."""

    words: list[str]  # the vocabulary of the heads: 1,024 words
    tokens: list[str]
    escaped: list[bytes]  # the same, as the inside of a JSON string
    escape: dict[str, bytes]


@functools.cache
def tape() -> Tape:
    """Build the tape (once, some 20 ms)."""
    words = [f" {a}{v}{z}" for a in _CONSONANTS for v in "aeiouy" for z in "bdgklmnr"]
    words += [f" {a}{z}" for a in _CONSONANTS[:-1] for z in "éèüöäåñçßøæîôûœł"]
    words += [f" {z}" for z in "東京都大学図書館物言葉語文字人山"]
    marks = [".", ",", "\n"]
    noise = hashlib.shake_128(b"corral fake server").digest(2 * _TAPE_TOKENS)
    tokens: list[str] = []
    for i in range(_TAPE_TOKENS):
        value = noise[2 * i] | noise[2 * i + 1] << 8
        after_word = i > 0 and tokens[-1][0] == " "
        tokens.append(marks[value % 3] if after_word and value >> 10 < 6 else words[value & 1023])
    escape = {w: json.dumps(w, ensure_ascii=False)[1:-1].encode() for w in {*words, *marks, ""}}
    escaped = [escape[w] for w in tokens]
    return Tape(words, tokens * 2, escaped * 2, escape)


@dataclass(slots=True)
class Answer:
    """What one choice will say: `texts` has the shown text of each token (none for an end token)."""

    texts: list[str]
    tokens: list[str]  # the same before a stop string was cut away
    escaped: list[bytes]  # the shown texts as the inside of a JSON string
    finish_reason: str
    stop_reason: str | None
    key: int

    @property
    def count(self) -> int:
        return len(self.texts)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def ids(self) -> list[int]:
        """Token ids, the end token included."""
        return [encode(t.encode())[0] if t else EOS for t in self.tokens]


def answer(key: int, limit: int, natural: int | None, stops: Sequence[str] = ()) -> Answer:
    """The answer for a 64-bit key: at most `limit` tokens, ending by itself after `natural` tokens (None: never)."""
    source = tape()
    ends = natural is not None and natural < limit
    words = (natural or 0) if ends else limit
    start = key >> 44 & (_TAPE_TOKENS - 1)
    head = [source.words[key >> shift & 1023] for shift in (0, 10, 20)]
    body = words - _HEAD_TOKENS
    times = body // _TAPE_TOKENS
    texts = head[:words]
    escaped = [source.escape[w] for w in texts]
    if body > 0:
        tokens, quoted = source.tokens, source.escaped
        if times:
            tokens, quoted = tokens * (times + 1), quoted * (times + 1)
        texts += tokens[start : start + body]
        escaped += quoted[start : start + body]
    if stops and (cut := _cut(texts, stops)):
        shown, stop = cut
        return Answer(shown, texts[: len(shown)], [_quote(t) for t in shown], "stop", stop, key)
    if ends:
        texts.append("")
        escaped.append(b"")
    return Answer(texts, texts, escaped, "stop" if ends else "length", None, key)


def answer_of(text: str, key: int, limit: int, end: str = "stop") -> Answer:
    """The answer that is this text (the arguments of a tool's call among them), cut at `limit` tokens."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    whole = [decode(piece) for piece in pieces(text.encode())]
    texts = whole[:limit]
    return Answer(texts, texts, [_quote(t) for t in texts], "length" if len(whole) > limit else end, None, key)


def _quote(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()


def _cut(texts: list[str], stops: Sequence[str]) -> tuple[list[str], str] | None:
    """Cut before the first stop string, keeping one (possibly empty) piece for each token that was generated."""
    whole = "".join(texts)
    found = [(whole.find(s), s) for s in stops if s and s in whole]
    if not found:
        return None
    at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
    shown, kept, left = at, [], 0
    for text in texts:
        if left >= at + len(stop):
            break
        kept.append(text[: max(0, shown - left)])
        left += len(text)
    return kept, stop


@dataclass(frozen=True, slots=True)
class Ranked:
    """One token of a distribution."""

    token: int
    text: str
    logprob: float
    rank: int


def ranked(before: int, token: int, text: str, count: int, rank: int | None = None) -> list[Ranked]:
    """The generated token (its rank from a hash unless given), then the `count` likeliest, in vLLM's order."""
    seed = zlib.crc32(b"%d,%d" % (before, token))
    top = 0.5 + (seed & 0xFFFF) / 0xFFFF * 0.49
    taken = rank or 1 + (seed >> 16 & 7)
    others = [tape().words[zlib.crc32(b"%d,%d" % (before, r)) & 1023] for r in range(1, count + 1)]
    result = [Ranked(token, text, _logprob(top, taken), taken)]
    for r, word in enumerate(others, 1):
        if r == taken:
            continue
        name = word
        while name == text or any(name == seen.text for seen in result):
            name = tape().words[(tape().words.index(name) + 1) & 1023]
        result.append(Ranked(encode(name.encode())[0], name, _logprob(top, r), r))
    return result


def _logprob(top: float, rank: int) -> float:
    p = top if rank == 1 else (1 - top) / 2.0 ** (rank - 1)
    return round(math.log(p), 6)

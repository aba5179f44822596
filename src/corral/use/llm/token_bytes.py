"""The exact bytes of tokens, asked of the server by id.

A token is a piece of bytes, not of text: an emoji may be three tokens, none of which is text by itself. Servers show
such pieces as "" or "�", and in `top_logprobs` several of them collapse into one key. So views ask for ids, and learn
what the ids mean: from `/tokenize` with `return_token_strs` (whose spelling is checked against the text it came
from), and for the rest from `/detokenize`. Pieces that are no text by themselves are learnt from texts of rare
characters, which tokenizers spell byte by byte. Where nothing helps, the bytes stay None and the id is shown.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterable, Mapping

from corral.client.client import Client
from corral.client.errors import RequestError
from corral.client.reply import Token

_AS_ID = re.compile(r"token_id:(\d+)")
_AT_ONCE, _MOST = 64, 5000


@functools.cache
def _byte_characters() -> dict[str, int]:
    """The characters with which byte-level tokenizers (GPT-2, Llama 3, SmolLM) write bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(others)}


def spelling(strings: list[str], text: str) -> list[bytes] | None:
    """The bytes of each token string of a tokenised text, or None when they do not add up to the text."""
    for read in (_byte_level, _sentence_piece):
        pieces = [read(string) for string in strings]
        known = [piece for piece in pieces if piece is not None]
        whole, wanted = b"".join(known), text.encode("utf-8", "surrogatepass")
        if len(known) == len(pieces) and (whole == wanted or (whole.endswith(wanted) and wanted)):
            return known  # more than the text: a BOS, or the space that SentencePiece puts in front
    return None


def _byte_level(string: str) -> bytes | None:
    characters = _byte_characters()
    try:
        return bytes(characters[character] for character in string)
    except KeyError:
        return None


def _sentence_piece(string: str) -> bytes | None:
    if found := re.fullmatch(r"<0x([0-9A-F]{2})>", string):
        return bytes([int(found[1], 16)])
    return string.replace("▁", " ").encode("utf-8", "surrogatepass")


@functools.cache
def _rare_characters() -> tuple[str, ...]:
    """Texts that make a byte-level tokenizer show its pieces of characters: of all scripts, with and without a blank.

    Many small ones, because a vocabulary may lack some bytes, and a text with one of them tells nothing.
    """
    scripts = [chr(code) for code in range(0x80, 0x10000, 61) if not 0xD800 <= code < 0xE000]
    every = scripts + [chr(code) for code in (*range(0x1F300, 0x1FB00, 11), *range(0x20000, 0x21000, 65))]
    groups = [every[at : at + 16] for at in range(0, len(every), 16)]
    return tuple("".join(group) + " " + " ".join(group) for group in groups)


async def _spelt(client: Client, text: str) -> dict[int, bytes]:
    body = {"model": client.endpoint.model, "prompt": text, "return_token_strs": True}
    page = await client.page("/tokenize", body, timeout_s=30)
    answer = page.json() if page.status == 200 else {}
    pieces = spelling(answer.get("token_strs") or [], text)
    return {} if pieces is None else dict(zip(answer["tokens"], pieces, strict=True))


async def learn(client: Client, ids: Iterable[int], texts: Iterable[str]) -> dict[int, bytes | None]:
    """What the ids mean; `texts` are where most of them come from. None: part of a character, its bytes unknown."""
    known: dict[int, bytes] = {}
    anchor: tuple[int, str] | None = None
    try:
        for text in filter(None, texts):
            known |= await _spelt(client, text)
        wanted = [token for token in dict.fromkeys(ids) if token not in known][:_MOST]
        plain = [(token, piece) for token, piece in known.items() if re.fullmatch(rb"\s?[A-Za-z]+", piece)]
        if plain:
            anchor = plain[0][0], plain[0][1].decode()
        gate = asyncio.Semaphore(_AT_ONCE)
        found = await asyncio.gather(*(_detokenize(client, token, anchor, gate) for token in wanted))
        known |= {token: piece for token, piece in zip(wanted, found, strict=True) if piece is not None}
        pieces = [token for token in wanted if token not in known]
        spelt: dict[int, bytes] = {}
        if pieces:
            for part in await asyncio.gather(*(_spelt(client, text) for text in _rare_characters())):
                spelt |= part
        return {**known, **{token: spelt.get(token) for token in pieces}}
    except (RequestError, ValueError, AttributeError):
        return {**known}  # not vLLM, or an old one: the view shows the server's texts


async def _detokenize(
    client: Client, token: int, anchor: tuple[int, str] | None, gate: asyncio.Semaphore
) -> bytes | None:
    """The text of one id; behind another token where one is known, because decoders drop a leading space."""
    tokens, before = ([anchor[0], token], anchor[1]) if anchor else ([token], "")
    async with gate:
        page = await client.page("/detokenize", {"model": client.endpoint.model, "tokens": tokens}, timeout_s=30)
    text = page.json().get("prompt") if page.status == 200 else None
    if not isinstance(text, str) or "\ufffd" in text:
        return None
    # a decoder may drop the anchor's own leading space
    start = before if text.startswith(before) else before.lstrip()
    return text[len(start) :].encode() if text.startswith(start) else None


def token_id(token: Token) -> int | None:
    """The id of a token, also where the server wrote it as `token_id:N`."""
    found = _AS_ID.fullmatch(token.text)
    return int(found[1]) if found else token.id


def all_ids(tokens: Iterable[Token]) -> list[int]:
    """The ids of tokens and of their alternatives, where the server gives them."""
    each = (one for token in tokens for one in (token, *token.top))
    return [number for one in each if (number := token_id(one)) is not None]


def exact(token: Token, known: Mapping[int, bytes | None]) -> Token:
    """The token with its true bytes and text, as far as they are known."""
    number = token_id(token)
    piece = known.get(number) if number is not None else None
    top = tuple(exact(other, known) for other in token.top)
    if piece is None:
        text = "" if number in known or _AS_ID.fullmatch(token.text) else token.text
        given = text.encode() if text and "\ufffd" not in text else None
        return Token(text, token.logprob, token.rank, number, None if given is None else tuple(given), top)
    return Token(piece.decode("utf-8", "replace"), token.logprob, token.rank, number, tuple(piece), top)

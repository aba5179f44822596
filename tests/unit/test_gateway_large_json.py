"""A large body is read while it arrives: what is found is what decoding the whole of it finds, in any pieces."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.serve.gateway import prompt as prompts
from corral.serve.gateway.large_json import LARGE_BYTES, MOST_FIELDS, BadBodyError, LargeJsonReader
from corral.serve.gateway.prompt import TokenScale, read_prompt
from tests.unit.test_gateway import chat, exchange, gateway_to, in_loop, post, servers

TEXTS = st.text(st.sampled_from('ab"\\{}[],:\n é\u2028😀'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def read(body: bytes, sizes: tuple[int, ...] = (7,)) -> LargeJsonReader:
    """A reader that got the body in pieces of these sizes, in turn."""
    arrived = bytearray()
    reader = LargeJsonReader(arrived)
    at = turn = 0
    while at < len(body):
        size = sizes[turn % len(sizes)]
        arrived += body[at : at + size]
        at, turn = at + size, turn + 1
        reader.advance()
    return reader


@given(
    st.dictionaries(TEXTS.filter(lambda name: name.lower() != "model"), VALUES, max_size=5),
    TEXTS,
    st.sampled_from([None, 1]),
    st.booleans(),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
def test_the_fields_of_any_object_are_found(
    fields: dict[str, Any], model: str, indent: int | None, plain: bool, sizes: list[int]
) -> None:
    value = {**fields, "model": model}
    body = json.dumps(value, indent=indent, ensure_ascii=plain).encode()
    found, lengths = read(body + b"\n ", tuple(sizes)).fields(1 << 20)
    assert {name: json.loads(bytes(raw)) for name, raw in found.items()} == value
    assert lengths == {name: len(bytes(raw)) for name, raw in found.items()}


@given(st.binary(max_size=40) | st.text(st.sampled_from('{}[]",:\\ amodel1'), max_size=40).map(str.encode))
def test_a_model_that_a_parser_would_find_is_the_one_that_is_found(body: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):  # the server refuses it, or it is refused here
        theirs = json.loads(body)
        found, _ = read(body).fields(1 << 20)
        assert isinstance(theirs, dict)
        assert found.keys() == theirs.keys()
        assert json.loads(bytes(found.get("model", b"null"))) == theirs.get("model")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[1]", "not an object"),
        (b'\xef\xbb\xbf{"model":"a"}', "not an object"),
        ('{"model":"a"}'.encode("utf-16-le"), "a name is expected"),
        (b'{"model":"a","model":"b"}', "more than once"),
        (b'{"model":"a","Model":"b"}', "more than once"),
        (b'{"MODEL":"a"}', "not 'model'"),
        (b'{"model":"a","mod\\u0065l":"b"}', "more than once"),
        (b'{"model":"a"} {"model":"b"}', "follows its end"),
        (b'{"model":"a"', "too early"),
        (b'{"model":"a', "too early"),
        (b'{"model" "a"}', "a colon"),
        (b'{"model":"a" "x":1}', "a comma or the end"),
        (b'{"\xff":1}', "utf-8"),
        (b"{" + b",".join(b'"%d":1' % one for one in range(MOST_FIELDS + 1)) + b"}", "fields"),
    ],
)
def test_a_body_that_can_be_read_in_two_ways_is_refused(body: bytes, why: str) -> None:
    for sizes in ((1,), (1 << 20,)):
        with pytest.raises(BadBodyError, match=why):
            read(body, sizes).fields(1 << 20)


def test_how_much_a_body_may_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.serve.gateway.large_json.MOST_NESTED", 100)
    for inner in (b"[" * 999, b"[[]]," * 200, b'["a"],' * 200):
        with pytest.raises(BadBodyError, match="more than 100 lists"):
            read(b'{"prompt": [' + inner).fields(1 << 20)
    flat = b'{"prompt": [' + b'[],"a\\"",1,{},[2,3],' * 200 + b"4]}"
    assert read(flat, (1 << 20,)).fields(10)[1] == {"prompt": len(flat) - len(b'{"prompt": }')}


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "word " * 1_000_000, "model": "m", "max_tokens": 7, "n": 2, "stream": True},
        {"model": "m", "prompt": list(range(300_000))},
        {"model": "m", "messages": [{"role": "user", "content": "é\n" * 400_000}], "tools": [{"x": "y" * 2_000_000}]},
        {"model": "m", "input": ["one", "two"], "extra": "x" * 1_100_000, "max_output_tokens": 3},
    ],
)
def test_a_large_body_is_routed_as_if_it_had_been_decoded(asked: dict[str, Any]) -> None:
    body, scale = json.dumps(asked).encode(), TokenScale()
    whole = read_prompt(body, lambda _: scale)
    pieces = read_prompt(body, lambda _: scale, read(body, (1 << 18, 77)))
    whole.blocks, pieces.blocks = whole.blocks[:10], pieces.blocks[:10]
    if "tools" in asked:  # only their beginning is compared
        whole.blocks = pieces.blocks = []
    assert pieces == whole


@in_loop
async def test_a_large_body_is_never_decoded_at_once(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as (a,), pytest.MonkeyPatch.context() as patch:
        async with gateway_to(a.url) as gateway:
            patch.setattr(prompts, "_decode", lambda body: pytest.fail(f"{len(body)} bytes at once"))
            asked = {"model": "fake", "user": "x" * LARGE_BYTES, **chat("word")}
            assert b" 200 OK" in await exchange(gateway.url, post(asked))
            unknown = await exchange(gateway.url, post({**asked, "model": "other"}))
            assert unknown.startswith(b"HTTP/1.1 404")
            broken = post(asked)
            assert (await exchange(gateway.url, broken[:-1] + b",")).startswith(b"HTTP/1.1 400")

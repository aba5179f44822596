"""The Playground's backend: what is asked, what comes back, and the same request as text."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import UsageError
from corral.base.files import write_atomic
from corral.base.record import dump_json
from corral.client.client import CHAT, COMPLETIONS, Client
from corral.client.endpoint import Endpoint
from corral.console.play import (
    PlayRequest,
    TokenTexts,
    answer_events,
    as_curl,
    as_python,
    heat_map,
    parameter_table,
    pieces_of,
    read_play,
    servers,
    stream_request,
)
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from corral.fake.words import decode
from corral.plan.choose import make_plan
from corral.plan.contract import Goal
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import read_facts
from tests.console_home import make, make_fleet

MESSAGES = [{"role": "user", "content": "Say something about Tokyo."}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(answer_tokens=None)) as running:
        yield running


def told(server: FakeServer, asked: PlayRequest, spellings: TokenTexts | None = None) -> list[dict[str, Any]]:
    """Every event of one answer."""

    async def listen() -> list[dict[str, Any]]:
        async with Client(Endpoint(server.url, "fake")) as client:
            return [event async for event in answer_events(client, asked, spellings or TokenTexts())]

    return asyncio.run(listen())


@pytest.mark.parametrize("prompt", ["Say something.", MESSAGES], ids=["completion", "chat"])
def test_an_answer_comes_in_pieces_then_as_exact_tokens(server: FakeServer, prompt: Any) -> None:
    events = told(server, PlayRequest("", prompt, {"max_tokens": 12, "temperature": 0.7}, 3))
    kinds = [event["kind"] for event in events]
    assert kinds == ["prompt", *["piece"] * 12, "end", "spans"]
    streamed = "".join(event["text"] for event in events if event["kind"] == "piece")
    spans = events[-1]["spans"]
    assert streamed
    assert "".join(span["text"] for span in spans) == streamed
    tokens = [token for span in spans for token in span["tokens"]]
    assert len(tokens) == 12
    for token in tokens:
        assert decode([token["id"]]).decode() == token["text"]
        assert len(token["top"]) == 3
        assert all(other["id"] is not None and other["text"] and other["logprob"] <= 0 for other in token["top"])
    assert events[-2]["completion_tokens"] == 12
    assert events[-2]["finish"] == ["length"]


def test_a_branch_goes_on_from_the_ids_of_prompt_and_kept_tokens(server: FakeServer) -> None:
    """Whatever an answer was cut at, the model sees exactly those tokens, also where the question was a chat."""
    first = told(server, PlayRequest("", MESSAGES, {"max_tokens": 6, "temperature": 0.7}, 3))
    ids = next(event["ids"] for event in first if event["kind"] == "prompt")
    tokens = [token for span in first[-1]["spans"] for token in span["tokens"]]
    other = next(one for one in tokens[2]["top"] if one["id"] != tokens[2]["id"])
    prompt = [*ids, *(token["id"] for token in tokens[:2]), other["id"]]
    path, body = stream_request(PlayRequest("", prompt, {"max_tokens": 4}, 3))
    assert (path, body["prompt"]) == (COMPLETIONS, prompt)
    branch = told(server, PlayRequest("", prompt, {"max_tokens": 4}, 3))
    assert next(event["ids"] for event in branch if event["kind"] == "prompt") == prompt


def test_without_alternatives_nothing_but_text_is_asked_for(server: FakeServer) -> None:
    asked = PlayRequest("", "Say something.", {"max_tokens": 4}, None)
    path, body = stream_request(asked)
    assert path == COMPLETIONS
    assert not {"logprobs", "return_token_ids", "return_tokens_as_token_ids"} & body.keys()
    assert {event["kind"] for event in told(server, asked)} == {"piece", "end"}


def test_several_answers_are_told_apart(server: FakeServer) -> None:
    events = told(server, PlayRequest("", "Say something.", {"max_tokens": 3, "n": 2}, 2))
    assert {event["index"] for event in events if event["kind"] == "piece"} == {0, 1}
    assert [event["index"] for event in events if event["kind"] == "spans"] == [0, 1]


def test_leaving_early_ends_the_request() -> None:
    with FakeServer(FakeOptions(answer_tokens=None, max_model_len=100_000)) as server:

        async def leave() -> None:
            async with Client(Endpoint(server.url, "fake")) as client:
                asked = PlayRequest("", "Say something.", {"max_tokens": 90_000}, None)
                events = answer_events(client, asked, TokenTexts())
                await anext(events)
                await events.aclose()  # type: ignore[attr-defined]
                for _ in range(600):
                    page = await client.page("/metrics")
                    if b'num_requests_running{engine="0",model_name="fake"} 0' in page.body:
                        return
                    await asyncio.sleep(0.05)
            raise AssertionError("the request still runs")

        asyncio.run(leave())


def test_what_ids_mean_is_asked_once(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    spellings = TokenTexts()
    asked = PlayRequest("", "Say something.", {"max_tokens": 5, "temperature": 0.0}, 2)
    first = told(server, asked, spellings)

    async def refuse(*_: object) -> dict[int, bytes | None]:
        raise AssertionError("asked again")

    monkeypatch.setattr("corral.use.llm.token_bytes.learn", refuse)
    assert told(server, asked, spellings)[-1] == first[-1]


def test_the_prompt_as_a_heat_map(server: FakeServer) -> None:
    async def look() -> dict[str, Any]:
        async with Client(Endpoint(server.url, "fake")) as client:
            return await heat_map(client, PlayRequest("", "San Francisco is a city", {}, 4))

    found = asyncio.run(look())
    assert "".join(span["text"] for span in found["spans"]) == "San Francisco is a city"
    assert found["spans"][0]["logprob"] is None  # nothing stands before the first
    assert all(span["logprob"] <= 0 for span in found["spans"][1:])
    assert found["tokens"] == len(found["spans"])
    assert found["perplexity"] > 1


@pytest.mark.parametrize("data", [b"{", b"[]", b"null", b'{"choices":[5,{}]}', b"\xff", b'{"choices":{"a":1}}',
                                  b'{"choices":[{"logprobs":{"content":[{}]}}]}'])  # fmt: skip
def test_an_event_that_is_none_says_nothing(data: bytes) -> None:
    assert list(pieces_of(data, 5)) == []


def test_text_is_text_whatever_it_looks_like() -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "<img src=x onerror=alert(1)>"}}]}
    [piece] = pieces_of(json.dumps(event).encode(), None)
    assert piece["text"] == "<img src=x onerror=alert(1)>"


# What the page may ask


@pytest.mark.parametrize("body", [
    {}, {"prompt": ""}, {"prompt": 5}, {"prompt": []}, {"prompt": "x", "sampling": []}, {"prompt": "x", "server": 3},
    {"prompt": "x", "alternatives": 21}, {"prompt": "x", "alternatives": -1}, {"prompt": "x", "alternatives": "5"},
    {"prompt": [{"role": "user"}]}, {"prompt": [{"role": 1, "content": "x"}]},
], ids=repr)  # fmt: skip
def test_a_question_that_is_none_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read_play(body)


def test_a_parameter_out_of_range_is_refused_with_the_range() -> None:
    asked = read_play({"prompt": "x", "sampling": {"temperature": 9}})
    with pytest.raises(UsageError, match="temperature cannot be 9") as caught:
        stream_request(asked)
    assert "0 to 2" in caught.value.remedy


def test_every_parameter_but_the_pages_own_is_offered() -> None:
    names = {row["name"] for row in parameter_table()}
    assert {"temperature", "top_k", "min_p", "seed", "stop", "bad_words", "json_schema", "regex", "choice",
            "grammar"} <= names  # fmt: skip
    assert not {"logprobs", "prompt_logprobs"} & names
    assert all(row["help"] for row in parameter_table())


def test_structured_output_is_passed_on() -> None:
    asked = read_play({"prompt": MESSAGES, "sampling": {"json_schema": '{"type": "object"}'}, "alternatives": None})
    path, body = stream_request(asked)
    assert path == CHAT
    assert body["structured_outputs"] == {"json": {"type": "object"}}


# The request as text


def environment(server: FakeServer) -> dict[str, str]:
    return {**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"}


ASKED = [
    PlayRequest("", "It's \"quoted\" $HOME `x` \\n 東京\nsecond line", {"max_tokens": 5, "temperature": 0.0}, None),
    PlayRequest("", MESSAGES, {"max_tokens": 5, "temperature": 0.3, "stop": ["zz'z"], "seed": 3}, 2),
    PlayRequest("", [83, 97, 110], {}, None),
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED, ids=["completion", "chat", "ids"])
def test_python_as_shown_gives_the_same_answer(server: FakeServer, asked: PlayRequest, tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    script.write_text(as_python(asked), encoding="utf-8")
    done = subprocess.run([sys.executable, script], env=environment(server), capture_output=True, timeout=120)
    wanted = "".join(event["text"] for event in told(server, asked) if event["kind"] == "piece")
    assert done.stdout.decode() == wanted, done.stderr.decode()


@pytest.mark.parametrize("asked", ASKED, ids=["completion", "chat", "ids"])
def test_curl_as_shown_gives_the_same_answer(server: FakeServer, asked: PlayRequest) -> None:
    done = subprocess.run(["bash", "-c", as_curl(asked, "fake")], env=environment(server), capture_output=True,
                          timeout=120)  # fmt: skip
    data = [line.removeprefix(b"data: ") for line in done.stdout.splitlines() if line.startswith(b"data: {")]
    got = [piece["text"] for one in data for piece in pieces_of(one, asked.alternatives) if piece["kind"] == "piece"]
    assert got == [event["text"] for event in told(server, asked) if event["kind"] == "piece"], done.stderr


def test_a_deployment_is_named_and_its_key_is_not() -> None:
    asked = PlayRequest("my model", "x", {}, None)
    assert as_curl(asked, "m").startswith("eval \"$(corral env 'my model')\"\n")
    assert "corral.connect('my model')" in as_python(asked)


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


def seen(url: Any = f"data:image/png;base64,{PNG}", role: str = "user") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "text", "text": "What?"}]
    return {"prompt": [{"role": role, "content": parts}], "server": "eyes"}


def test_a_picture_is_sent_and_left_out_of_the_text() -> None:
    asked = read_play(seen())
    _, body = stream_request(asked)
    assert body["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "text", "text": "What?"},
    ]
    for text in (as_curl(asked, "m"), as_python(asked)):
        assert PNG not in text
        assert f"data:image/png;base64,<picture 1: {len(PNG)} characters>" in text
        assert "# <picture N: …> stands for the picture that was sent" in text
    compile(as_python(asked), "shown", "exec")
    assert "# <picture" not in as_curl(PlayRequest("", MESSAGES), "m")


ADDRESSES = ["http://169.254.169.254/latest", "https://example.org/x.png", "file:///etc/passwd", "/etc/passwd",
             "data:text/html;base64,eA==", "data:image/svg+xml;base64,eA==", "data:image/png,x", "", None, 5,
             "data:image/png;base64,", "data:image/png;base64,eA==\n", "data:image/png;base64,e<>=="]  # fmt: skip


@pytest.mark.parametrize("url", ADDRESSES, ids=repr)
def test_a_picture_is_bytes_and_no_address_that_a_server_would_fetch(url: Any) -> None:
    with pytest.raises(UsageError):
        read_play(seen(url))


PARTS = [None, "x", {}, {"type": "text"}, {"type": "text", "text": 5}, {"type": "video_url"},
         {"type": "image_url", "image_url": "data:image/png;base64,eA=="}]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_other_parts_of_a_message_are_refused(part: Any) -> None:
    with pytest.raises(UsageError):
        read_play({"prompt": [{"role": "user", "content": [part]}]})
    with pytest.raises(UsageError):
        read_play(seen(role="system"))


def test_pictures_are_offered_where_the_plans_record_says_so(clean_home: Path) -> None:
    for name, model in (("eyes", "qwen2.5-vl-7b-instruct"), ("blind", "llama-3.1-8b"), ("unplanned", "")):
        made = make(name).agent().course(("starting", 1), ("ready", 20)).serves("http://127.0.0.1:9/v1")
        if model:
            facts = read_facts(model, offline=True)
            write_atomic(made.folder.plan, dump_json(make_plan(facts, parse_gpus("1xH100", None, "ib-ndr"), Goal())))
    make_fleet("herd", "eyes", ("eyes",))
    assert {one["name"]: one["images"] for one in servers()} == {"blind": False, "unplanned": False, "herd": True}


def test_the_environments_server_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert servers() == []
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere:1/v1")
    assert [(one["name"], one["ready"]) for one in servers()] == [("", True)]

"""The openai SDK: every shape of request that it sends, and every error that it names."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from typing import Any
from urllib.parse import urlsplit

import openai

MODEL = os.environ["MODEL"]
client = openai.OpenAI(max_retries=0)
ASKED: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SUM: list[Any] = [{"role": "user", "content": "Add 2 and 3."}]
ADD: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": ADD}}]
NAMED: Any = {"type": "function", "function": {"name": "add"}}


def chat(**more: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": ASKED, "max_tokens": 8, "temperature": 0, **more}
    )


def refused(kind: type[openai.APIStatusError], call: Any) -> openai.APIStatusError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def call_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    refused(openai.NotFoundError, lambda: client.models.retrieve("absent"))


def call_completion() -> None:
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.usage
    assert answer.usage.completion_tokens == 4


def call_completion_stream() -> None:
    asked: Any = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    pieces = [part.choices[0].text for part in client.completions.create(stream=True, **asked) if part.choices]
    assert "".join(pieces) == client.completions.create(**asked).choices[0].text


def call_chat() -> None:
    assert "Paris" in chat().choices[0].message.content


def call_chat_stream_with_usage() -> None:
    parts = list(chat(stream=True, stream_options={"include_usage": True}))
    assert "Paris" in "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert parts[-1].usage.completion_tokens <= 8


def call_chat_async() -> None:
    async def both() -> None:
        async with openai.AsyncOpenAI(max_retries=0) as many:
            asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 8, "temperature": 0}
            answers = await asyncio.gather(*(many.chat.completions.create(**asked) for _ in range(3)))
            assert all("Paris" in answer.choices[0].message.content for answer in answers)
            stream = await many.chat.completions.create(stream=True, **asked)
            assert "Paris" in "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])

    asyncio.run(both())


def call_n_and_stop() -> None:
    answer = chat(n=2, temperature=1, seed=3, stop=["Paris"])
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all("Paris" not in choice.message.content for choice in answer.choices)


def call_logprobs() -> None:
    tokens = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=3, logprobs=1, temperature=0)
    assert answer.choices[0].logprobs
    assert len(answer.choices[0].logprobs.tokens or []) == 3


def call_json_schema() -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": ADD}}
    found = json.loads(chat(messages=SUM, response_format=shape, max_tokens=40).choices[0].message.content)
    assert set(found) == {"a", "b"}


def call_json_object() -> None:
    answer = chat(response_format={"type": "json_object"}, max_tokens=20)
    assert answer.choices[0].finish_reason == "length" or json.loads(answer.choices[0].message.content)


def call_tools_auto() -> None:
    assert chat(messages=SUM, tools=TOOLS, max_tokens=16).choices[0].finish_reason in ("stop", "length", "tool_calls")


def call_tools_auto_read_by_the_parser() -> None:
    """The model's form of a call, which a model of this size does not find by itself."""
    said = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 2, "b": 3\}\}\n</tool_call>'
    asked = {"messages": SUM, "tools": TOOLS, "max_tokens": 60, "extra_body": {"structured_outputs": {"regex": said}}}
    (made,) = chat(**asked).choices[0].message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 2, "b": 3})
    parts = [part.choices[0].delta.tool_calls for part in chat(stream=True, **asked) if part.choices]
    streamed = [part[0].function for part in parts if part]
    assert "".join(part.name or "" for part in streamed) == "add"
    assert json.loads("".join(part.arguments or "" for part in streamed)) == {"a": 2, "b": 3}


def call_tools_required() -> None:
    answer = chat(messages=SUM, tools=TOOLS, tool_choice="required", max_tokens=60)
    made = answer.choices[0].message.tool_calls[0]
    assert set(json.loads(made.function.arguments)) == {"a", "b"}
    result = [{"role": "tool", "tool_call_id": made.id, "content": "5"}]
    assert chat(messages=[*SUM, answer.choices[0].message, *result], tools=TOOLS).choices[0].message.content


def call_tools_named_and_streamed() -> None:
    (made,) = chat(messages=SUM, tools=TOOLS, tool_choice=NAMED, max_tokens=60).choices[0].message.tool_calls
    assert set(json.loads(made.function.arguments)) == {"a", "b"}
    stream = chat(messages=SUM, tools=TOOLS, tool_choice=NAMED, max_tokens=60, stream=True)
    parts = [part.choices[0].delta.tool_calls for part in stream if part.choices]
    text = "".join(part[0].function.arguments or "" for part in parts if part)
    assert set(json.loads(text)) == {"a", "b"}


def call_a_stream_cut_midway() -> None:
    for _ in range(4):
        with chat(max_tokens=2000, stream=True, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
    assert "Paris" in chat().choices[0].message.content


def call_wrong_key() -> None:
    with openai.OpenAI(api_key="wrong", max_retries=0) as stranger:
        refused(openai.AuthenticationError, stranger.models.list)
        refused(openai.AuthenticationError, lambda: stranger.completions.create(model=MODEL, prompt="a"))


def call_too_long() -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 20_000}]
    assert "context length" in str(refused(openai.BadRequestError, lambda: chat(messages=long)))
    refused(openai.BadRequestError, lambda: list(chat(messages=long, stream=True)))


def call_unknown_model() -> None:
    refused(openai.NotFoundError, lambda: chat(model="absent"))


def call_bad_parameter() -> None:
    refused(openai.BadRequestError, lambda: chat(temperature=9))


def call_embeddings_are_not_there() -> None:
    error = refused(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"))
    assert isinstance(error.body, dict)
    assert "/v1/embeddings" in error.body["message"]


def call_responses() -> None:
    first = client.responses.create(model=MODEL, input="What is the capital of France?", max_output_tokens=8)
    assert first.usage
    assert first.usage.output_tokens <= 8
    assert first.output_text
    more = client.responses.create(model=MODEL, input="Why?", previous_response_id=first.id, max_output_tokens=8)
    assert more.previous_response_id == first.id
    assert client.responses.retrieve(first.id).id == first.id


def call_responses_stream() -> None:
    kinds = [
        event.type for event in client.responses.create(model=MODEL, input="Hi", max_output_tokens=8, stream=True)
    ]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds


def call_request_ids() -> None:
    assert chat()._request_id
    assert chat(extra_headers={"X-Request-Id": "mine-1"})._request_id == "mine-1"
    assert refused(openai.BadRequestError, lambda: chat(temperature=9)).request_id


def call_head_has_no_body() -> None:
    address = urlsplit(str(client.base_url))
    to = http.client.HTTPConnection(address.netloc, timeout=60)
    for method, path in (("HEAD", "/health"), ("GET", "/health"), ("HEAD", "/v1/models"), ("GET", "/health")):
        to.request(method, path, headers={"Authorization": f"Bearer {client.api_key}"})
        answer = to.getresponse()  # of a connection that a body would leave out of step
        assert answer.status in (200, 405)
        assert answer.read() == b"" or method == "GET"


def call_tokenize() -> None:
    root = str(client.base_url).removesuffix("/v1/")
    asked: Any = {"model": MODEL, "prompt": "San Francisco"}
    found: Any = client.post(f"{root}/tokenize", body=asked, cast_to=object)
    again: Any = client.post(f"{root}/detokenize", body={"model": MODEL, "tokens": found["tokens"]}, cast_to=object)
    assert again["prompt"] == "San Francisco"
    assert client.get(f"{root}/tokenizer_info", cast_to=object)

"""The openai SDK's files and batches, against `corral batch serve`."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import openai

MODEL = os.environ["MODEL"]
client = openai.OpenAI(max_retries=0)


def rows(count: int, tokens: int = 4, too_long: int | None = None) -> Any:
    chat = {
        "model": MODEL,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "seed": n}}
        for n in range(count)
    ]
    if too_long is not None:
        lines[too_long]["body"]["messages"] = [{"role": "user", "content": "word " * 40_000}]  # type: ignore[index]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=("rows.jsonl", text), purpose="batch")


def started(file: Any) -> Any:
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "the tier"}
    )


def ended(batch: Any) -> Any:
    while (found := client.batches.retrieve(batch.id)).status in (
        "validating",
        "in_progress",
        "finalizing",
        "cancelling",
    ):
        time.sleep(0.2)
    return found


def call_files() -> None:
    file = rows(2)
    assert client.files.retrieve(file.id).bytes == file.bytes
    assert client.files.content(file.id).text.count("custom_id") == 2
    assert file.id in [one.id for one in client.files.list()]
    assert client.files.delete(file.id).deleted
    try:
        client.files.retrieve(file.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted file is there")


def call_batch() -> None:
    batch = ended(started(rows(3)))
    assert (batch.status, batch.request_counts.completed) == ("completed", 3), batch
    assert batch.metadata == {"of": "the tier"}
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in answers) == ["r0", "r1", "r2"]
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in answers)
    assert batch.id in [one.id for one in client.batches.list()]


def call_too_long_row() -> None:
    found = ended(started(rows(3, too_long=1)))
    assert found.status == "completed", found
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1), counts
    (refused,) = [json.loads(line) for line in client.files.content(found.error_file_id).text.splitlines()]
    assert refused["custom_id"] == "r1", refused
    assert refused["response"]["status_code"] == 400, refused


def call_cancel() -> None:
    batch = started(rows(200, 300))
    client.batches.cancel(batch.id)
    assert ended(batch).status == "cancelled"


def call_wrong_key() -> None:
    with openai.OpenAI(api_key="wrong", max_retries=0) as stranger:
        try:
            stranger.batches.list()
        except openai.AuthenticationError:
            return
    raise AssertionError("a wrong key was taken")

"""Batches through real vLLM: offline from nothing to nothing, and online through the death of the engine.

The second's server loses whatever can be lost: first the command that starts it, then its engine, at last its agent.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import FAST, Corral, free_port
from tests.integration.endings import failed, nothing_left
from tests.until import until


def write_rows(path: Path, count: int) -> None:
    rows = [{"id": f"r{n}", "prompt": f"Row number {n} says"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]  # text would also be split at U+2028


def launches(corral: Corral) -> set[Path]:
    return set((corral.home / "deployments").glob("*"))


def test_offline_starts_runs_and_stops(corral: Corral, tiny_model: Path, tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.parquet"
    write_rows(rows, 40)
    argv = ["batch", str(rows), "-o", str(output), "--start", str(tiny_model), *FAST, "--max-tokens", "6",
            "--temperature", "0", "--param", "ignore_eos=true", "--ordered"]  # fmt: skip
    done = corral.run(*argv)
    assert "done: 40 of 40 rows" in done.stderr
    import pyarrow.parquet as parquet

    table = parquet.read_table(output)
    assert table.column("id").to_pylist() == [f"r{n}" for n in range(40)]
    assert set(table.column("completion_tokens").to_pylist()) == {6}
    assert [entry["state"] for entry in corral.json("ps") if entry["name"].startswith("batch-")] in ([], ["stopped"])
    before = launches(corral)
    assert "already complete" in corral.run(*argv).stderr
    assert launches(corral) == before  # and starts nothing


@pytest.fixture(scope="module")
def batched(corral: Corral, tiny_model: Path) -> Iterator[str]:
    """A server that comes up although `up` was killed as soon as there was an agent."""
    # not the default port, which other servers on this machine may take between lives
    start = ["up", str(tiny_model), "--name", "batched", *FAST, "--context", "256", "--restart", "2"]
    with corral.start(*start, "--port", free_port()) as process:
        until(lambda: process.poll() is not None or agent_file(corral).exists(), "the agent")
        process.kill()
        _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    assert corral.run("wait", "batched").returncode == 0
    yield "batched"
    corral.run("down", "batched", check=False)


def agent_file(corral: Corral) -> Path:
    return corral.home / "deployments" / "batched" / "rank0" / "agent.json"


def test_the_engines_death_is_waited_out_and_a_long_prompt_is_named(
    corral: Corral, batched: str, tmp_path: Path
) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 600)
    with rows.open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "far too many words " * 400}) + "\n")
    argv = ["batch", str(rows), "-o", str(output), "--deployment", batched, "--max-tokens", "48",
            "--temperature", "0", "--param", "ignore_eos=true", "--skip-bad"]  # fmt: skip
    # known before the batch begins: on a busy machine all rows could be done before `events` has answered
    journal = corral.run("events", batched, "--json").stdout.splitlines()
    engine = [json.loads(line)["pid"] for line in journal if '"pid"' in line][-1]
    with corral.start(*argv) as run:
        while not (output.exists() and output.stat().st_size):
            time.sleep(0.05)
            assert run.poll() is None, run.stderr and run.stderr.read()
        os.kill(engine, signal.SIGKILL)
        _, said = run.communicate(timeout=600)
    assert run.returncode == 1, said
    assert "waiting" in said, said
    found = [line["id"] for line in lines(output)]
    assert sorted(found) == sorted(f"r{n}" for n in range(600))
    (error,) = lines(tmp_path / "out.errors.jsonl")
    assert error["custom_id"] == "long"
    assert "the context holds 256" in error["error"]["message"]


def test_the_same_rows_over_http_and_in_the_engines_process(corral: Corral, batched: str, tmp_path: Path) -> None:
    """Completions, chats, log-probabilities and two refusals."""
    rows = tmp_path / "kinds.jsonl"
    chat: dict[str, Any]
    text: dict[str, Any]
    chat, text = {"messages": [{"role": "user", "content": "Hello"}]}, {"prompt": "Row number 5 says"}
    asked = [text, {**text, "n": 2, "seed": 1}, {**text, "logprobs": 2}, {**text, "echo": True}, chat,
             {**chat, "logprobs": True, "top_logprobs": 2}, {**text, "logit_bias": {"999999": 1}}]  # fmt: skip
    rows.write_text("".join(
        json.dumps({"custom_id": f"k{n}", "method": "POST",
                    "url": "/v1/chat/completions" if "messages" in body else "/v1/completions",
                    "body": {"max_tokens": 6, "temperature": 0, **body}}) + "\n"
        for n, body in enumerate(asked)
    ))  # fmt: skip
    found = []
    for name, more in (("http", []), ("process", ["--in-process"])):
        output = tmp_path / f"{name}.jsonl"
        done = corral.run(
            "batch", str(rows), "-o", str(output), "--deployment", batched, "--ordered", *more, check=False
        )
        assert done.returncode == 1, done.stderr
        errors = sorted(lines(output.with_suffix(".errors.jsonl")), key=lambda line: str(line["custom_id"]))
        refused = [(line["custom_id"], line["error"], line["response"]) for line in errors]
        assert [name for name, _, _ in refused] == ["k1", "k6"]  # two answers of greedy sampling; no such token
        found.append([*map(_essence, lines(output)), refused])
    assert found[0] == found[1]
    assert len(found[0]) == len(asked) - 1


def _essence(line: dict[str, Any]) -> Any:
    """What of a result line must be the same: all but the request's own name and moment, and the last digits."""
    body = line["response"]["body"]
    rough = json.loads(json.dumps(body["choices"]), parse_float=lambda text: round(float(text), 3))
    return line["custom_id"], rough, body["usage"], sorted(body)


def test_kill_9_of_the_agent(corral: Corral, batched: str) -> None:
    os.kill(json.loads(agent_file(corral).read_text())["pid"], signal.SIGKILL)
    assert failed(corral, batched)["reason"] == "agent_killed"
    nothing_left(corral, batched)

"""Batches through real vLLM: offline from nothing to nothing, and online through the death of the engine."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.integration.conftest import FAST, Corral, free_port


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
    argv = ["batch", str(rows), "-o", str(output), "--model", str(tiny_model), *FAST, "--max-tokens", "6",
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


def test_the_engines_death_is_waited_out_and_a_long_prompt_is_named(
    corral: Corral, tiny_model: Path, tmp_path: Path
) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 600)
    # not the default port, which other servers on this machine may take between lives
    corral.run(
        "up", str(tiny_model), "--name", "batched", *FAST, "--context", "256", "--restart", "2", "--port", free_port()
    )
    try:
        with rows.open("a") as file:
            file.write(json.dumps({"id": "long", "prompt": "far too many words " * 400}) + "\n")
        argv = ["batch", str(rows), "-o", str(output), "--deployment", "batched", "--max-tokens", "48",
                "--temperature", "0", "--param", "ignore_eos=true", "--skip-bad"]  # fmt: skip
        # known before the batch begins: on a busy machine all rows could be done before `events` has answered
        journal = corral.run("events", "batched", "--json").stdout.splitlines()
        engine = next(json.loads(line)["pid"] for line in journal if '"pid"' in line)
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
    finally:
        corral.run("down", "batched")

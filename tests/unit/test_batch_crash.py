"""The promise under torture: a runner killed at 200 random moments, torn files, faults of every kind, a full disk."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batch_harness import Nursery, Reins, control, fake_server, torment, write_rows
from tests.skips import NO_MOUNT
from tests.testbed import NOT_ROOT

FAULTS = (
    "status:code=503,p=0.03", "status:code=500,p=0.03", "status:code=429,p=0.03,retry_after=0.01", "reset:p=0.02",
    "reset:when=mid,p=0.02", "cut:p=0.02", "abort:p=0.02", "garbage:p=0.02", "split:p=0.05", "slow:p=0.05,factor=4",
)  # fmt: skip
ANSWERS = ("--answer-tokens", "4-16")


def batch(url: str, rows: Path, output: Path, *more: str) -> list[str]:
    return ["batch", str(rows), "-o", str(output), "--url", url, "--backoff", "0.01", "--attempts", "50", *more]


def run(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "corral", *argv], capture_output=True, text=True, timeout=120)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(tmp_path / "nursery.log")
    yield made
    made.close()


def lines_by_id(path: Path) -> dict[str, bytes]:
    lines = path.read_bytes().splitlines(keepends=True)
    ids = [json.loads(line)["custom_id"] for line in lines]
    doubled = [name for name, count in Counter(ids).items() if count > 1]
    assert not doubled, f"ids with more than one line: {doubled[:5]}"
    return dict(zip(ids, lines, strict=True))


def test_two_hundred_kills_and_torn_files_lose_nothing(tmp_path: Path, nursery: Nursery) -> None:
    rows, output, calm = tmp_path / "rows.jsonl", tmp_path / "out.jsonl", tmp_path / "calm.jsonl"
    write_rows(rows, 4000)
    with fake_server(*ANSWERS) as url:
        assert run(*batch(url, rows, calm)).returncode == 0
        control(url, "faults", {"faults": list(FAULTS)})
        argv = batch(url, rows, output, "--concurrency", "4")
        ended = torment(nursery, argv, output, 200, random.Random(7), Reins(url, 4000, 200))
    assert ended.kills == 200
    assert ended.fruitful >= 40, "the kills must hit a job that is under way"
    assert ended.before_last < 4000
    assert ended.code == 0, (tmp_path / "nursery.log").read_text()[-2000:]
    expected, found = lines_by_id(calm), lines_by_id(output)
    assert found.keys() == expected.keys()
    assert found == expected  # byte for byte
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "calm.jsonl", "calm.jsonl.corral", "nursery.log", "out.jsonl", "out.jsonl.corral", "rows.jsonl",
    ]  # fmt: skip
    assert not [path for path in Path(f"{output}.corral").iterdir() if "lock" in path.name or "tmp" in path.name]


def test_a_flapping_server_is_waited_for(tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 200)
    with fake_server(*ANSWERS, "--requests-per-s", "100", "--fault", "flap:down=0.3,period=1.2") as url:
        control(url, "faults", {"faults": []})
        argv = batch(url, rows, output)
        control(url, "faults", {"faults": ["flap:down=0.3,period=1.2"]})
        done = run(*argv)
    assert done.returncode == 0, done.stderr
    assert len(lines_by_id(output)) == 200


@pytest.mark.skipif(os.geteuid() != 0, reason=NOT_ROOT)  # to mount a small file system
def test_a_full_disk_stops_cleanly_and_is_continued(tmp_path: Path) -> None:
    disk, rows = tmp_path / "disk", tmp_path / "rows.jsonl"
    disk.mkdir()
    write_rows(rows, 1500)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(NO_MOUNT)
    output = disk / "out.jsonl"
    try:
        with fake_server(*ANSWERS) as url:
            full = run(*batch(url, rows, output))
            assert full.returncode == 10, full.stderr
            assert "No space left" in full.stderr
            assert "run the same command again" in full.stderr
            kept = lines_by_id(output)
            assert 0 < len(kept) < 1500
            status = json.loads(run("batch", "status", str(output), "--json").stdout)
            assert status["fine"] == len(kept)
            again = run(*batch(url, rows, output))
            assert again.returncode == 10
            assert lines_by_id(output).items() >= kept.items()
            subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
            assert run(*batch(url, rows, output)).returncode == 0
        assert len(lines_by_id(output)) == 1500
        assert lines_by_id(output).items() >= kept.items()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)

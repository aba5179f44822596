"""A home that cannot be written: what is known is told, what cannot be known is said with its cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.ssh_bench import Bench
from tests.testbed import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

MOUNT = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def read_only(bench: Bench, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that finds Corral's home mounted read-only; nobody else does."""
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        MOUNT,
        bench.env["CORRAL_HOME"],
        sys.executable,
        "-P",
        "-m",
        "corral",
    ]
    return subprocess.run(
        [*command, *words], env=bench.env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )


def test_what_is_known_is_told_and_what_is_not_is_unknown(bench: Bench, ready: str) -> None:
    for verb in ("ps", "status", "logs", "events", "env"):
        done = read_only(bench, verb, *([ready] if verb != "ps" else []))
        assert done.returncode == 0, f"{verb}: {done.stdout}{done.stderr}"
        assert done.stdout.strip()
    listed = read_only(bench, "ps")
    assert "unknown, ready" in listed.stdout
    assert "what node1 reports cannot be kept here: Read-only file system" in listed.stderr
    asked = read_only(bench, "complete", "--deployment", ready, "Hello")
    assert (asked.returncode, "Read-only file system" in asked.stderr) == (4, True), asked.stderr
    assert bench.status(ready)["state"] == "ready"  # once it can be written again


def test_down_names_the_file_and_can_be_repeated(bench: Bench, ready: str) -> None:
    done = read_only(bench, "down", ready)
    assert (done.returncode, "Read-only file system" in done.stderr) == (10, True), done.stderr
    assert str(Path(bench.env["CORRAL_HOME"]) / "deployments" / ready) in done.stderr
    assert bench.run("down", ready).returncode == 0
    bench.nothing_left()

"""`corral.plan()`: what `corral plan --json` prints, as a record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import corral
from corral.base.record import to_json
from corral.deploy.profile import merging
from corral.plan.hardware.inventory import Inventory
from tests.unit.conftest import in_process

HERE = Inventory(None, 1, 1, 0, 8, 32 << 30, 30 << 30)
MANY = (
    "--gpus", "8xH100", "--nodes", "2", "--network", "ib-hdr", "--context", "32k", "--goal", "latency",
    "--concurrency", "8", "--input-len", "1000", "--output-len", "99", "--price", "2.5", "--storage", "0.4",
    "--set", "tensor=8", "--", "--max-num-seqs", "64",
)  # fmt: skip
SAME: dict[str, Any] = {
    "gpus": "8xH100", "nodes": 2, "network": "ib-hdr", "context": "32k", "goal": "latency", "concurrency": 8,
    "input_len": 1000, "output_len": 99, "price": 2.5, "storage": 0.4, "fixed": {"tensor": 8},
    "engine_args": ["--max-num-seqs", "64"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("llama-3.1-8b", "--gpus", "8xH100"), {"model": "llama-3.1-8b", "gpus": "8xH100"}),
        (("llama-3.1-405b", *MANY), {"model": "llama-3.1-405b", **SAME}),
        (("llama-3.1-405b", "--gpus", "1xL4"), {"model": "llama-3.1-405b", "gpus": "1xL4"}),
        (("llama-3.1-8b", "--on", "lambda-1cc"), {"model": "llama-3.1-8b", "on": "lambda-1cc"}),
        (("smollm2",), {"model": "smollm2"}),
    ],
)
def test_python_has_the_plan_of_the_command_line(
    words: tuple[str, ...],
    options: dict[str, Any],
    clean_home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merging, "probe", lambda: HERE)
    planned = corral.plan(**options, offline=True)
    assert isinstance(planned, corral.Plan)
    _, printed, _ = in_process(capsys, "plan", "--offline", "--json")(*words)
    assert json.loads(printed) == to_json(planned)


def test_the_package_of_the_planner_is_callable_too(clean_home: Path) -> None:
    """`import corral.plan.contract` binds the package to the same name."""
    program = "import corral; {}; print(corral.plan('smollm2', gpus='1xH100', offline=True).verdict)"
    for first in ("pass", "import corral.plan.contract", "from corral.plan import choose; corral.Plan"):
        done = subprocess.run([sys.executable, "-c", program.format(first)], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("fits\n", "")


@pytest.mark.parametrize(
    "wrong",
    [{"goal": "fast"}, {"network": "tin-cans"}, {"fixed": {"tensr": 4}}, {"context": "long"}, {"model": None}],
)
def test_what_the_command_line_refuses_is_refused(wrong: dict[str, Any], clean_home: Path) -> None:
    with pytest.raises(corral.CorralError):
        corral.plan(**{"model": "llama-3.1-8b", "gpus": "8xH100", **wrong})

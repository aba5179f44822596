"""Screens at 60, 80 and 120 columns, kept as text in golden/screens.

`CORRAL_GOLDEN=write` writes them anew, to be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from corral.cli import main
from corral.lab.report import tables
from corral.lab.report.batch import progress_line
from corral.lab.report.tables import table_lines
from tests.unit import shown

GOLDEN = Path(__file__).parent / "golden" / "screens"
WIDTHS = (60, 80, 120)
COPIED = ("vllm serve", "corral up", "corral bench report", "/home/mia", "/n/holylabs")  # to be copied: never broken

PS = (
    ["NAME", "STATE", "SINCE", "MODEL", "ENDPOINT", "ENGINE"],
    [
        ["llama-3.1-70b-instruct", "loading 40%", "3 min", "llama-3.1-70b-instruct", "-", "cuda-0.32.0"],
        ["smollm2", "ready", "2 d 4 h", "smollm2", "http://127.0.0.1:8000/v1", "cpu-0.32.0"],
        ["served~2", "failed: node lost", "8 s", "llama-3.1-405b-instruct-fp8", "http://10.0.0.7:80/v1", "cuda-0.32"],
    ],
)  # fmt: skip
PARTITIONS = (
    ["PARTITION", "NODES", "IDLE", "GPUS", "CPUS", "MEMORY", "TIME LIMIT", "DEFAULT"],
    [
        ["gpu", "24", "3", "4 × H100", "96", "1.5 TB", "2 d", "yes"],
        ["gpu_test", "1", "1", "4 × A100", "64", "1.0 TB", "12 h", ""],
    ],
)  # fmt: skip
BUSY = {
    "rows": 1_000_000, "done": 123_456, "failed": 12, "in_flight": 512, "rows_per_s": 230.4, "waiting_for": None,
    "output_tokens_per_s": 19_870.0, "prompt_tokens_per_s": 41_003.0, "eta_s": 3804.0, "kv_use": 0.83, "retries": 7,
}  # fmt: skip
AWAY = {
    **BUSY,
    "waiting_for": "llama-3.1-70b has no server just now (failed: node lost)",
    "eta_s": None,
    "rows_per_s": 0.0,
}


def of_table(table: tuple[list[str], list[list[str]]]) -> Callable[[int], Iterator[str]]:
    return lambda columns: table_lines(*table, columns=columns)


def of_command(*words: str) -> Callable[[int], Iterator[str]]:
    def lines(columns: int) -> Iterator[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "room", lambda: columns)
            patch.setenv("COLUMNS", str(columns))
            said: list[str] = []
            patch.setattr(click, "echo", lambda text="", **_: said.append(str(text)))
            with pytest.raises(SystemExit):
                main(list(words))
        return iter("\n".join(said).splitlines())

    return lines


SCREENS: dict[str, Callable[[int], Iterator[str]]] = {
    "ps": of_table(PS),
    "partitions": of_table(PARTITIONS),
    "batch": lambda columns: iter([progress_line(BUSY, columns - 1), progress_line(AWAY, columns - 1)]),
    "plan": of_command("plan", "llama-3.1-70b", "--gpus", "8xH100"),
    "compare": of_command("plan", "llama-3.1-70b", "--gpus", "8xH100", "--compare"),
    "need": of_command("plan", "llama-3.1-405b", "--need"),
    "models": of_command("models", "--gpus", "8xH100"),
    **shown.SCREENS,
}


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str, clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for columns in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = [click.unstyle(line) for line in SCREENS[name](columns)]
        longest = max((line for line in lines if not any(word in line for word in COPIED)), key=len)
        assert len(longest) <= columns, longest
        parts.append(f"{'-' * 8} {columns} columns\n" + "\n".join(lines) + "\n")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("CORRAL_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(parts))
    assert path.read_text() == "".join(parts)


def test_nothing_is_lost_on_a_narrow_terminal() -> None:
    text = " ".join(click.unstyle(line) for line in table_lines(*PS, columns=40))
    for row in PS[1]:
        assert all(cell in text for cell in row if cell != "-")

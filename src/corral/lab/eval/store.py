"""Results of evaluations on disk: a folder for one model, which any number of tasks share.

eval.json          the model, and every task's metrics with the settings that it ran with
samples/TASK.jsonl lm-eval's items: document, requests, answers, values of the metrics
answers.jsonl      every answer once (`answers`), with its ledger
requests.jsonl     what was asked
lm-eval.json       the last run as lm-eval itself reports it
lm-eval.log        its output
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.base.errors import DataError, NotFoundError
from corral.base.record import load_json
from corral.lab.eval.server import EvaluatedModel

RECORD, SAMPLES, HARNESS_RESULTS, LOG = "eval.json", "samples", "lm-eval.json", "lm-eval.log"


@dataclass(frozen=True)
class EvalSettings:
    """What changes the requests of a task; recorded with its results."""

    num_fewshot: int | None = None  # None: the task's own number
    limit: float | None = None  # items of each task; below 1 a share of them
    chat: bool = False  # prompts go through the chat template
    multiturn: bool = True  # with `chat`: examples are earlier turns of the conversation
    system: str | None = None
    gen_kwargs: str = ""  # max_gen_toks=64,temperature=0.7
    seeds: tuple[int, ...] = (0, 1234, 1234, 1234)  # python, numpy, torch, few-shot: lm-eval's defaults
    unsafe_code: bool = False  # tasks may run the code that the model writes


@dataclass(frozen=True)
class TaskResult:
    """One task's metrics as lm-eval computed them; keys are `acc,none`: metric and filter."""

    metrics: dict[str, float]
    stderr: dict[str, float]
    higher_is_better: dict[str, bool]
    items: int
    version: str
    num_fewshot: int
    samples: str  # the file in `samples/`
    settings: EvalSettings
    harness: str
    at_s: float


@dataclass(frozen=True)
class EvalRecord:
    """All that was evaluated of one model."""

    model: EvaluatedModel
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)


def load_record(folder: Path) -> EvalRecord:
    """The results in a folder."""
    if not (folder / RECORD).is_file():
        raise NotFoundError(
            f"there are no results in {folder}.", "Give the folder that -o of `corral eval` was given."
        )
    return load_json(EvalRecord, folder / RECORD)


def load_items(folder: Path, result: TaskResult) -> list[dict[str, Any]]:
    """The items of a task."""
    path = folder / SAMPLES / Path(result.samples).name
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}.", "Run the task again; its answers are kept.") from None


def task_results(
    folder: Path, samples: dict[str, str], settings: EvalSettings, harness: str, at_s: float
) -> tuple[dict[str, TaskResult], dict[str, dict[str, float]]]:
    """The tasks and the groups of the run that lm-eval has just written."""
    found = json.loads((folder / HARNESS_RESULTS).read_text(encoding="utf-8"))
    tasks = {}
    for task, name in samples.items():
        metrics, stderr = _numbers(found["results"][task])
        better = {key.split(",")[0]: bool(up) for key, up in (found["higher_is_better"].get(task) or {}).items()}
        tasks[task] = TaskResult(
            metrics, stderr, better, int(found["n-samples"][task]["effective"]), str(found["versions"].get(task)),
            int(found["n-shot"].get(task) or 0), name, settings, harness, at_s,
        )  # fmt: skip
    groups = {name: _numbers(values)[0] for name, values in (found.get("groups") or {}).items()}
    return tasks, groups


def _numbers(values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics and their standard errors."""
    numbers = {k: float(v) for k, v in values.items() if "," in k and isinstance(v, int | float)}
    errors = {key: value for key, value in numbers.items() if key.split(",")[0].endswith("_stderr")}
    named = {key.replace("_stderr,", ","): value for key, value in errors.items()}
    return {key: value for key, value in numbers.items() if key not in errors}, named

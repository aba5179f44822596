"""`corral eval` as a function: tasks in the harness, their requests to the served model through the ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corral.base.errors import UsageError
from corral.base.files import make_dir
from corral.base.lock import exclusive_lock
from corral.base.record import save_record
from corral.lab.eval import harness as harnesses
from corral.lab.eval.answers import AnswerBook
from corral.lab.eval.harness import OWN_TASKS, Harness, HarnessDone
from corral.lab.eval.server import EvaluatedModel, EvaluatedServers
from corral.lab.eval.store import (
    LOG,
    RECORD,
    SAMPLES,
    EvalRecord,
    EvalSettings,
    TaskResult,
    load_record,
    task_results,
)
from corral.use.batch.core.run import Listener, RunSummary
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.serving import served_for
from corral.use.batch.spec import BatchServers, BatchSpec
from corral.use.score.likelihood import ScoreOptions


@dataclass(frozen=True)
class EvalRequest:
    """What is to be evaluated, and how."""

    tasks: tuple[str, ...]
    folder: Path
    settings: EvalSettings = field(default_factory=EvalSettings)
    include: tuple[str, ...] = ()  # folders with tasks
    score: ScoreOptions = field(default_factory=ScoreOptions)
    runner: RunnerSettings = field(default_factory=RunnerSettings)
    force: bool = False


@dataclass(frozen=True)
class EvalOutcome:
    """How a run ended; `tasks` is empty when it was stopped before all answers were there."""

    model: EvaluatedModel
    tasks: dict[str, TaskResult]
    groups: dict[str, dict[str, float]]
    asked: int  # requests that were sent now
    kept: int  # that had their answers before
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    ignored: tuple[str, ...] = ()  # parameters of the tasks that vLLM does not have
    stopped: bool = False


class _StoppedError(Exception):
    """The run was asked to stop, and what was under way is kept."""


def run_eval(
    request: EvalRequest, servers: BatchServers, listener: Listener, reporter: Any, python: str
) -> EvalOutcome:
    """Evaluate tasks; run again after anything, it continues, and asks nothing that was answered. `python` is that
    of the harness's environment.
    """
    folder = request.folder
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the output {str(folder)!r} is a file.", "Give a folder for the results.")
    known = load_record(folder) if (folder / RECORD).is_file() and not request.force else None
    spec = BatchSpec(input=str(folder / "requests.jsonl"), output=str(folder / "answers.jsonl"))
    make_dir(folder / SAMPLES)
    with (
        exclusive_lock(folder / "lock", reporter.note),
        served_for(servers, spec, reporter, known.model.model if known else None) as served,
    ):
        assert served.find is not None
        found = EvaluatedServers(served.find, known.model if known else None, folder)
        if known and servers.start_model is None:
            found.check_those_that_answer()
        record = known or EvalRecord(found.model)
        if request.force:
            (folder / RECORD).unlink(missing_ok=True)
        save_record(folder / RECORD, record)
        return _Evaluation(request, found, record, listener, python).run()


class _Evaluation:
    """One run of the harness."""

    def __init__(
        self, request: EvalRequest, servers: EvaluatedServers, record: EvalRecord, listener: Listener, python: str
    ) -> None:
        self._request, self._servers, self._record, self._listener = request, servers, record, listener
        self._python, self._folder = python, request.folder.absolute()
        self._model = record.model
        self._summaries: list[RunSummary] = []
        self._wanted_count = 0
        if request.settings.chat and not self._model.chat_template:
            raise UsageError(
                f"{self._model.model} has no chat template, or its server does not give it.",
                "Leave out --chat; or start the server with vLLM's --enable-tokenizer-info-endpoint, as Corral does.",
            )
        prefix = self._model.tokens.get("bos_token") or self._model.tokens.get("eos_token") or "auto"
        self._book = AnswerBook(
            self._folder, self._model.identity, _with_prefix(request.score, prefix), request.runner, listener,
            force=request.force,
        )  # fmt: skip

    def run(self) -> EvalOutcome:
        began = time.monotonic()
        harness = Harness(self._python, self._settings(), self._folder / LOG)
        done: HarnessDone | None = None
        try:
            done = harness.run(self._answer)
        except _StoppedError:
            pass
        finally:
            harness.close()
        tasks, groups = self._save(done) if done else ({}, {})
        ran = self._summaries
        asked = sum(one.fine for one in ran)
        return EvalOutcome(
            self._model, tasks, groups, asked, self._wanted_count - asked,
            sum(one.prompt_tokens for one in ran), sum(one.output_tokens for one in ran), time.monotonic() - began,
            done.ignored if done else (), done is None,
        )  # fmt: skip

    @property
    def _wanted(self) -> Path:
        return self._folder / "wanted.jsonl"

    def _settings(self) -> dict[str, Any]:
        """What the harness is told."""
        settings, model = self._request.settings, self._model
        return {
            "tasks": list(self._request.tasks),
            "include": [str(OWN_TASKS), *(str(Path(one).absolute()) for one in self._request.include)],
            "folder": str(self._folder),
            "samples": str(self._folder / SAMPLES),
            "requests": str(self._wanted),
            "model": model.model,
            "tokens": model.tokens,
            "chat_template": model.chat_template,
            "num_fewshot": settings.num_fewshot,
            "limit": settings.limit,
            "gen_kwargs": settings.gen_kwargs or None,
            "system": settings.system,
            "chat": settings.chat,
            "multiturn": settings.multiturn,
            "seeds": list(settings.seeds),
            "unsafe_code": settings.unsafe_code,
        }

    def _answer(self) -> Path:
        count, summary = self._book.fetch(self._wanted, self._servers.find)
        self._wanted_count += count
        self._summaries.append(summary)
        if not summary.done:
            raise _StoppedError
        return self._book.path

    def _save(self, done: HarnessDone) -> tuple[dict[str, TaskResult], dict[str, dict[str, float]]]:
        tasks, groups = task_results(
            self._folder, done.samples, self._request.settings, harnesses.VERSION, time.time()
        )
        before = self._record
        save_record(
            self._folder / RECORD,
            EvalRecord(before.model, {**before.tasks, **tasks}, {**before.groups, **groups}),
        )
        return tasks, groups


def _with_prefix(options: ScoreOptions, prefix: str) -> ScoreOptions:
    return replace(options, prefix=prefix, too_long="window")


def task_names(texts: Sequence[str]) -> tuple[str, ...]:
    """The tasks of `--tasks a,b --tasks c`."""
    names = tuple(name for text in texts for name in map(str.strip, text.split(",")) if name)
    if not names:
        raise UsageError("no task was named.", "For example: corral eval --tasks corral_capitals")
    return names

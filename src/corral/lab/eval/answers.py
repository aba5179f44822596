"""The requests of tasks and their answers: one ledger for a folder of results, whatever tasks were run in it.

A request is known by its content, so that tasks share answers, and a task that is run again asks nothing. Answers of
earlier tasks stay: the file of requests has those that were answered, and those that are wanted now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from corral.base.errors import DataError, EngineError
from corral.base.files import write_atomic
from corral.client.client import COMPLETIONS
from corral.client.endpoint import ModelServer
from corral.use.batch.core.run import Listener, RunSummary, run_assignment
from corral.use.batch.core.runner import RowRequest, RunnerSettings
from corral.use.batch.core.table import Table
from corral.use.batch.input.rows import open_source
from corral.use.batch.spec import folder_of
from corral.use.score.job import RowsJob, ScoreRows, ScoreWork
from corral.use.score.likelihood import ScoreOptions, ScoreRow
from corral.use.score.score import Steps, read_tokens


class EvalRow(msgspec.Struct, frozen=True):
    """One request of a task, as the harness writes it."""

    id: str
    kind: str  # choices | text | generate | template
    context: str = ""
    continuations: tuple[str, ...] = ()
    text: str = ""
    special: bool = False  # whether the tokenizer adds its own tokens
    stop: tuple[str, ...] = ()
    max_tokens: int = 0
    params: dict[str, Any] = {}
    messages: tuple[dict[str, str], ...] = ()


_DECODER = msgspec.json.Decoder(EvalRow)


@dataclass(frozen=True)
class EvalRows(ScoreRows):
    """How requests are read."""

    kind: str = "requests"

    def row(self, raw: bytes, line: int) -> ScoreRow:
        try:
            return ScoreRow(_DECODER.decode(raw).id)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DataError(f"request {line} cannot be read: {error}.", "Run the task again.") from None


class EvalWork(ScoreWork):
    """Turns requests of tasks into those of the server, and replies into answers."""

    def __init__(self, options: ScoreOptions, table: Table) -> None:
        super().__init__(options, table, EvalRows())

    def steps(self, number: int, raw: bytes) -> Steps[dict[str, Any]]:
        row = _DECODER.decode(raw)
        if row.kind == "generate":
            return (yield from self._generate(row))
        if row.kind == "template":
            return (yield from self._check_template(row))
        text = row.text if row.kind == "text" else None
        score = yield from self.scoring.steps(
            ScoreRow(row.id, text, row.context, row.continuations, row.kind, special=row.special)
        )
        found = [
            {"logprob": one.sum_logprob, "greedy": one.greedy, "tokens": one.tokens}
            for one in score.choices or (score,)
        ]
        return {"id": row.id, "likelihoods": found}

    def _generate(self, row: EvalRow) -> Steps[dict[str, Any]]:
        """The tokens of the prompt, without its beginning where prompt and answer are longer than the model takes."""
        if not self.scoring.context:
            yield from self.scoring.learn()
        [tokens] = yield from self.scoring.tokens([(row.context, row.special)])
        room = self.scoring.context - row.max_tokens
        if room < 1:
            raise DataError(
                f"the task asks for answers of {row.max_tokens} tokens, and the model takes {self.scoring.context}.",
                "Ask for less: --gen-kwargs max_gen_toks=N; or serve the model with a longer context.",
            )
        body = {"prompt": tokens[-room:], "max_tokens": row.max_tokens, **row.params}
        [reply] = yield [RowRequest(COMPLETIONS, {**body, "stop": row.stop} if row.stop else body)]
        made = reply.usage.completion_tokens if reply.usage else None
        return {
            "id": row.id, "text": reply.text, "finish_reason": reply.finish_reason,
            "prompt_tokens": len(body["prompt"]), "left_out": max(0, len(tokens) - room), "output_tokens": made,
        }  # fmt: skip

    def _check_template(self, row: EvalRow) -> Steps[dict[str, Any]]:
        """The server must make the same tokens of a conversation as the harness does."""
        asked = RowRequest("/tokenize", {"messages": row.messages, "add_generation_prompt": True}, page=True)
        [page] = yield [asked]
        [own] = yield from self.scoring.tokens([(row.text, False)])
        if (theirs := read_tokens(page)["tokens"]) != own:
            raise EngineError(
                "the chat template, as the harness renders it, gives other tokens than the server makes of the same "
                f"conversation ({len(own)} and {len(theirs)}).",
                "Tasks cannot be given to this model as conversations; leave out --chat.",
            )
        return {"id": row.id, "tokens": len(own)}


@dataclass
class AnswerBook:
    """The answers in a folder of results."""

    folder: Path
    identity: dict[str, Any]  # of the model: answers of another one do not count
    options: ScoreOptions
    settings: RunnerSettings
    listener: Listener
    signals: bool = True
    force: bool = False

    @property
    def path(self) -> Path:
        return self.folder / "answers.jsonl"

    @property
    def _requests(self) -> Path:
        return self.folder / "requests.jsonl"

    def fetch(self, wanted: Path, find: Callable[[], Sequence[ModelServer]]) -> tuple[int, RunSummary]:
        """Let every request in a file have its answer; the servers are found only when one is missing. How many the
        file has, and what was done.
        """
        count = self._add(wanted)
        job = RowsJob(
            folder_of(str(self.path)), open_source(str(self._requests), None), self.identity, self.listener,
            force=self.force, retry_failed=True,
        )  # fmt: skip
        with job.opened(EvalRows()) as assignment:
            work = EvalWork(self.options, assignment.table)
            summary = run_assignment(find, assignment, work, self.settings, self.listener, self.signals)
        self.force = False  # the requests of later steps continue
        if summary.done and summary.failed:
            with job.folder.errors.open("rb") as errors:
                first = msgspec.json.decode(errors.readline())
            raise EngineError(
                f"{summary.failed} of {summary.rows} requests failed; the first: {first['message']}",
                f"{first['remedy']} The same command tries them again; {job.folder.errors} has them all.".strip(),
            )
        if not job.folder.has_errors:
            job.folder.errors.unlink(missing_ok=True)
        return count, summary

    def _add(self, wanted: Path) -> int:
        lines = {_DECODER.decode(line).id: line for line in wanted.read_bytes().splitlines(keepends=True)}
        if self._requests.exists() and self.path.exists() and not self.force:
            with self.path.open("rb") as answers:
                answered = {_id_of(line) for line in answers} - lines.keys()
            with self._requests.open("rb") as earlier:
                kept = b"".join(line for line in earlier if _id_of(line) in answered)
        else:
            kept = b""
        write_atomic(self._requests, kept + b"".join(lines.values()))
        wanted.unlink()
        return len(lines)


def _id_of(line: bytes) -> str:
    """The id of a line; empty for a line that a crash cut."""
    try:
        return str(msgspec.json.decode(line)["id"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""

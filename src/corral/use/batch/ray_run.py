"""The rows of a batch on Ray Data, with the same promise: one line for each row, even when the engine dies of some.

Results are committed to the same ledger as they arrive. Ray Data ends the whole job at one bad row: it is told to
keep inference errors with their row, and when a pass still dies the rest is tried again, in halves once a pass
answers nothing, until the bad row is alone and goes to the error file. Ray is told not to restart a dead engine,
because it would never stop: an engine that dies three times in a row without any answer ends the batch with the
reason.

The batch's folder must lie on a file system that all nodes see. Not covered: several answers per prompt,
log-probabilities, and several runners on one batch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from corral.base.errors import CorralError, EngineError, UsageError
from corral.base.lock import heartbeat
from corral.base.processes import terminated_as_interrupted
from corral.client.client import CHAT, COMPLETIONS
from corral.client.reply import Choice, Reply, Timing, Usage
from corral.use.batch.core.folder import PartFolder
from corral.use.batch.core.ledger import LedgerEntry
from corral.use.batch.core.records import FAILED, FINE
from corral.use.batch.core.run import Assignment, BatchState, Listener, RunSummary
from corral.use.batch.core.runner import RunnerSettings, Work
from corral.use.batch.core.table import RowReader
from corral.use.batch.input.recipe import Parsed
from corral.use.batch.ray_engine import AnswerEngine, Note, RayAnswer

_encode = msgspec.json.Encoder().encode
_GROUP, _GROUP_S = 256, 1.0
_NOTE_S = 10.0
MOST_DEATHS = 3
_DEFAULT_TOKENS = 16  # vLLM's default for a completion
_NOT_PARAMS = {"prompt", "messages", "model", "stream", "max_completion_tokens", "tools", "tool_choice"}


class EngineDeaths:
    """How often in a row an engine died, and how often with the same error (numbers and addresses apart)."""

    def __init__(self) -> None:
        self.in_a_row = self.alike = 0
        self._way = ""

    def count(self, error: Exception) -> None:
        way = re.sub(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", "#", f"{type(error).__name__}: {error}"[:500])
        self.alike = self.alike + 1 if way == self._way else 1
        self.in_a_row += 1
        self._way = way


def run_on_engine(
    make: Callable[[Note], AnswerEngine],
    model: str,
    rows: Assignment,
    work: Work,
    _: RunnerSettings,
    listener: Listener,
    __: bool,
) -> RunSummary:
    """Do the rows of an assignment on an engine, which is made only when there is something to do."""
    if isinstance(rows.folder, PartFolder):
        raise UsageError(f"{rows.folder.output} is shared (--jobs).", "Finish it with `corral batch resume`.")
    if not rows.counts.left:
        return RunSummary.of(rows, BatchState.DONE)
    with heartbeat(rows.alive):
        return _EngineRun(make(listener.note), model, rows, work, listener).run()


class _CancelledError(Exception):
    """`corral batch cancel` was called."""


class _EngineRun:
    """One run of an assignment on an engine."""

    def __init__(self, engine: AnswerEngine, model: str, rows: Assignment, work: Work, listener: Listener) -> None:
        self._engine, self._model, self._rows, self._work, self._listener = engine, model, rows, work, listener
        self._counts, self._done = rows.counts, rows.done
        self._reader = RowReader(rows.table)
        self._group: list[LedgerEntry] = []
        self._committed = self._noted = rows.counts.began = time.monotonic()
        self._deaths = EngineDeaths()
        self._proof: tuple[int, bool] | None = None  # a row that was answered, and whether as chat

    def run(self) -> RunSummary:
        state = BatchState.DONE
        try:
            with terminated_as_interrupted():
                for chat, numbers in self._kinds():
                    self._pass(numbers, chat)
        except _CancelledError:
            state = BatchState.CANCELLED
        except KeyboardInterrupt:
            state = BatchState.STOPPED
        finally:
            self._commit()
            self._reader.close()
        return RunSummary.of(self._rows, state)

    def _kinds(self) -> list[tuple[bool, list[int]]]:
        """The rows that are left, grouped by chat or completion and by the names of their parameters."""
        kinds: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
        for number in range(len(self._rows.table)):
            if self._done[number]:
                continue
            raw = self._reader.raw(number)
            try:
                parsed = self._work.first_step(number, raw).context
                kinds.setdefault((parsed.path == CHAT, tuple(sorted(_params(parsed)))), []).append(number)
            except CorralError as error:
                self._settle(number, FAILED, self._work.failure(number, raw, error))
        return [(chat, numbers) for (chat, _), numbers in kinds.items()]

    def _pass(self, numbers: Sequence[int], chat: bool) -> None:
        """Do these rows; those left after a pass that died are tried again, in halves when it answered none."""
        waiting = [list(numbers)]
        while waiting:
            rows = waiting.pop(0)
            why = self._try(rows, chat)
            left = self._left(rows)
            if not left:
                continue
            self._counts.retries += 1
            self._listener.note("again", f"{len(left)} rows left after: {str(why)[:300]}")
            if len(left) == len(rows):
                self._refuse_dead_engine(left, chat, why)
                left = self._left(left)
                if len(rows) == 1 and left:
                    self._give_up(left[0], why)
                    continue
                middle = len(left) // 2
                waiting[:0] = [half for half in (left[:middle], left[middle:]) if half]
            else:
                waiting.insert(0, left)

    def _left(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if not self._done[number]]

    def _give_up(self, number: int, why: Exception) -> None:
        alone = EngineError(f"Ray Data failed on this row alone: {why}")
        self._settle(number, FAILED, self._work.failure(number, self._reader.raw(number), alone))

    def _refuse_dead_engine(self, numbers: Sequence[int], chat: bool, why: Exception) -> None:
        """A pass answered nothing: try single rows, best one that was answered before, to tell a bad row from a dead
        engine.
        """
        self._deaths.count(why)
        if self._proof is None:
            rows = [(numbers[0], chat), (numbers[-1], chat)] if len(numbers) > 1 else []
        else:
            rows = [self._proof] if self._deaths.in_a_row >= MOST_DEATHS - 1 else []
        for number, as_chat in rows:
            why = self._try([number], as_chat)
            if not self._deaths.in_a_row:  # an answer came
                return
            self._deaths.count(why)
        if rows or self._deaths.alike >= MOST_DEATHS:
            raise EngineError(
                f"the engine died {self._deaths.in_a_row} times in a row without an answer: {str(why)[:500]}",
                getattr(why, "remedy", "")
                or "Check the model's path and the cluster (`ray status`, Ray's logs); "
                "then run the same command again.",
            )

    def _try(self, numbers: Sequence[int], chat: bool) -> Exception:
        """One pass of the engine; the reason why rows may be left after it."""
        rows = self._rows.folder.path / "ray-rows.jsonl"
        try:
            with rows.open("wb") as file:
                for number in numbers:
                    file.write(self._line(number))
            self._listener.note("starting", f"Ray starts the engine for {len(numbers)} rows")
            for answer in self._engine.answers(rows, chat):
                self._add(answer)
        except (CorralError, _CancelledError):
            raise
        except Exception as error:  # Ray's errors have no common root
            return error
        finally:
            rows.unlink(missing_ok=True)
        return EngineError("Ray Data returned no row for it.")

    def _line(self, number: int) -> bytes:
        step = self._work.first_step(number, self._reader.raw(number))
        parsed, body = step.context, step.requests[0].body
        what = "messages" if parsed.path == CHAT else "prompt"
        assert not isinstance(body, bytes)
        row = {"corral_row": number, what: body[what], "sampling_params": _params(parsed)}
        return _encode(row) + b"\n"

    def _add(self, answer: RayAnswer) -> None:
        self._deaths = EngineDeaths()
        if self._done[answer.number]:
            return  # it was sent again to see whether the engine lives
        raw = self._reader.raw(answer.number)
        if answer.error:
            error = EngineError(answer.error)
            self._settle(answer.number, FAILED, self._work.failure(answer.number, raw, error))
            return
        parsed: Parsed = self._work.first_step(answer.number, raw).context
        self._proof = self._proof or (answer.number, parsed.path == CHAT)
        reply = _as_reply(answer, parsed, self._model)
        self._counts.prompt_tokens += answer.prompt_tokens
        self._counts.output_tokens += answer.output_tokens
        line = self._work.result(answer.number, parsed, [reply])
        assert isinstance(line, bytes), "rows that ask several times need a server"
        self._settle(answer.number, FINE, line)

    def _settle(self, number: int, kind: int, line: bytes) -> None:
        if self._done[number]:
            return
        counts = self._counts
        self._done[number] = 1
        self._group.append(LedgerEntry(number, kind, line))
        if kind == FINE:
            counts.fine += 1
        else:
            counts.failed += 1
        now = time.monotonic()
        if len(self._group) >= _GROUP or now - self._committed > _GROUP_S:
            self._commit()
            if self._rows.folder.cancel.exists():
                raise _CancelledError
        if now - self._noted > _NOTE_S:
            self._noted = now
            done, rate = counts.rows - counts.left, counts.output_tokens / (now - counts.began)
            self._listener.note("progress", f"{done} of {counts.rows} rows, {rate:,.0f} output tok/s")

    def _commit(self) -> None:
        if self._group:
            self._rows.ledger.commit(self._group)
            self._counts.groups += 1
            self._group = []
        self._committed = time.monotonic()
        self._rows.refresh()


def _params(parsed: Parsed) -> dict[str, Any]:
    """The body's sampling parameters as vLLM's engine names them."""
    body = parsed.body
    if parsed.path not in (CHAT, COMPLETIONS):
        raise UsageError(f"Ray Data does not answer {parsed.path}.", "Use --engine http.")
    params = {name: value for name, value in body.items() if name not in _NOT_PARAMS and value is not None}
    if params.get("n", 1) != 1 or body.get("tools") or params.get("logprobs") or params.get("prompt_logprobs"):
        raise UsageError("Ray Data gives one plain answer per row: no n, tools or logprobs.", "Use --engine http.")
    params.pop("n", None)
    if parsed.path == CHAT:
        params.setdefault("max_tokens", None)  # as a server does; the engine itself would stop after 16
    if wanted := body.get("max_completion_tokens"):
        params["max_tokens"] = wanted
    if isinstance(params.get("stop"), str):
        params["stop"] = [params["stop"]]
    return params


def _as_reply(answer: RayAnswer, parsed: Parsed, model: str) -> Reply:
    """The answer in the shape of a server's reply."""
    chat = parsed.path == CHAT
    limit = _params(parsed).get("max_tokens", _DEFAULT_TOKENS)
    finish = "length" if limit and answer.output_tokens >= limit else "stop"  # Ray Data does not tell
    message = {"role": "assistant", "content": answer.text}
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"message": message} if chat else {"text": answer.text}
    total = answer.prompt_tokens + answer.output_tokens
    usage = Usage(answer.prompt_tokens, answer.output_tokens, total)
    kind = "chat.completion" if chat else "text_completion"
    body = {
        "id": f"ray-{answer.number}",
        "object": kind,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.output_tokens,
            "total_tokens": total,
        },
    }
    choices = [Choice(0, answer.text, finish)]
    return Reply(choices, usage, Timing(0, 0, 0, 0, []), f"ray-{answer.number}", model, 200, _encode(body))

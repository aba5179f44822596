"""The same job on Ray Data (`ray.data.llm`), for a Ray cluster that is already there.

The promise is the same: rows are checked first, finished ones are skipped, results are committed to the same ledger
as they stream out, so exactly one line per id. Ray Data itself ends the whole job at one bad row: it is asked to
keep inference errors with their row, and when a pass still dies the rest is tried again, in halves once a pass brings
nothing, until the bad row stands alone and goes to the error file. Ray itself starts no dead engine again, because it
would never stop: an engine that dies three times in a row without any answer ends the batch with its reason.

Ray and vLLM must be importable here (Corral installed into the cluster's environment), and the job's folder must lie
on a file system that all nodes see. Not covered: several answers per prompt, log-probabilities.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from corral.batch.batch import Journal, Result, bad_rows, forget_failed, kept_state, work_of
from corral.batch.core.folder import JobFolder
from corral.batch.core.ledger import FAILED, FINE, Entry, Ledger
from corral.batch.core.lock import JobLock
from corral.batch.core.run import Listener, Summary
from corral.batch.core.table import RowReader
from corral.batch.input.recipe import Parsed
from corral.batch.input.rows import optional
from corral.batch.job import Order, Prepared, folder_of, prepare
from corral.batch.output import export
from corral.batch.ray_logs import logs_folder, why_died
from corral.batch.serving import Offline
from corral.client.client import CHAT, Choice, Reply, Timing, Usage
from corral.deployment.diagnosis import Diagnosis
from corral.errors import CorralError, EngineError, UnreachableError, UsageError
from corral.interruption import terminated_as_interrupted
from corral.lock import beating
from corral.plan.fixed import parse_assignments, read_fixed

__all__ = ["Engine", "RayEngine", "engine_settings", "run_on_ray"]

_encode = msgspec.json.Encoder().encode
_GROUP, _GROUP_S = 256, 1.0
_TOLD_S = 10.0
MOST_DEATHS = 3
_DEFAULT_TOKENS = 16  # of a completion that does not say how many, in vLLM
_ENGINE_NAMES = {
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "max_model_len": "max_model_len",
    "kv": "kv_cache_dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "eager": "enforce_eager",
}
_NOT_ENGINE = {
    "data": "--concurrency N starts N engines.",
    "weights": "Name a checkpoint with those weights: --model PATH.",
}
_NOT_PARAMS = {"prompt", "messages", "model", "stream", "max_completion_tokens", "tools", "tool_choice"}


class Answer(NamedTuple):
    """What came back for one row."""

    number: int
    text: str
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


class EngineDiedError(Exception):
    """A pass of the engine ended early: what Ray says, and why, where a log of the engine tells."""

    def __init__(self, said: str, why: Diagnosis | None) -> None:
        super().__init__(f"{why.cause} ({said})" if why else said)
        self.remedy = why.remedy if why else ""


class Engine(Protocol):
    """Something that answers a file of rows; the seam at which tests put another one."""

    def answers(self, rows: Path, chat: bool) -> Iterator[Answer]:
        """The answers of a file of `{"corral_row", "prompt" | "messages", "sampling_params"}`, in any order."""


class RayEngine:
    """`ray.data.llm` with `replicas` vLLM engines."""

    def __init__(self, model: str, replicas: int = 1, engine_kwargs: dict[str, Any] | None = None) -> None:
        self._model, self._replicas, self._kwargs = model, replicas, engine_kwargs or {}
        self._ray = optional("ray", "run on Ray Data (in the cluster's own environment)")
        optional("ray.data.llm", "run on Ray Data")

    def answers(self, rows: Path, chat: bool) -> Iterator[Answer]:
        from ray.data.llm import build_processor, vLLMEngineProcessorConfig

        ray = self._ray
        self._connect()
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)  # a block of lines every ten seconds otherwise
        settings: dict[str, Any] = {}
        if not ray.cluster_resources().get("GPU"):  # otherwise it would wait for one for ever
            settings = {"placement_group_config": {"bundles": [{"CPU": 1}]}, "log_engine_metrics": False}
        config = vLLMEngineProcessorConfig(
            model_source=self._model,
            engine_kwargs=self._kwargs,
            concurrency=self._replicas,
            batch_size=64,
            should_continue_on_error=True,
            chat_template_stage=chat,
            tokenize_stage=False,  # the engine does both itself; actors of their own only take CPUs from it
            detokenize_stage=False,
            **settings,
        )
        processor = build_processor(config, preprocess=_unpack)
        # Ray Data would restart an engine that dies without end, and tell nobody
        processor.get_stage_by_name("vLLMEngineStage").map_batches_kwargs["max_restarts"] = 0
        began_s = time.time()
        try:
            for row in processor(ray.data.read_text(str(rows))).iter_rows():
                yield read_answer(row)
        except Exception as error:
            raise EngineDiedError(_first_line(error), why_died(logs_folder(ray), began_s)) from error

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        _refuse_dead_address(os.environ.get("RAY_ADDRESS", ""))
        try:
            self._ray.init(address="auto", log_to_driver=False)  # RAY_ADDRESS, or a cluster on this node
        except ConnectionError as error:
            raise UnreachableError(
                f"there is no Ray cluster here: {str(error).splitlines()[0]}",
                "Start one (`ray start --head`), run this on one of its nodes, or set RAY_ADDRESS.",
            ) from error


def _refuse_dead_address(address: str) -> None:
    """Ray itself would try for ever to reach an address where nobody is."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UnreachableError(
            f"there is no Ray cluster at {address} (RAY_ADDRESS): {error.strerror or error}.",
            "Start one (`ray start --head`), or correct RAY_ADDRESS.",
        ) from None


def _first_line(error: Exception) -> str:
    """Ray's errors are pages long; their first words say what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no word'}"[:300]


def _unpack(row: dict[str, Any]) -> dict[str, Any]:
    """Runs on Ray's workers: needs nothing of Corral."""
    import json

    unpacked: dict[str, Any] = json.loads(row["text"])
    return unpacked


def read_answer(row: dict[str, Any]) -> Answer:
    """One row of Ray Data's output."""
    return Answer(
        number=int(row["corral_row"]),
        text=str(row.get("generated_text") or ""),
        error=str(row.get("__inference_error__") or ""),
        prompt_tokens=int(row.get("num_input_tokens") or 0),
        output_tokens=int(row.get("num_generated_tokens") or 0),
    )


def engine_settings(offline: Offline) -> dict[str, Any]:
    """What was asked of the plan, under the names that vLLM's engine knows."""
    context = {"max_model_len": offline.context} if offline.context else {}
    fixed = read_fixed({**context, **parse_assignments(offline.fixed)})
    for name, remedy in _NOT_ENGINE.items():
        if getattr(fixed, name) is not None:
            raise UsageError(f"--set {name} does not go with --engine ray-data.", remedy)
    return {ours: getattr(fixed, name) for name, ours in _ENGINE_NAMES.items() if getattr(fixed, name) is not None}


def run_on_ray(order: Order, offline: Offline, listener: Listener, *, engine: Engine | None = None) -> Result:
    """Begin a batch on Ray Data, or continue it."""
    model, settings = offline.model, engine_settings(offline)
    folder = folder_of(order.output, order.ordered)
    folder.create()
    journal = Journal(folder, listener)
    with JobLock(folder.lock, order.output) as lock, beating(folder.lock):
        if folder.shared.is_dir():
            raise UsageError(f"{order.output} is shared (--jobs).", "Finish it with `corral batch resume`.")
        folder.sweep()
        made = prepare(order, folder, {"offline": offline.to_json()}, model=model)
        journal.note("begin", f"{'continuing' if made.continued else 'new'}: {made.record.rows} rows, on Ray Data")
        if order.retry_failed:
            forget_failed(folder, made.table)
        with kept_state(folder, journal) as keep:
            run = _Run(made, engine or RayEngine(model, offline.replicas, settings), journal, lock)
            summary = run.run()
            if summary.state == "done" and not folder.live:
                export(folder, made.table, made.record.ordered)
            keep(summary)
    return Result(summary, str(folder.output), str(folder.errors) if folder.has_errors else None, model)


class Deaths:
    """How often in a row an engine died, and how often in the same way (numbers and addresses do not matter)."""

    def __init__(self) -> None:
        self.in_a_row = self.alike = 0
        self._way = ""

    def count(self, error: Exception) -> None:
        way = re.sub(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", "#", f"{type(error).__name__}: {error}"[:500])
        self.alike = self.alike + 1 if way == self._way else 1
        self.in_a_row += 1
        self._way = way


class _CancelledError(Exception):
    """`corral batch cancel` was called."""


class _Run:
    """One run of a job on an engine."""

    def __init__(self, made: Prepared, engine: Engine, listener: Listener, lock: JobLock) -> None:
        self._made, self._engine, self._listener, self._lock = made, engine, listener, lock
        self._folder: JobFolder = made.folder
        self._work = work_of(made)
        self._ledger = Ledger(made.folder, made.table, lock.check)
        self._reader = RowReader(made.table)
        self._began = time.monotonic()
        self._fine = self._failed = self._prompt = self._output = self._passes = 0
        self._group: list[Entry] = []
        self._committed = self._told = time.monotonic()
        self._before = 0
        self._deaths = Deaths()
        self._proof: tuple[int, bool] | None = None  # a row that was answered, and whether as chat

    def run(self) -> Summary:
        tally = self._ledger.open()
        self._done = tally.done
        before = self._before = tally.fine + tally.failed
        state = "done"
        try:
            with terminated_as_interrupted():
                for entry in bad_rows(self._made):
                    self._settle(*entry)
                for chat, numbers in self._kinds():
                    self._pass(numbers, chat)
        except _CancelledError:
            state = "cancelled"
        except KeyboardInterrupt:
            state = "stopped"
        finally:
            self._commit()
            self._ledger.close()
            self._reader.close()
        rows = len(self._made.table)
        return Summary(
            state=state, rows=rows, before=before, fine=self._fine, failed=self._failed,
            left=rows - before - self._fine - self._failed, wall_s=time.monotonic() - self._began,
            prompt_tokens=self._prompt, cached_tokens=0, output_tokens=self._output, retries=self._passes,
            losses=0, stolen=0, groups=0, repaired=tuple(self._ledger.repaired),
        )  # fmt: skip

    def _kinds(self) -> list[tuple[bool, list[int]]]:
        """Rows that are still to be done, by what the engine must treat alike: chat or not, same parameters."""
        kinds: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
        for number in range(len(self._made.table)):
            if self._done[number]:
                continue
            raw = self._reader.raw(number)
            try:
                parsed = self._work.ask(number, raw).context
                kinds.setdefault((parsed.path == CHAT, tuple(sorted(_params(parsed)))), []).append(number)
            except CorralError as error:
                self._settle(number, FAILED, self._work.failure(number, raw, error))
        return [(chat, numbers) for (chat, _), numbers in kinds.items()]

    def _pass(self, numbers: Sequence[int], chat: bool) -> None:
        """Do these rows; what is left after a pass that died is tried again, in halves when it brought nothing."""
        waiting = [list(numbers)]
        while waiting:
            asked = waiting.pop(0)
            why = self._try(asked, chat)
            left = self._left(asked)
            if not left:
                continue
            self._passes += 1
            self._listener.note("again", f"{len(left)} rows left after: {str(why)[:300]}")
            if len(left) == len(asked):
                self._refuse_dead_engine(left, chat, why)
                left = self._left(left)
                if len(asked) == 1 and left:
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
        """A pass brought nothing: is it a row, or the engine? Rows alone tell, best one that it answered before."""
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
        """One pass of the engine; why rows may be left after it."""
        rows = self._folder.path / "ray-rows.jsonl"
        try:
            with rows.open("wb") as file:
                for number in numbers:
                    file.write(self._line(number))
            self._listener.note("starting", f"Ray starts the engine for {len(numbers)} rows")
            for answer in self._engine.answers(rows, chat):
                self._take(answer)
        except (CorralError, _CancelledError):
            raise
        except Exception as error:  # Ray's errors have no common root
            return error
        finally:
            rows.unlink(missing_ok=True)
        return EngineError("Ray Data returned no row for it.")

    def _line(self, number: int) -> bytes:
        parsed: Parsed = self._work.ask(number, self._reader.raw(number)).context
        what = "messages" if parsed.path == CHAT else "prompt"
        row = {"corral_row": number, what: parsed.body[what], "sampling_params": _params(parsed)}
        return _encode(row) + b"\n"

    def _take(self, answer: Answer) -> None:
        self._deaths = Deaths()
        if self._done[answer.number]:
            return  # it was asked again to see whether the engine lives
        raw = self._reader.raw(answer.number)
        if answer.error:
            error = EngineError(answer.error)
            self._settle(answer.number, FAILED, self._work.failure(answer.number, raw, error))
            return
        parsed: Parsed = self._work.ask(answer.number, raw).context
        self._proof = self._proof or (answer.number, parsed.path == CHAT)
        reply = _as_reply(answer, parsed, self._made.record.model)
        self._prompt += answer.prompt_tokens
        self._output += answer.output_tokens
        self._settle(answer.number, FINE, self._work.result(answer.number, parsed, [reply]))

    def _settle(self, number: int, kind: int, line: bytes) -> None:
        if self._done[number]:
            return
        self._done[number] = 1
        self._group.append(Entry(number, kind, line))
        if kind == FINE:
            self._fine += 1
        else:
            self._failed += 1
        now = time.monotonic()
        if len(self._group) >= _GROUP or now - self._committed > _GROUP_S:
            self._commit()
            if self._folder.cancel.exists():
                raise _CancelledError
        if now - self._told > _TOLD_S:
            self._told = now
            done, rate = self._before + self._fine + self._failed, self._output / (now - self._began)
            self._listener.note("progress", f"{done} of {len(self._made.table)} rows, {rate:,.0f} output tok/s")

    def _commit(self) -> None:
        if self._group:
            self._ledger.commit(self._group)
            self._group = []
        self._committed = time.monotonic()
        self._lock.touch()


def _params(parsed: Parsed) -> dict[str, Any]:
    """The body's sampling parameters as vLLM's engine names them."""
    body = parsed.body
    params = {name: value for name, value in body.items() if name not in _NOT_PARAMS and value is not None}
    if params.get("n", 1) != 1 or body.get("tools") or params.get("logprobs") or params.get("prompt_logprobs"):
        raise UsageError("Ray Data gives one plain answer per row: no n, tools or logprobs.", "Use --engine http.")
    params.pop("n", None)
    if parsed.path == CHAT:
        params.setdefault("max_tokens", None)  # as a server does; the engine alone would stop after 16
    if wanted := body.get("max_completion_tokens"):
        params["max_tokens"] = wanted
    if isinstance(params.get("stop"), str):
        params["stop"] = [params["stop"]]
    return params


def _as_reply(answer: Answer, parsed: Parsed, model: str) -> Reply:
    """The answer in the shape that a server would have given it."""
    chat = parsed.path == CHAT
    asked = _params(parsed).get("max_tokens", _DEFAULT_TOKENS)
    finish = "length" if asked and answer.output_tokens >= asked else "stop"  # Ray Data does not tell
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

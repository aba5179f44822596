"""The batch service's workers: threads that take batches off a queue and carry them out.

A batch that was under way when the service ended is queued again at its next start and continues by its ledger. While
the model is away a batch waits; a bad input, a refused key or a run-away failure rate fails it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any

from corral.batch.batch import carry_out
from corral.batch.core.folder import BatchFolder
from corral.batch.core.runner import Counts, Runner, RunnerSettings
from corral.batch.input.recipe import OPENAI, Recipe
from corral.batch.job import BatchOrder
from corral.batch.service.store import ENDED, Store
from corral.batch.serving import Where
from corral.errors import CorralError, NotFoundError, UnreachableError

__all__ = ["Workers"]

AGAIN_S = 5.0


class Workers:
    """Carries out the batches of a store, `count` at once."""

    def __init__(self, store: Store, where: Where, count: int, any_model: bool, settings: RunnerSettings) -> None:
        self._store, self._where, self._any_model, self._settings = store, where, any_model, settings
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        for batch in reversed(store.batches()):
            if batch["status"] not in ENDED:
                self.submit(batch["id"])

    def submit(self, identity: str) -> None:
        self._queue.put(identity)

    def cancel(self, identity: str) -> dict[str, Any]:
        """Ask a batch to stop; one that has not begun stops at once."""
        batch = self._store.change(identity, "cancelling")
        _ask_to_stop(self._store, identity)
        return batch

    def close(self) -> None:
        """Stop all batches where they are; they continue at the next start."""
        self._stop.set()
        for batch in self._store.batches():
            if batch["status"] in ("in_progress", "validating"):
                _ask_to_stop(self._store, batch["id"])
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(30)

    def _work(self) -> None:
        while (identity := self._queue.get()) is not None:
            if self._stop.is_set():
                return
            try:
                self._one(identity)
            except Exception as error:  # a worker must not die of one batch
                self._fail(identity, [{"code": type(error).__name__, "message": str(error), "line": None}])

    def _one(self, identity: str) -> None:
        batch = self._store.batch(identity)
        if batch["status"] == "cancelling":
            self._end(identity, "cancelled")
        if batch["status"] in (*ENDED, "cancelling"):
            return
        order = BatchOrder(
            input=str(self._store.content(batch["input_file_id"])),
            output=str(self._store.output_of(identity)),
            recipe=Recipe(kind=OPENAI, any_model=self._any_model, only_path=batch["endpoint"]),
            input_format="jsonl",
            shape=OPENAI,
        )
        while not self._stop.is_set():
            try:
                result = carry_out(order, self._where, self._settings, _Counter(self._store, identity), signals=False)
            except (UnreachableError, NotFoundError):
                if self._store.batch(identity)["status"] == "cancelling":
                    self._end(identity, "cancelled")
                    return
                self._stop.wait(AGAIN_S)
                continue
            except CorralError as error:
                self._fail(identity, _errors(error))
                return
            if result.summary.state == "done":
                self._end(identity, "completed", result.summary.rows)
            elif not self._stop.is_set():
                self._end(identity, "cancelled")
            return

    def _end(self, identity: str, status: str, rows: int = 0) -> None:
        """Make the files of a batch known, then its end."""
        folder = BatchFolder(self._store.output_of(identity))
        files: dict[str, str] = {}
        for name, path in (("output_file_id", folder.output), ("error_file_id", folder.errors)):
            if path.exists() and path.stat().st_size:
                made = f"file-{identity[6:]}-{name.partition('_')[0]}"
                self._store.add_file(made, path.name, "batch_output", path)
                files[name] = made
        counts = dict(self._store.batch(identity)["request_counts"])
        if status == "completed":
            failed = _count_lines(folder.errors)
            counts = {"total": rows, "completed": rows - failed, "failed": failed}
            self._store.change(identity, "finalizing")
        self._store.change(identity, status, request_counts=counts, **files)

    def _fail(self, identity: str, errors: list[dict[str, Any]]) -> None:
        self._store.change(identity, "failed", errors={"object": "list", "data": errors})


def _ask_to_stop(store: Store, identity: str) -> None:
    with contextlib.suppress(OSError):  # it has no folder yet: its status says it (`_Counter`)
        BatchFolder(store.output_of(identity)).cancel.touch()


def _count_lines(path: Any) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _errors(error: CorralError) -> list[dict[str, Any]]:
    problems = error.details.get("problems")
    if not problems:
        return [{"code": type(error).__name__, "message": f"{error.message} {error.remedy}", "line": None}]
    return [{"code": "invalid_row", "message": p["text"], "line": p["line"], "param": None} for p in problems]


class _Counter:
    """Keeps a batch's counts up to date, about once a second."""

    def __init__(self, store: Store, identity: str) -> None:
        self._store, self._identity = store, identity
        self._told = 0.0

    def note(self, kind: str, text: str) -> None:
        if kind == "begin":  # the input was found good
            now = self._store.change(self._identity, "in_progress")
            if now["status"] == "cancelling":  # asked before the job could hear it
                _ask_to_stop(self._store, self._identity)

    def tick(self, counts: Counts, runner: Runner) -> None:
        now = time.monotonic()
        if now - self._told > 1.0:
            self._told = now
            done = counts.before + counts.fine
            numbers = {"total": counts.rows, "completed": done, "failed": counts.failed}
            self._store.change(self._identity, request_counts=numbers)

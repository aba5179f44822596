"""The workers of the batch service: threads that take batches off a queue and run them, and a supervisor.

A batch that was under way when the service ended is queued again at the next start and continues by its ledger. While
the model is away, or the machine is short of disk space, file descriptors or memory, a batch waits, says so (its
texts name no path of the server), and goes on by itself; a bad input, a refused key or a run-away failure rate fails
it. A worker that dies is replaced, and its batch goes on with another; a batch whose workers keep dying fails.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from corral.base.errors import CorralError, NotFoundError, UnreachableError
from corral.serve.asgi_server import without_paths
from corral.use.batch.batch import run_batch
from corral.use.batch.core.folder import BatchFolder
from corral.use.batch.core.runner import Counts, Runner, RunnerSettings
from corral.use.batch.input.recipe import OPENAI, Recipe
from corral.use.batch.service.store import ENDED, Store
from corral.use.batch.spec import BatchServers, BatchSpec

PROBE_BYTES = 1 << 20
PROBE_FILES = 24


class Shortage(enum.Enum):
    """What the machine is short of; the value is the code that clients see."""

    DISK = "server_disk_full"
    FILES = "server_out_of_file_descriptors"
    MEMORY = "server_out_of_memory"

    @property
    def text(self) -> str:
        return f"Paused: {_TEXTS[self]}. The batch continues by itself when there is some again; nothing is lost."


_TEXTS = {
    Shortage.DISK: "the server has no room on its disk",
    Shortage.FILES: "the server has no free file descriptors",
    Shortage.MEMORY: "the server has no free memory",
}
_BY_ERRNO = {
    errno.ENOSPC: Shortage.DISK,
    errno.EDQUOT: Shortage.DISK,
    errno.EMFILE: Shortage.FILES,
    errno.ENFILE: Shortage.FILES,
    errno.ENOMEM: Shortage.MEMORY,
    errno.ENOBUFS: Shortage.MEMORY,
    errno.EAGAIN: Shortage.MEMORY,  # no further process or thread
}


def shortage_of(error: BaseException) -> Shortage | None:
    """The shortage that caused an error, directly or through its causes."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if isinstance(cause, CorralError):
            number = cause.details.get("errno")
        if number in _BY_ERRNO:
            return _BY_ERRNO[number]
        if isinstance(cause, MemoryError) or (isinstance(cause, RuntimeError) and "start new thread" in str(cause)):
            return Shortage.MEMORY
        cause = cause.__cause__ or cause.__context__
    return None


def has_room(folder: Path) -> bool:
    """Whether files can be opened and written there; tried, because quotas cannot be asked for."""
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(PROBE_FILES):
                stack.callback(os.close, os.open(folder, os.O_RDONLY))
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                written = file.write(bytes(PROBE_BYTES))
                os.fsync(file.fileno())
                return written == PROBE_BYTES
        except (OSError, MemoryError):
            return False


RETRY_S = 5.0
SUPERVISE_S = 1.0
SWEEP_S = 60.0
MOST_DEATHS = 3
NO_MODEL = "Waiting: the model does not answer. The batch continues by itself when it does."


class Workers:
    """Runs the batches of a store, `count` at once."""

    def __init__(
        self,
        store: Store,
        servers: BatchServers,
        count: int,
        any_model: bool,
        settings: RunnerSettings,
        skip_bad: bool = False,
    ) -> None:
        self._store, self._where, self._any_model, self._skip_bad = store, servers, any_model, skip_bad
        self._settings = replace(settings, refusals_fail=False)
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._running: dict[threading.Thread, str] = {}  # the batch of each worker
        self._deaths: Counter[str] = Counter()  # of workers, by their batch
        self._threads = [self._started() for _ in range(count)]
        for batch in reversed(store.batches()):
            if batch["status"] not in ENDED:
                self.submit(batch["id"])
        self._supervisor = threading.Thread(target=self._supervise, name="corral-batch-supervisor", daemon=True)
        self._supervisor.start()

    def submit(self, identity: str) -> None:
        self._queue.put(identity)

    def cancel(self, identity: str) -> dict[str, Any]:
        """Ask a batch to stop; one that has not begun stops at once."""
        batch = self._store.change(identity, "cancelling")
        _cancel(self._store, identity)
        return batch

    def close(self) -> None:
        """Stop all batches where they are; they continue at the next start."""
        self._stop.set()
        self._supervisor.join(30)
        for batch in self._store.batches():
            if batch["status"] in ("in_progress", "validating"):
                with contextlib.suppress(OSError):
                    BatchFolder(self._store.output_of(batch["id"])).cancel.touch()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(30)

    # Supervising the workers

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._work, name="corral-batch-worker", daemon=True)
        thread.start()
        return thread

    def _supervise(self) -> None:
        swept_s = time.monotonic()
        while not self._stop.wait(SUPERVISE_S):
            with contextlib.suppress(Exception):  # no thread, no disk: tried again soon
                self._replace_dead()
                if time.monotonic() - swept_s > SWEEP_S:
                    swept_s = time.monotonic()
                    self._store.files()  # removes those that have expired

    def _replace_dead(self) -> None:
        for number, thread in enumerate(self._threads):
            if thread.is_alive():
                continue
            self._threads[number] = self._started()
            if (identity := self._running.pop(thread, None)) is not None:
                self._deaths[identity] += 1
                self.submit(identity)

    def _work(self) -> None:
        thread = threading.current_thread()
        while (identity := self._queue.get()) is not None:
            if self._stop.is_set():
                return
            self._running[thread] = identity
            self._attempt(identity)
            self._running.pop(thread, None)

    def _attempt(self, identity: str) -> None:
        """Run a batch until it has ended; pause while the machine is short of something."""
        while not self._stop.is_set():
            try:
                if self._deaths[identity] >= MOST_DEATHS:
                    self._fail(identity, [_server_error("its worker died several times")])
                else:
                    self._run(identity)
            except Exception as error:
                short = shortage_of(error)
                if short is not None:
                    self._pause(identity, short)
                elif self._failed(identity, error):
                    return
            else:
                return

    def _failed(self, identity: str, error: Exception) -> bool:
        """Mark a batch as failed; False when even that cannot be written now."""
        try:
            self._fail(identity, [_server_error(type(error).__name__)])
        except OSError as full:
            self._pause(identity, shortage_of(full) or Shortage.DISK)
            return False
        except CorralError:  # the batch no longer exists
            pass
        return True

    def _pause(self, identity: str, short: Shortage) -> None:
        """Wait until the shortage is over; the batch's status shows it meanwhile."""
        self._store.wait_for(identity, short.value, short.text)
        while not self._stop.wait(RETRY_S) and not has_room(self._store.folder):
            pass
        self._store.wait_for(identity)

    # One batch

    def _run(self, identity: str) -> None:
        batch = self._store.batch(identity)
        if batch["status"] == "cancelling":
            self._end(identity, "cancelled")
        if batch["status"] in (*ENDED, "cancelling"):
            return
        content = self._input(batch)
        if content is None:
            self._fail(identity, [_error("input_file_deleted", f"{batch['input_file_id']} was deleted.")])
            return
        spec = BatchSpec(
            input=str(content),
            output=str(self._store.output_of(identity)),
            recipe=Recipe(kind=OPENAI, any_model=self._any_model, only_path=batch["endpoint"]),
            input_format="jsonl",
            shape=OPENAI,
            skip_bad=self._skip_bad,
            as_service=True,
        )
        while not self._stop.is_set():
            try:
                result = run_batch(spec, self._where, self._settings, _Counter(self._store, identity), signals=False)
            except (UnreachableError, NotFoundError):
                if self._store.batch(identity)["status"] == "cancelling":
                    self._end(identity, "cancelled")
                    return
                self._store.wait_for(identity, "model_away", NO_MODEL)
                self._stop.wait(RETRY_S)
                continue
            except CorralError as error:
                if shortage_of(error) is not None:
                    raise
                self._fail(identity, _errors(error))
                return
            if result.summary.done:
                self._end(identity, "completed", result.summary.rows, result.model)
            elif not self._stop.is_set():
                self._end(identity, "cancelled", result.summary.rows, result.model)
            return

    def _input(self, batch: dict[str, Any]) -> Path | None:
        with contextlib.suppress(NotFoundError):
            content = self._store.content(batch["input_file_id"])
            return content if content.exists() else None
        return None

    def _end(self, identity: str, status: str, rows: int = 0, model: str | None = None) -> None:
        """Add the files of a batch to the store, then its end."""
        folder = BatchFolder(self._store.output_of(identity))
        files: dict[str, str] = {}
        life_s = self._store.output_life_s(identity)
        for name, path in (("output_file_id", folder.output), ("error_file_id", folder.errors)):
            if path.exists() and path.stat().st_size:
                files[name] = f"file-{identity[6:]}-{name.partition('_')[0]}"
                self._store.add_file(files[name], path.name, "batch_output", path, life_s)
        if status == "completed":
            self._store.change(identity, "finalizing")
        completed, usage = _lines_and_usage(folder.output)
        total = rows or self._store.batch(identity)["request_counts"]["total"]
        counts = {"total": total, "completed": completed, "failed": _count_lines(folder.errors)}
        self._store.change(identity, status, request_counts=counts, usage=usage, model=model, **files)

    def _fail(self, identity: str, errors: list[dict[str, Any]]) -> None:
        self._store.change(identity, "failed", errors={"object": "list", "data": errors})


def _cancel(store: Store, identity: str) -> None:
    with contextlib.suppress(OSError):  # it has no folder yet: `_Counter` reads its status
        BatchFolder(store.output_of(identity)).cancel_at_once()


class _Tokens(msgspec.Struct):
    """The tokens of one answer, as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, int | None] | None = None
    completion_tokens_details: dict[str, int | None] | None = None


class _Body(msgspec.Struct):
    usage: _Tokens | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response


def _lines_and_usage(path: Path) -> tuple[int, dict[str, Any]]:
    """The lines of an output, and the tokens of all its answers in OpenAI's shape."""
    lines = read = cached = written = reasoning = 0
    decode = msgspec.json.Decoder(_Line).decode
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        for line in file:
            lines += 1
            usage = None
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # a server's own idea of usage
                usage = decode(line).response.body.usage
            if usage is not None:
                read, written = read + usage.prompt_tokens, written + (usage.completion_tokens or 0)
                cached += (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
                reasoning += (usage.completion_tokens_details or {}).get("reasoning_tokens") or 0
    return lines, {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": read + written,
    }


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "line": None, "param": None}


def _server_error(what: str) -> dict[str, Any]:
    return _error("server_error", f"The server failed ({what}).")


def _errors(error: CorralError) -> list[dict[str, Any]]:
    problems = error.details.get("problems")
    if not problems:
        return [_error(type(error).__name__, without_paths(error.in_full))]
    return [{"code": "invalid_row", "message": p["text"], "line": p["line"], "param": None} for p in problems]


class _Counter:
    """Keeps a batch's counts up to date, about once a second."""

    def __init__(self, store: Store, identity: str) -> None:
        self._store, self._identity = store, identity
        self._counted_at = 0.0

    def note(self, kind: str, text: str) -> None:
        if kind == "begin":  # the input is good
            now = self._store.change(self._identity, "in_progress")
            if now["status"] == "cancelling":  # asked for before the runner could notice
                _cancel(self._store, self._identity)
        elif kind == "waiting":
            self._store.wait_for(self._identity, "model_away", NO_MODEL)
        elif kind == "back":
            self._store.wait_for(self._identity)

    def tick(self, counts: Counts, runner: Runner) -> None:
        now = time.monotonic()
        if now - self._counted_at > 1.0:
            self._counted_at = now
            if not runner.waiting_for:
                self._store.wait_for(self._identity)
            done = counts.before + counts.fine
            numbers = {"total": counts.rows, "completed": done, "failed": counts.failed}
            with contextlib.suppress(OSError):  # a batch does not end because its counts cannot be written
                self._store.change(self._identity, request_counts=numbers)

"""The files of a batch: its output, its error file, and the folder beside them. One class owns every file name.

    answers.jsonl                 results, one JSON line per id, as they arrive (plain JSONL output)
    answers.errors.jsonl          rows that failed for good, in the same shape
    answers.jsonl.corral/
      job.json                    the spec: input, model, parameters; compared before a resume
      rows.index                  id hash, content hash and place of every row (`table`)
      rows.jsonl                  the rows themselves, when the input cannot be read at any place (gz, CSV, stdin, …)
      problems.jsonl              rows that were found bad and are to be skipped
      results.jsonl               results, when the output has another form and is made from them at the end
      answers.jsonl.before        empty: its mode says who may read the output, when one was there before (or errors)
      ledger                      one record for each result that is on disk and counts (`ledger`)
      damaged.1/                  a copy of a ledger that was damaged, and the lines of its damaged records
      (`records`) lock                        who works on the batch state.json                  how it last ended,
      and its summary events.jsonl                starts, stops, endpoint losses cancel                      present
      when the runner is asked to stop jobs/4711.json              a job of a scheduler that works on the batch
      (`jobs`) shared/                     only while several runners may work on it (`shared`)
        division.json             how the rows are cut into blocks
        blocks/000017             who does this block: a link to the `holder` file of a runner
        parts/HOST.PID.XXXXXX/    what one runner wrote: holder (who, and alive when touched), ledger, results, errors

All files lie beside the output, so the output's name is enough to find them. Corral's home has one note per batch
(`<home>/batches/<hash>`: the path of its output), for lists of batches; a lost note costs nothing but a line there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import ConflictError
from corral.base.files import create_private, make_private_dir, write_atomic
from corral.base.home import batches_dir
from corral.base.lock import SILENT_S, FileLock, lock_holder
from corral.base.processes import Identity, own_identity

COMPRESSIONS = (".gz", ".zst")
AT_ONCE = "at once\n"  # in the file that cancels: rows under way are given up
BEFORE = ".before"


@dataclass(frozen=True)
class BatchFolder:
    """Paths of one batch; `live` says whether results go straight into the output file."""

    output: Path
    live: bool = True

    @property
    def path(self) -> Path:
        return self.output.with_name(self.output.name + ".corral")

    @property
    def errors(self) -> Path:
        """`answers.errors.jsonl` beside `answers.jsonl`; other outputs keep their suffix, so that no two share a
        file.
        """
        name = self.output.name
        return self.output.with_name(name.removesuffix(".jsonl") + ".errors.jsonl")

    @property
    def has_errors(self) -> bool:
        return self.errors.exists() and self.errors.stat().st_size > 0

    @property
    def results(self) -> Path:
        """Where results are appended as they arrive."""
        return self.output if self.live else self.path / "results.jsonl"

    @property
    def spec(self) -> Path:
        return self.path / "job.json"

    @property
    def index(self) -> Path:
        return self.path / "rows.index"

    @property
    def spool(self) -> Path:
        return self.path / "rows.jsonl"

    @property
    def problems(self) -> Path:
        return self.path / "problems.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def cancel(self) -> Path:
        return self.path / "cancel"

    def cancel_at_once(self) -> None:
        """Stop the batch without waiting for rows under way."""
        write_atomic(self.cancel, AT_ONCE)

    @property
    def cancels_at_once(self) -> bool:
        with contextlib.suppress(OSError):
            return self.cancel.read_text() == AT_ONCE
        return False

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    @property
    def shared(self) -> Path:
        return self.path / "shared"

    @property
    def division(self) -> Path:
        return self.shared / "division.json"

    @property
    def blocks(self) -> Path:
        return self.shared / "blocks"

    @property
    def parts(self) -> Path:
        return self.shared / "parts"

    def create(self) -> None:
        """Make the folder and its parents; it holds prompts, so only the owner may read it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        sync_dir(self.path.parent)

    @contextlib.contextmanager
    def nothing_if_refused(self) -> Iterator[None]:
        """Leave no folder behind when the block fails before a new spec was written."""
        new = not self.spec.exists()
        try:
            yield
        except BaseException:
            if new and not self.spec.exists():
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def begin_anew(self, *paths: Path) -> None:
        """Remove files; those written in their place get the same readers."""
        for path in paths:
            if path.is_file():
                os.close(create_private(self._earlier(path), path))
                path.unlink()

    def like(self, path: Path) -> Path | None:
        """The file whose mode a new `path` gets: the one it replaces, or the one that was there before the batch."""
        return next((one for one in (path, self._earlier(path)) if one.is_file()), None)

    def _earlier(self, path: Path) -> Path:
        return self.path / f"{path.name}{BEFORE}"

    def sweep(self) -> None:
        """Remove files that killed runners left half written; only for the holder of the lock."""
        for pattern in (".*.tmp", "*.new"):
            for left in self.path.glob(pattern):
                left.unlink(missing_ok=True)


@dataclass(frozen=True)
class PartFolder(BatchFolder):
    """The results of one runner among several, which no one else writes."""

    name: str = ""

    @property
    def path(self) -> Path:
        return BatchFolder(self.output).parts / self.name

    @property
    def results(self) -> Path:
        return self.path / "results.jsonl"

    @property
    def errors(self) -> Path:
        return self.path / "errors.jsonl"

    @property
    def holder(self) -> Path:
        return self.path / "holder"

    @property
    def cancel(self) -> Path:
        return BatchFolder(self.output).cancel


def sync_dir(path: Path) -> None:
    """Make new names in a folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse this, and then keep names by themselves
    finally:
        os.close(descriptor)


class BatchLock(FileLock):
    """Held while a runner works; refused, with the holder's name, when another process holds it.

    While another process holds it, `patient` says whether to wait.
    """

    def __init__(self, path: Path, what: str, patient: Callable[[], bool] = lambda: False) -> None:
        super().__init__(path, self._refuse, SILENT_S)
        self._what, self._patient = what, patient

    def _refuse(self, holder: Identity) -> None:
        if not self._patient():
            raise ConflictError(
                f"{self._what} is being worked on by process {holder.pid} on {holder.host}.",
                "Let it finish, or stop it with `corral batch cancel`.",
                pid=holder.pid,
                host=holder.host,
            )

    def check(self) -> None:
        """Refuse to go on when another process has taken over: this one was stopped for long, or cut off."""
        holder = lock_holder(self.path)
        if holder != own_identity():
            who = f"process {holder.pid} on {holder.host}" if holder else "a process that has ended since"
            raise ConflictError(
                f"{self._what} was taken over by {who} while this process was silent.",
                "Nothing was written since. Leave it to that process, or run the same command later.",
            )


def note_output(output: Path) -> None:
    """Remember where a batch writes, in Corral's home; a home that cannot be written does not stop the batch."""
    path = str(output.absolute())
    note = batches_dir() / hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    with contextlib.suppress(OSError):
        if not note.exists():
            make_private_dir(batches_dir())
            write_atomic(note, path + "\n")


def known_outputs() -> list[Path]:
    """The outputs of all batches that still exist, the one worked on last first."""
    outputs: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for note in batches_dir().iterdir():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                folder = BatchFolder(Path(note.read_text(encoding="utf-8").rstrip("\n")))
                ledger = folder.ledger if folder.ledger.exists() else folder.spec
                if folder.spec.is_file():
                    outputs.append((ledger.stat().st_mtime, folder.output))
    return [output for _, output in sorted(outputs, key=lambda pair: -pair[0])]

"""One class owns every file name of a resumable job: the output, its error file, and the job's folder beside them.

    answers.jsonl                 results, one JSON line per id, as they arrive (plain JSONL output)
    answers.errors.jsonl          rows that failed for good, in the same shape
    answers.jsonl.corral/
      job.json                    what was asked: input, model, parameters; compared before a resume
      rows.index                  id hash, content hash and place of every row (`table`)
      rows.jsonl                  the rows themselves, when the input cannot be read at any place (gz, CSV, stdin, …)
      problems.jsonl              rows that were found bad and are to be skipped
      results.jsonl               results, when the output has another form and is made from them at the end
      answers.jsonl.before        empty: says who may read the output, when one was there before (also for the errors)
      ledger                      what counts: one record for each result that is on disk (`ledger`)
      damaged.1/                  a copy of a ledger that was damaged, and the lines whose records were (`damage`)
      lock                        who works on it (`lock`)
      state.json                  how it last ended, and its summary
      events.jsonl                starts, stops, endpoint losses
      cancel                      somebody asks the runner to stop
      jobs/4711.json              a job of a scheduler that works on it (`queued`)
      shared/                     only while several runners may work on it (`shared`)
        division.json             how the rows are cut into blocks
        blocks/000017             who does this block: a link to the `holder` file of a runner
        parts/HOST.PID.XXXXXX/    what one runner wrote: holder (who, and alive when touched), ledger, results, errors

Everything of a job lies beside its output, so that it is found again by who knows the output's name.

One runner per job: the lock of a batch, which its holder touches while it works.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import ConflictError
from corral.base.files import create_private
from corral.base.lock import SILENT_S, FileLock, lock_holder
from corral.base.processes import Identity, own_identity

COMPRESSIONS = (".gz", ".zst")
BEFORE = ".before"


@dataclass(frozen=True)
class BatchFolder:
    """Paths of one job; `live` says whether results go straight into the output file."""

    output: Path
    live: bool = True

    @property
    def path(self) -> Path:
        return self.output.with_name(self.output.name + ".corral")

    @property
    def errors(self) -> Path:
        """`answers.errors.jsonl` beside `answers.jsonl`; other forms keep their ending: no two share a file."""
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
    def job(self) -> Path:
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
        """Leave no folder behind when what is done inside fails before a new job was written down."""
        new = not self.job.exists()
        try:
            yield
        except BaseException:
            if new and not self.job.exists():
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def begin_anew(self, *paths: Path) -> None:
        """Take files away; what is written in their place can be read by the same people, and by nobody else."""
        for path in paths:
            if path.is_file():
                os.close(create_private(self._earlier(path), path))
                path.unlink()

    def like(self, path: Path) -> Path | None:
        """The file that says who may read a new `path`: the one it replaces, or was there before the batch."""
        return next((one for one in (path, self._earlier(path)) if one.is_file()), None)

    def _earlier(self, path: Path) -> Path:
        return self.path / f"{path.name}{BEFORE}"

    def sweep(self) -> None:
        """Remove what runners left half written when they were killed; only the lock's holder may."""
        for pattern in (".*.tmp", "*.new"):
            for left in self.path.glob(pattern):
                left.unlink(missing_ok=True)


@dataclass(frozen=True)
class PartFolder(BatchFolder):
    """The results of one runner among several: files that nobody else ever writes."""

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
    """Holds a job while the `with` block runs; refuses when somebody else does, and says who.

    `patient` is asked, while somebody else holds it, whether to wait.
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
        """Refuse to go on when somebody took the job over: this process was stopped for long, or cut off."""
        found = lock_holder(self.path)
        if found != own_identity():
            who = f"process {found.pid} on {found.host}" if found else "somebody who is gone again"
            raise ConflictError(
                f"{self._what} was taken over by {who} while this process was not heard of.",
                "Nothing was written since. Leave it to that process, or run the same command later.",
            )

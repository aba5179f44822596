"""Which batches there are: each leaves a note in the home, because its files lie beside its output.

    <home>/batches/<hash>      the path of one output

A note says only where to look: a batch that was moved or deleted is not listed, and a lost note costs nothing but
its line in a list.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from corral.base.files import make_private_dir, write_atomic
from corral.base.home import batches_dir
from corral.use.batch.core.folder import BatchFolder


def note_output(output: Path) -> None:
    """Remember where a batch writes; a home that cannot be written does not hinder the batch."""
    path = str(output.absolute())
    note = batches_dir() / hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    with contextlib.suppress(OSError):
        if not note.exists():
            make_private_dir(batches_dir())
            write_atomic(note, path + "\n")


def known_outputs() -> list[Path]:
    """The outputs of all batches that are still where they were begun, the one worked on last first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for note in batches_dir().iterdir():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                folder = BatchFolder(Path(note.read_text(encoding="utf-8").rstrip("\n")))
                ledger = folder.ledger if folder.ledger.exists() else folder.job
                if folder.job.is_file():
                    found.append((ledger.stat().st_mtime, folder.output))
    return [output for _, output in sorted(found, key=lambda pair: -pair[0])]

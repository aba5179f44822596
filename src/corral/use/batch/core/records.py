"""The records of a ledger as bytes: 40 each, with a checksum that tells a damaged one from a good one.

Every record stands at a multiple of its size, so the others can be read when one is damaged. Nothing is taken out of
a ledger before it is copied, with the lines of its damaged records, to `damaged.1` (2, 3, …) in the batch's folder.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from corral.base.errors import DataError
from corral.base.files import create_private
from corral.use.batch.core.folder import BatchFolder, sync_dir

FINE, FAILED = 0, 1
_FIELDS = struct.Struct("<QQQIII")
_RECORD = struct.Struct("<QQQIIII")
RECORD_BYTES = _RECORD.size
_CHUNK = RECORD_BYTES * 16384


class LedgerRecord(NamedTuple):
    """One result that counts."""

    id_hash: int
    content: int
    end: int  # of its line, in the file that `kind` names
    row: int
    length: int
    kind: int


def pack_record(record: LedgerRecord) -> bytes:
    fields = _FIELDS.pack(*record)
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def read_records(descriptor: int, at: int = 0, damaged: list[int] | None = None) -> Iterator[LedgerRecord]:
    """Every record that can be read; the offsets of whole ones that cannot are added to `damaged`."""
    crc32, body = zlib.crc32, RECORD_BYTES - 4
    while chunk := os.pread(descriptor, _CHUNK, at):
        whole = len(chunk) // RECORD_BYTES * RECORD_BYTES
        view = memoryview(chunk)
        offset = 0
        for *fields, check in _RECORD.iter_unpack(view[:whole]):
            if crc32(view[offset : offset + body]) == check and fields[5] <= FAILED and fields[4] <= fields[2]:
                yield LedgerRecord._make(fields)
            elif damaged is not None:
                damaged.append(at + offset)
            offset += RECORD_BYTES
        if whole < len(chunk):
            return
        at += whole


def end_of_records(size: int, damaged: list[int]) -> int:
    """Where the last readable record of a ledger ends: what follows was torn off in a crash."""
    end = size // RECORD_BYTES * RECORD_BYTES
    for at in reversed(damaged):
        if at + RECORD_BYTES != end:
            break
        end = at
    return end


_NAMES = ("results.jsonl", "errors.jsonl")
_PIECE = 1 << 20


class LedgerFiles(NamedTuple):
    """The open files of a ledger: its two files of lines, and its records."""

    fds: list[int]
    ledger_fd: int


def set_aside(folder: BatchFolder, files: LedgerFiles) -> Path:
    """Copy a damaged ledger, and the lines that no readable record names; the folder of the copy."""
    try:
        copy = _new_folder(folder.path)
        _copy(files.ledger_fd, [(0, os.fstat(files.ledger_fd).st_size)], copy / "ledger")
        for kind, name in zip((FINE, FAILED), _NAMES, strict=True):
            if unnamed := list(_unnamed(files, kind)):
                _copy(files.fds[kind], unnamed, copy / name)
        sync_dir(copy)
        sync_dir(folder.path)
    except OSError as error:
        raise DataError(
            f"the ledger of {folder.output} is damaged, and cannot be copied before it is repaired: "
            f"{error.strerror or error}.",
            "Nothing was changed. Make room, then run the same command again.",
            errno=error.errno,
        ) from error
    return copy


def _new_folder(parent: Path) -> Path:
    number = 1
    while True:
        made = parent / f"damaged.{number}"
        try:
            made.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return made


def _unnamed(files: LedgerFiles, kind: int) -> Iterator[tuple[int, int]]:
    """The stretches of a file of lines that belong to no readable record, as start and end."""
    at = 0
    for record in read_records(files.ledger_fd):
        if record.kind == kind:
            start = record.end - record.length
            if start > at:
                yield at, start
            at = max(at, record.end)
    size = os.fstat(files.fds[kind]).st_size
    if size > at:
        yield at, size


def _copy(source: int, stretches: list[tuple[int, int]], path: Path) -> None:
    with os.fdopen(create_private(path), "wb") as file:
        for at, end in stretches:
            while at < end and (piece := os.pread(source, min(_PIECE, end - at), at)):
                file.write(piece)
                at += len(piece)
        file.flush()
        os.fsync(file.fileno())

"""The records of a ledger as bytes: 40 each, with a checksum that tells a damaged one from a good one.

Every record stands at a multiple of its size: whatever happened to one, the others are found and read.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

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

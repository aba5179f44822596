"""Reading a multipart/form-data body as it arrives: the file goes to disk, small fields into a mapping."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from corral.errors import UsageError

__all__ = ["read_form"]

_MAX_FIELD_BYTES = 1 << 16
_NAME = re.compile(rb'[;\s]name="([^"]*)"')
_FILENAME = re.compile(rb'filename="((?:[^"\\]|\\.)*)"')


def read_form(content_type: str, pieces: Iterator[bytes], place: Path) -> dict[str, str]:
    """The small fields of a form; the part called `file` is written to `place`, its name kept as `filename`."""
    found = re.search(r'boundary="?([^";]+)"?', content_type)
    if "multipart/form-data" not in content_type or not found:
        raise UsageError("the upload is not multipart/form-data.", "Send the fields `purpose` and `file`.")
    reader = _Reader(pieces, b"\r\n--" + found[1].encode())
    fields: dict[str, str] = {}
    reader.skip_first()
    while (head := reader.head()) is not None:
        name = _NAME.search(head)
        if name is None:
            raise UsageError("a part of the upload has no name.", "Send the fields `purpose` and `file`.")
        if name[1] == b"file":
            filename = _FILENAME.search(head)
            fields["filename"] = filename[1].decode("utf-8", "replace") if filename else "file"
            with place.open("wb") as file:
                reader.part(file)
        else:
            fields[name[1].decode("utf-8", "replace")] = reader.part(None).decode("utf-8", "replace")
    if "filename" not in fields:
        raise UsageError("the upload has no file.", "Send the fields `purpose` and `file`.")
    return fields


class _Reader:
    """Cuts a stream of pieces at a boundary; keeps no more than a piece and a boundary in memory."""

    def __init__(self, pieces: Iterator[bytes], mark: bytes) -> None:
        self._pieces, self._mark = pieces, mark
        self._buffer = b"\r\n"  # so that the first boundary looks like the others

    def _more(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            raise UsageError("the upload ends too early.", "Send it again.")
        self._buffer += piece

    def skip_first(self) -> None:
        self.part(None)

    def head(self) -> bytes | None:
        """The header of the next part; None after the last."""
        while len(self._buffer) < 2:
            self._more()
        if self._buffer.startswith(b"--"):
            for _ in self._pieces:
                pass
            return None
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _MAX_FIELD_BYTES:
                raise UsageError("a part of the upload has no header.", "Send it again.")
            self._more()
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        return head

    def part(self, into: IO[bytes] | None) -> bytes:
        """The content up to the next boundary: into a file, or returned."""
        kept = b""
        while True:
            at = self._buffer.find(self._mark)
            safe = at if at >= 0 else max(0, len(self._buffer) - len(self._mark))
            if into is not None:
                into.write(self._buffer[:safe])
            else:
                kept += self._buffer[:safe]
                if len(kept) > _MAX_FIELD_BYTES:
                    raise UsageError("a field of the upload is too long.", "Only `file` may be large.")
            self._buffer = self._buffer[safe:]
            if at >= 0:
                self._buffer = self._buffer[len(self._mark) :]
                return kept
            self._more()

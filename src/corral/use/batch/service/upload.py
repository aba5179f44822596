"""An upload (multipart/form-data) on its way to disk: the file is written as it arrives, small fields are kept.

No more than a buffer of it is in memory. Whatever ends an upload before its end (a form that cannot be read, too many
bytes, a client that leaves or falls silent, a full disk) leaves nothing on disk.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import anyio.to_thread
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from corral.serve.asgi_server import Refusal

SILENCE_S = 60.0  # between two pieces of a body
BUFFER_BYTES = 1 << 20
LONGEST_FIELD_BYTES = 1 << 16
WANTED = "Send multipart/form-data with the fields `purpose` and `file`."


class _Form:
    """What the parser tells, as fields and as bytes for the file."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.buffer = bytearray()
        self.whole = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._field: str | None = None
        self._text = b""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._headers.clear,
            "on_header_field": self._on_name,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name")
        if name is None:
            raise Refusal(400, f"A part of the upload has no name. {WANTED}")
        self._field, self._text = name.decode("utf-8", "replace"), b""
        if self._field == "file":
            if "filename" in self.fields:
                raise Refusal(400, f"The upload holds two files. {WANTED}")
            self.fields["filename"] = options.get(b"filename", b"file").decode("utf-8", "replace")[:255]

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self.buffer += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > LONGEST_FIELD_BYTES or len(self.fields) > 16:
            raise Refusal(413, "A field of the upload is too long; only `file` may be large.")

    def _on_part_end(self) -> None:
        if self._field is not None and self._field != "file":
            self.fields[self._field] = self._text.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self.whole = True


async def pieces_in_time(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A body as it arrives; a client that falls silent is refused."""
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                piece = await anext(stream, None)
        except TimeoutError:
            raise Refusal(408, f"Nothing was received for {SILENCE_S:g} s.") from None
        if piece is None:
            return
        yield piece


async def receive(content_type: str, stream: AsyncIterator[bytes], path: Path, most: int) -> dict[str, str]:
    """Write the part called `file` to `path`; returns the other fields, and the file's name as `filename`."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Refusal(400, f"The upload is not multipart/form-data. {WANTED}")
    form = _Form()
    try:
        with path.open("xb", buffering=0) as file:
            parser = MultipartParser(options[b"boundary"], form.callbacks())  # type: ignore[arg-type]
            await _write(form, parser, pieces_in_time(stream), file, most)
        if not form.whole:
            raise Refusal(400, "The upload ends too early.")
        if "filename" not in form.fields:
            raise Refusal(400, f"The upload holds no file. {WANTED}")
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, MultipartParseError):
            raise Refusal(400, f"The upload cannot be read: {error}") from None
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Refusal(507, "The server has no room for this file.") from None
        raise
    return form.fields


async def _write(
    form: _Form, parser: MultipartParser, pieces: AsyncIterator[bytes], file: IO[bytes], most: int
) -> None:
    read = 0
    async for piece in pieces:
        read += len(piece)
        if read > most:
            raise Refusal(413, f"The upload is longer than {most:,} bytes.")
        parser.write(piece)
        if len(form.buffer) >= BUFFER_BYTES:
            await _flush(form, file)
    await _flush(form, file)


async def _flush(form: _Form, file: IO[bytes]) -> None:
    data, form.buffer = form.buffer, bytearray()
    if data:
        await anyio.to_thread.run_sync(_write_all, file, data)


def _write_all(file: IO[bytes], data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]

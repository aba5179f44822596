"""What the batch service keeps: uploaded files and batches, each a small JSON document beside its data.

    <folder>/key                     the key that clients must send (0600)
    <folder>/files/<id>.json         OpenAI's file object; the content is in <id>.data, or where `path` points
    <folder>/batches/<id>.json       OpenAI's batch object
    <folder>/batches/<id>.jsonl      its output, with the batch's folder beside it

Documents are replaced in one step, so a restart finds every file and batch in its last state. An upload
(multipart/form-data) is written as it arrives: no more than a buffer of it is in memory, and an upload that fails (a
form that cannot be read, too many bytes, a client that leaves or falls silent, a full disk) leaves nothing on disk.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import anyio.to_thread
import msgspec
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from corral.base.errors import NotFoundError
from corral.base.files import make_private_dir, write_atomic
from corral.serve.asgi_server import Refusal
from corral.use.batch.core.table import save_json

_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
ENDED = ("completed", "failed", "cancelled", "expired")
_OUTPUT_LIFE = "output_life_s"  # a field of stored batches that clients do not see
SHORTEST_LIFE_S, LONGEST_LIFE_S = 3600, 30 * 86400  # as OpenAI has them


def life_of(policy: Any, name: str) -> int | None:
    """How long a file is to be kept, by its `expires_after`; None: until it is deleted."""
    if policy is None or policy == {}:
        return None
    seconds = policy.get("seconds") if isinstance(policy, dict) else None
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit():  # of a form
        seconds = int(seconds[:9])
    if (
        not isinstance(seconds, int)
        or not SHORTEST_LIFE_S <= seconds <= LONGEST_LIFE_S
        or policy.get("anchor") != "created_at"
    ):
        bounds = f"{SHORTEST_LIFE_S:,} to {LONGEST_LIFE_S:,}"
        raise Refusal(400, f"{name} is not an object with the anchor 'created_at' and {bounds} seconds.")
    return seconds


class Store:
    """Files and batches on disk; safe for several threads of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files, self._batches = folder / "files", folder / "batches"
        for one in (folder, self._files, self._batches):
            make_private_dir(one)
        self._lock = threading.RLock()
        self._waits: dict[
            str, dict[str, Any]
        ] = {}  # what each batch waits for; in memory, because the disk may be full

    def own_key(self) -> Path:
        """The file with the service's key, made at the first start."""
        path = self.folder / "key"
        if not path.exists():
            write_atomic(path, secrets.token_urlsafe(32) + "\n")
        return path

    # Files

    def new_upload(self) -> tuple[str, Path]:
        """An id for a file, and where its content is to be written."""
        identity = f"file-{secrets.token_hex(12)}"
        return identity, self._files / f".{identity}.upload"

    def keep_upload(
        self, identity: str, filename: str, purpose: str, upload: Path, life_s: int | None = None
    ) -> dict[str, Any]:
        """The file object of a complete upload."""
        path = self._files / f"{identity}.data"
        upload.replace(path)
        return self.add_file(identity, filename, purpose, path, life_s)

    def drop_broken_uploads(self) -> None:
        """Remove uploads that an earlier run of the service left unfinished; no other process may use the folder."""
        for left in self._files.glob(".*.upload"):
            left.unlink()
        for left in self._files.glob("*.data"):
            if not left.with_suffix(".json").exists():
                left.unlink()

    def add_file(
        self, identity: str, filename: str, purpose: str, path: Path, life_s: int | None = None
    ) -> dict[str, Any]:
        """The file object of content that is on disk; it is removed `life_s` after now."""
        now = int(time.time())
        about = {
            "id": identity,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": now,
            "expires_at": now + life_s if life_s else None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        save_json(self._files / f"{identity}.json", {**about, "path": str(path)})
        return about

    def file(self, identity: str) -> dict[str, Any]:
        about = self._file(identity)
        about.pop("path", None)
        return about

    def content(self, identity: str) -> Path:
        return Path(self._file(identity)["path"])

    def _file(self, identity: str) -> dict[str, Any]:
        about = self._read(self._files, identity, "file")
        if self._has_expired(about):
            self._remove_file(about)
            return self._read(self._files, identity, "file")
        return about

    def _has_expired(self, about: dict[str, Any]) -> bool:
        """Whether a file's time is over, and no batch still reads it."""
        if (about.get("expires_at") or float("inf")) > time.time():
            return False
        batches = self._all(self._batches)
        return all(one["input_file_id"] != about["id"] or one["status"] in ENDED for one in batches)

    def delete_file(self, identity: str) -> None:
        self._remove_file(self._file(identity))

    def _remove_file(self, about: dict[str, Any]) -> None:
        path = Path(about["path"])
        if path.parent in (self._files, self._batches):
            path.unlink(missing_ok=True)
        (self._files / f"{about['id']}.json").unlink(missing_ok=True)

    def files(self) -> list[dict[str, Any]]:
        """All file objects, newest first; those that have expired are removed."""
        files = []
        for about in self._all(self._files):
            if self._has_expired(about):
                self._remove_file(about)
            else:
                files.append(about)
        for about in files:
            about.pop("path", None)
        return files

    # Batches

    def output_of(self, identity: str) -> Path:
        return self._batches / f"{identity}.jsonl"

    def output_life_s(self, identity: str) -> int | None:
        """How long the files of a batch are kept after they were made."""
        life_s: int | None = self._read(self._batches, identity, "batch").get(_OUTPUT_LIFE)
        return life_s

    def add_batch(
        self, input_file: str, endpoint: str, window: str, metadata: Any, output_life_s: int | None = None
    ) -> dict[str, Any]:
        """A new batch object, waiting to be checked."""
        now = int(time.time())
        empty = ("errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at",
                 "failed_at", "expired_at", "cancelling_at", "cancelled_at", "usage", "model")  # fmt: skip
        batch = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": input_file,
            "completion_window": window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + 365 * 86400,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
            _OUTPUT_LIFE: output_life_s,
            **dict.fromkeys(empty),
        }
        self._save(batch)
        return self._shown(batch)

    def batch(self, identity: str) -> dict[str, Any]:
        return self._shown(self._read(self._batches, identity, "batch"))

    def batches(self) -> list[dict[str, Any]]:
        """All batch objects, newest first."""
        return [self._shown(batch) for batch in self._all(self._batches)]

    def wait_for(self, identity: str, code: str = "", text: str = "") -> None:
        """Show in a batch's status why it waits; without a code, that it goes on."""
        if code:
            self._waits.setdefault(identity, {"since": int(time.time())}).update(code=code, message=text)
        else:
            self._waits.pop(identity, None)

    def _shown(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with `waiting_for`, an addition to OpenAI's object: null, or the reason and since when."""
        shown = {name: value for name, value in batch.items() if name != _OUTPUT_LIFE}
        return {**shown, "waiting_for": None if batch["status"] in ENDED else self._waits.get(batch["id"])}

    def change(self, identity: str, status: str | None = None, **values: Any) -> dict[str, Any]:
        """Change a batch; a new status gets its time. An ended batch stays as it is."""
        with self._lock:
            batch = self._read(self._batches, identity, "batch")
            if batch["status"] in ENDED:
                return self._shown(batch)
            if status == "in_progress" and batch["status"] == "cancelling":
                status = None
            batch.update(values)
            if status:
                batch["status"] = status
                if f"{status}_at" in batch and not batch[f"{status}_at"]:
                    batch[f"{status}_at"] = int(time.time())
            self._save(batch)
            if batch["status"] in ENDED:
                self._waits.pop(identity, None)
            return self._shown(batch)

    # Inside

    def _save(self, batch: dict[str, Any]) -> None:
        with self._lock:
            save_json(self._batches / f"{batch['id']}.json", batch)

    def _read(self, folder: Path, identity: str, what: str) -> dict[str, Any]:
        document = self._document(folder / f"{identity}.json") if _ID.fullmatch(identity) else None
        if document is None:
            raise NotFoundError(f"No such {what} object: {identity[:80]}", f"List them: GET /v1/{folder.name}")
        return document

    def _document(self, path: Path) -> dict[str, Any] | None:
        """A document; None where there is none, or none any more: another request may have deleted it just now."""
        with contextlib.suppress(FileNotFoundError):
            document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
            return document
        return None

    def _all(self, folder: Path) -> list[dict[str, Any]]:
        found = (self._document(path) for path in folder.glob("*.json"))
        documents = [one for one in found if one is not None]
        return sorted(documents, key=lambda about: (about["created_at"], about["id"]), reverse=True)


BUFFER_BYTES = 1 << 20
LONGEST_FIELD_BYTES = 1 << 16
WANTED = "Send multipart/form-data with the fields `purpose` and `file`."


class _Form:
    """A form as the parser reads it: its fields, and the bytes of its file."""

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


async def receive(content_type: str, stream: AsyncIterator[bytes], path: Path, most: int) -> dict[str, str]:
    """Write the part called `file` to `path`; returns the other fields, and the file's name as `filename`."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Refusal(400, f"The upload is not multipart/form-data. {WANTED}")
    form = _Form()
    try:
        with path.open("xb", buffering=0) as file:
            parser = MultipartParser(options[b"boundary"], form.callbacks())  # type: ignore[arg-type]
            await _write(form, parser, stream, file, most)
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

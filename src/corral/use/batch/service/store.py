"""What the batch service keeps: uploaded files and batches, each a small JSON document beside its data.

    <folder>/key                     what clients must send (0600)
    <folder>/files/<id>.json         OpenAI's file object; the content is in <id>.data, or where `path` points
    <folder>/batches/<id>.json       OpenAI's batch object
    <folder>/batches/<id>.jsonl      its output, with the job's folder beside it

Documents are replaced in one step, so a restart finds every file and batch as it last stood.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from corral.base.errors import NotFoundError
from corral.base.files import make_private_dir, write_atomic
from corral.use.batch.core.table import save_json

_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
ENDED = ("completed", "failed", "cancelled", "expired")


class Store:
    """Files and batches on disk; safe for several threads of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files, self._batches = folder / "files", folder / "batches"
        for one in (folder, self._files, self._batches):
            make_private_dir(one)
        self._lock = threading.RLock()
        self._waits: dict[str, dict[str, Any]] = {}  # what a batch waits for; in memory: the disk may be full

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

    def keep_upload(self, identity: str, filename: str, purpose: str, upload: Path) -> dict[str, Any]:
        """A file object for an upload that is whole."""
        path = self._files / f"{identity}.data"
        upload.replace(path)
        return self.add_file(identity, filename, purpose, path)

    def drop_broken_uploads(self) -> None:
        """Remove what an earlier run of the service left half done; nobody else may be using the folder."""
        for left in self._files.glob(".*.upload"):
            left.unlink()
        for left in self._files.glob("*.data"):
            if not left.with_suffix(".json").exists():
                left.unlink()

    def add_file(self, identity: str, filename: str, purpose: str, path: Path) -> dict[str, Any]:
        """A file object for content that is on disk."""
        about = {
            "id": identity,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        save_json(self._files / f"{identity}.json", {**about, "path": str(path)})
        return about

    def file(self, identity: str) -> dict[str, Any]:
        about = self._read(self._files, identity, "file")
        about.pop("path", None)
        return about

    def content(self, identity: str) -> Path:
        return Path(self._read(self._files, identity, "file")["path"])

    def delete_file(self, identity: str) -> None:
        path = self.content(identity)
        if path.parent == self._files:
            path.unlink(missing_ok=True)
        (self._files / f"{identity}.json").unlink(missing_ok=True)

    def files(self) -> list[dict[str, Any]]:
        """All file objects, newest first."""
        found = self._all(self._files)
        for about in found:
            about.pop("path", None)
        return found

    # Batches

    def output_of(self, identity: str) -> Path:
        return self._batches / f"{identity}.jsonl"

    def add_batch(self, input_file: str, endpoint: str, window: str, metadata: Any) -> dict[str, Any]:
        """A new batch object, waiting to be checked."""
        now = int(time.time())
        empty = ("errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at",
                 "failed_at", "expired_at", "cancelling_at", "cancelled_at")  # fmt: skip
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
            **dict.fromkeys(empty),
        }
        self._save(batch)
        return self._told(batch)

    def batch(self, identity: str) -> dict[str, Any]:
        return self._told(self._read(self._batches, identity, "batch"))

    def batches(self) -> list[dict[str, Any]]:
        """All batch objects, newest first."""
        return [self._told(batch) for batch in self._all(self._batches)]

    def wait_for(self, identity: str, code: str = "", text: str = "") -> None:
        """Say in a batch's status why nothing of it is done just now; without a code, that it goes on."""
        if code:
            self._waits.setdefault(identity, {"since": int(time.time())}).update(code=code, message=text)
        else:
            self._waits.pop(identity, None)

    def _told(self, batch: dict[str, Any]) -> dict[str, Any]:
        """With `waiting_for`, an addition to OpenAI's object: null, or why, since when."""
        return {**batch, "waiting_for": None if batch["status"] in ENDED else self._waits.get(batch["id"])}

    def change(self, identity: str, status: str | None = None, **values: Any) -> dict[str, Any]:
        """Change a batch; a new status gets its time. An ended batch stays as it is."""
        with self._lock:
            batch = self._read(self._batches, identity, "batch")
            if batch["status"] in ENDED:
                return self._told(batch)
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
            return self._told(batch)

    # Inside

    def _save(self, batch: dict[str, Any]) -> None:
        with self._lock:
            save_json(self._batches / f"{batch['id']}.json", batch)

    def _read(self, folder: Path, identity: str, what: str) -> dict[str, Any]:
        path = folder / f"{identity}.json"
        if not _ID.fullmatch(identity) or not path.is_file():
            raise NotFoundError(f"No such {what} object: {identity[:80]}", f"List them: GET /v1/{folder.name}")
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        return found

    def _all(self, folder: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [msgspec.json.decode(path.read_bytes()) for path in folder.glob("*.json")]
        return sorted(found, key=lambda about: (about["created_at"], about["id"]), reverse=True)

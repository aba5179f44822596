"""Speech for `/v1/audio/transcriptions`: a file of this machine and the request's fields, as a form."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from corral.client.local_file import LocalFileKind

RECORDING = LocalFileKind("recording", 25 << 20, "Cut it into pieces.")  # vLLM's own limit
_BOUNDARY = f"corral-{secrets.token_hex(16)}"
FORM = f"multipart/form-data; boundary={_BOUNDARY}"


def audio_path(body: Mapping[str, Any], folder: Path | None) -> Path:
    """The file that a request names."""
    return RECORDING.path(str(body["file"]), folder)


def check_audio(path: Path) -> int:
    """Refuse what cannot be sent; the size of the file."""
    return RECORDING.read(path, 0)[1]


def audio_form(body: Mapping[str, Any], path: Path) -> bytes:
    """The form of a request, in the type `FORM`."""
    content, _ = RECORDING.read(path)
    parts = []
    for name, value in body.items():
        if name != "file":
            text = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
            parts.append(_head(name) + b"\r\n\r\n" + text)
    parts.append(_head("file", path.name) + b"\r\nContent-Type: application/octet-stream\r\n\r\n" + content)
    return (
        b"".join(b"--%b\r\n%b\r\n" % (_BOUNDARY.encode(), part) for part in parts) + f"--{_BOUNDARY}--\r\n".encode()
    )


def _head(name: str, filename: str = "") -> bytes:
    quoted = [one.encode("ascii", "replace").decode().translate(_UNSAFE) for one in (name, filename)]
    head = f'Content-Disposition: form-data; name="{quoted[0]}"'
    return (head + (f'; filename="{os.path.basename(quoted[1])}"' if filename else "")).encode()  # noqa: PTH119


_UNSAFE = str.maketrans(dict.fromkeys('"\\\r\n\x00', "_"))

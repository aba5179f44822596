"""Speech for `/v1/audio/transcriptions`: a file of this machine and the request's fields, as a form."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from corral.base.errors import DataError

MOST_AUDIO_BYTES = 25 << 20  # vLLM's own limit
_BOUNDARY = f"corral-{secrets.token_hex(16)}"
FORM = f"multipart/form-data; boundary={_BOUNDARY}"


def audio_path(body: Mapping[str, Any], folder: Path | None) -> Path:
    """The file that a request names; a relative path lies in the folder."""
    name = str(body["file"])
    if folder is None and not name.startswith("/"):
        raise DataError(f"the recording {name} has no folder: the input is no file.", "Give whole paths.")
    return (folder or Path("/")) / name


def check_audio(path: Path) -> int:
    """Refuse what cannot be sent; the size of the file."""
    try:
        about = path.stat()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"the recording {path} cannot be read: {why}.", "Check the path.") from None
    if not stat.S_ISREG(about.st_mode):
        raise DataError(f"{path} is not a file.", "Name a recording.")
    if about.st_size > MOST_AUDIO_BYTES:
        raise DataError(f"the recording {path} has more than {MOST_AUDIO_BYTES >> 20} MiB.", "Cut it into pieces.")
    return about.st_size


def audio_form(body: Mapping[str, Any], path: Path) -> bytes:
    """The form of a request, in the type `FORM`."""
    check_audio(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_AUDIO_BYTES)
    except OSError as error:
        raise DataError(f"the recording {path} cannot be read: {error.strerror}.", "Check the permissions.") from None
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

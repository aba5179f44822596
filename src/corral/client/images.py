"""Pictures for a chat request: files of this machine as `data:` URLs, known by their content, of bounded size.

Other URLs (`https:`, `data:`) are the server's to fetch and to check.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from corral.base.errors import DataError

MOST_BYTES = 20 << 20
_KINDS = (  # media type, the bytes that say it, and where they are
    ("png", b"\x89PNG\r\n\x1a\n", 0), ("jpeg", b"\xff\xd8\xff", 0), ("gif", b"GIF8", 0), ("webp", b"WEBP", 8),
)  # fmt: skip


def read_image(path: Path, most: int = MOST_BYTES) -> str:
    """The `data:` URL of a picture."""
    content = _content(path, most)
    return f"data:image/{_kind(path, content[:16])};base64,{base64.b64encode(content).decode()}"


def check_image(path: Path, most: int = MOST_BYTES) -> None:
    """Refuse what `read_image` would refuse, from the file's first bytes and its size."""
    _kind(path, _content(path, most, 16))


def image_part(url: str) -> dict[str, Any]:
    """A part of a message's content."""
    return {"type": "image_url", "image_url": {"url": url}}


def local_images(messages: Any, folder: Path) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """The image parts of messages that name a file, each with its path; relative ones lie in the folder."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            image = part.get("image_url") if isinstance(part, dict) else None
            url = image.get("url") if isinstance(image, dict) else image
            if isinstance(url, str) and (path := _path(url)):
                yield part, folder / path


def _path(url: str) -> str:
    """The path that a URL without a scheme, or a `file:` URL, stands for; empty for others."""
    if url.startswith("file:"):
        parts = urlsplit(url)
        return unquote(parts.path) if parts.netloc in ("", "localhost") else ""
    head = url.partition(":")[0]
    return "" if head != url and head.isalnum() and len(head) > 1 else url


def _content(path: Path, most: int, first: int | None = None) -> bytes:
    """What a regular file holds (or how it begins), when it is not too large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not wait for its writer
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            os.close(descriptor)
            raise DataError(f"{path} is not a file.", "Name a picture.")
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(most + 1 if first is None else first)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"the picture {path} cannot be read: {why}.", "Check the path and the permissions.") from None
    if max(len(content), about.st_size) > most:
        raise DataError(
            f"the picture {path} has {about.st_size / (1 << 20):,.1f} MiB; at most {most >> 20} MiB are sent.",
            "Scale it down: models reduce large pictures anyway.",
        )
    return content


def _kind(path: Path, head: bytes) -> str:
    for kind, mark, at in _KINDS:
        if head[at : at + len(mark)] == mark:
            return kind
    raise DataError(f"{path} is no picture: it is neither PNG, JPEG, GIF nor WebP.", "Convert it.")

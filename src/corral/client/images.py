"""Pictures for a chat request: files of this machine as `data:` URLs, known by their content, of bounded size.

Other URLs (`https:`, `data:`) are the server's to fetch and to check.
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from corral.base.errors import DataError
from corral.client.local_file import LocalFileKind

PICTURE = LocalFileKind("picture", 20 << 20, "Scale it down: models reduce large pictures anyway.")
MOST_OF_A_REQUEST = 64 << 20  # all pictures of a batch's row together
_KINDS = (  # media type, the bytes that say it, and where they are
    ("png", b"\x89PNG\r\n\x1a\n", 0), ("jpeg", b"\xff\xd8\xff", 0), ("gif", b"GIF8", 0), ("webp", b"WEBP", 8),
)  # fmt: skip


def read_image(path: Path) -> str:
    """The `data:` URL of a picture."""
    content, _ = PICTURE.read(path)
    return f"data:image/{_kind(path, content[:16])};base64,{base64.b64encode(content).decode()}"


def check_image(path: Path) -> int:
    """Refuse what `read_image` would refuse, from the file's first bytes and its size, which is returned."""
    head, size = PICTURE.read(path, 16)
    _kind(path, head)
    return size


def image_part(url: str) -> dict[str, Any]:
    """A part of a message's content."""
    return {"type": "image_url", "image_url": {"url": url}}


def check_images(body: Mapping[str, Any], folder: Path | None) -> None:
    """Refuse a request whose pictures `with_images` would refuse."""
    left = MOST_OF_A_REQUEST
    for _, path in _local_images(body, folder):
        left = _after(check_image(path), left)


def with_images(body: Mapping[str, Any], folder: Path | None) -> tuple[Mapping[str, Any], int]:
    """A request with the pictures where it names files, and their bytes; paths are relative to the folder."""
    if next(_local_images(body, folder), None) is None:
        return body, 0
    body, left = {**body, "messages": copy.deepcopy(body["messages"])}, MOST_OF_A_REQUEST
    for part, path in _local_images(body, folder):
        url = read_image(path)
        data = url.partition(",")[2]
        left = _after(len(data) // 4 * 3 - data[-2:].count("="), left)
        image = part["image_url"]
        part["image_url"] = {**image, "url": url} if isinstance(image, dict) else {"url": url}
    return body, MOST_OF_A_REQUEST - left


def _after(size: int, left: int) -> int:
    if size > left:
        raise DataError(f"the pictures have more than {MOST_OF_A_REQUEST >> 20} MiB.", "Scale them down.")
    return left - size


def _local_images(body: Mapping[str, Any], folder: Path | None) -> Iterator[tuple[dict[str, Any], Path]]:
    """The image parts of a request's messages that name a file, each with its path."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            image = part.get("image_url") if isinstance(part, dict) else None
            url = image.get("url") if isinstance(image, dict) else image
            if isinstance(url, str) and (path := _path(url)):
                yield part, PICTURE.path(path, folder)


def _path(url: str) -> str:
    """The path that a URL without a scheme, or a `file:` URL, stands for; empty for others."""
    if found := re.match(r"file:(?://(?:localhost)?(?=/))?", url):
        return unquote(url[found.end() :])
    return "" if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url) else url


def _kind(path: Path, head: bytes) -> str:
    for kind, mark, at in _KINDS:
        if head[at : at + len(mark)] == mark:
            return kind
    raise DataError(f"{path} is not a picture: it is neither PNG, JPEG, GIF nor WebP.", "Convert it.")

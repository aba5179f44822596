"""Small files: written in one step, so that readers see the old content or the new, and read without failing.

Standard library only, nothing of corral: the source is sent to the node.
"""

import contextlib
import json
import os
from typing import Any, Dict, Union

Json = Dict[str, Any]


def write_atomic(path: Union[str, "os.PathLike[str]"], text: Union[str, bytes], mode: int = 0o600) -> None:
    """Replace `path` with `text` in one step, synced; writers on several nodes do not disturb each other."""
    folder, name = os.path.split(os.fspath(path))
    writer = "%s.%d.%s" % (
        os.uname().nodename,
        os.getpid(),
        os.urandom(4).hex(),
    )  # host names and process numbers are not unique
    temporary = os.path.join(folder, ".%s.%s.tmp" % (name, writer))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str, body: Any) -> None:
    """Replace a file with JSON."""
    write_atomic(path, json.dumps(body))


def read_text(path: str) -> str:
    """The text of a small file; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536).strip()
    except (OSError, ValueError):
        return ""


def number(text: str) -> int:
    """A whole number, or 0 for anything else: sysfs says -1 or an error for what it does not know."""
    return int(text) if text.isdigit() else 0


def read_number(path: str) -> int:
    """The number in a small file; 0 where there is none."""
    return number(read_text(path))


def read_json(path: str) -> Json:
    """The object in a file; empty while the file is absent or incomplete."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        os.listdir(os.path.dirname(path))  # makes NFS refresh its cache
        with open(path) as file:
            body = json.load(file)
            return body if isinstance(body, dict) else {}
    return {}

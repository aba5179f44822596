"""Files that are whole or absent, for the nodes and for Corral itself.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

import contextlib
import json
import os
from typing import Any, Dict, Union

Json = Dict[str, Any]


def write_atomic(path: Union[str, "os.PathLike[str]"], text: Union[str, bytes], mode: int = 0o600) -> None:
    """Replace `path` with `text` in one step, synced; writers on several nodes do not meet."""
    folder, name = os.path.split(os.fspath(path))
    own = "%s.%d.%s" % (os.uname().nodename, os.getpid(), os.urandom(4).hex())  # names and numbers repeat elsewhere
    temporary = os.path.join(folder, ".%s.%s.tmp" % (name, own))
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
    """A small file's text, or nothing."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536).strip()
    except (OSError, ValueError):
        return ""


def read_json(path: str) -> Json:
    """The file's object; empty while it is absent or not whole."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        os.listdir(os.path.dirname(path))  # makes NFS look again
        with open(path) as file:
            found = json.load(file)
            return found if isinstance(found, dict) else {}
    return {}

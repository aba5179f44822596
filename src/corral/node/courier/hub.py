"""What a hub says of a repository."""

from __future__ import annotations

import fnmatch
import http.client
import json
import re
import urllib.error
from typing import IO, List, Optional

from .sources import open_url
from .talk import Json, tell


def hub(order: Json, _: IO[bytes]) -> None:
    """The files of a repository at its newest commit; large ones with their sha256, small ones with git's sha1."""
    base, repo = str(order["url"]).rstrip("/"), order["repo"]
    try:
        with open_url(f"{base}/api/models/{repo}", order.get("token")) as reply:
            commit = json.load(reply)["sha"]
        rows: List[Json] = []
        url: Optional[str] = f"{base}/api/models/{repo}/tree/{commit}?recursive=true"
        while url:
            with open_url(url, order.get("token")) as reply:
                rows += [hub_row(entry) for entry in json.load(reply) if entry["type"] == "file"]
                more = re.search(r'<([^>]+)>;\s*rel="next"', reply.headers.get("Link", ""))
                url = more.group(1) if more else None
    except urllib.error.HTTPError as error:
        said = error.headers.get("X-Error-Code") or error.reason
        tell("failed", text=f"the hub answered {error.code} for {repo} ({said}).", status=error.code)
        return
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        reason = getattr(error, "reason", error)
        tell("failed", text=f"the hub did not answer for {repo} ({reason}).", status=0)
        return
    leave_out = order.get("leave_out", ())
    rows = [row for row in rows if not any(fnmatch.fnmatch(row["path"], pattern) for pattern in leave_out)]
    tell("manifest", files=rows, commit=commit, url=f"{base}/{repo}/resolve/{commit}")


def hub_row(entry: Json) -> Json:
    large = entry.get("lfs")
    hashes = {"sha256": large["oid"]} if large else {"git_sha1": entry["oid"]}
    return {"path": entry["path"], "kind": "file", "size": entry["size"], "mode": 0o644, **hashes}

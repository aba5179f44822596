"""What a hub says of a repository."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
from typing import IO, Any, List, Optional

from .manifest import MOST_ROWS, without
from .sources import open_url
from .talk import Json, tell

LONGEST_PAGE_BYTES = 64 << 20


def hub(order: Json, _: IO[bytes]) -> None:
    """The files of a repository at its newest commit; large ones with their sha256, small ones with git's sha1."""
    base, repo = str(order["url"]).rstrip("/"), order["repo"]
    try:
        with open_url(f"{base}/api/models/{repo}", order.get("token")) as reply:
            commit = read_page(reply)["sha"]
        rows: List[Json] = []
        url: Optional[str] = f"{base}/api/models/{repo}/tree/{commit}?recursive=true"
        while url:
            with open_url(url, order.get("token")) as reply:
                rows += [hub_row(entry) for entry in read_page(reply) if entry["type"] == "file"]
                url = next_page(base, reply.headers.get("Link", ""))
            if len(rows) > MOST_ROWS:
                raise ValueError("its list does not end")
    except urllib.error.HTTPError as error:
        said = error.headers.get("X-Error-Code") or error.reason
        tell("failed", text=f"the hub answered {error.code} for {repo} ({said}).", status=error.code)
        return
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "reason", error)
        tell("failed", text=f"the hub did not answer for {repo} ({reason}).", status=0)
        return
    tell(
        "manifest",
        files=without(rows, order.get("leave_out", ())),
        commit=commit,
        url=f"{base}/{repo}/resolve/{commit}",
    )


def read_page(reply: Any) -> Any:
    body = reply.read(LONGEST_PAGE_BYTES + 1)
    if len(body) > LONGEST_PAGE_BYTES:
        raise ValueError("its answer does not end")
    return json.loads(body)


def next_page(base: str, links: str) -> Optional[str]:
    """Where the list goes on; only the hub itself may be asked, because the token goes along."""
    more = re.search('<([^>]{1,4000})>;[ \t]*rel="next"', links)
    if not more:
        return None
    if urllib.parse.urlsplit(more.group(1))[:2] != urllib.parse.urlsplit(base)[:2]:
        raise ValueError(f"its list goes on at another host: {more.group(1)[:100]}")
    return more.group(1)


def hub_row(entry: Json) -> Json:
    large = entry.get("lfs")
    hashes = {"sha256": large["oid"]} if large else {"git_sha1": entry["oid"]}
    return {"path": entry["path"], "kind": "file", "size": entry["size"], "mode": 0o644, **hashes}

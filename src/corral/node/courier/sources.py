"""Where files come from: another courier, or a hub; and the list of files in a hub's repository."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, Any, Callable, Iterator, List, Optional, Set, Tuple

from .files import Item
from .manifest import MOST_ROWS, without
from .protocol import Json, authorization, send_event

SILENCE_S = 20.0  # a source that sends nothing for this long is given up for another
LONGEST_PAGE_BYTES = 64 << 20


class Source:
    """A server that has files: another courier, or a hub."""

    def __init__(self, row: Json) -> None:
        self.name, self.url, self.token = str(row["name"]), str(row["url"]).rstrip("/"), row.get("token")
        self.kind = str(row.get("kind", "courier"))
        self.rest_until_s = 0.0
        self.last_error = ""
        self.sockets: Set[socket.socket] = set()
        self.gone = False

    def abandon(self) -> None:
        """It has failed: stop waiting for its bytes."""
        self.gone = True
        for sock in list(self.sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def open(self, items: List[Item], offset: int) -> Tuple[Any, Callable[[], None]]:
        """A response whose body is the items, one after the other, the first from `offset`."""
        if self.kind == "hub":
            return self.open_hub(items[0], offset)
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=SILENCE_S)
        if len(items) > 1:
            method, path, span = "POST", "/pack", ""
            body = json.dumps([item.number for item in items]).encode()
        else:
            method, path, span = "GET", f"/files/{items[0].number}", f"bytes={offset}-" if offset else ""
            body = b""
        headers = {"Authorization": authorization(str(self.token), method, path, span, body)}
        connection.connect()
        sock: socket.socket = connection.sock

        def close() -> None:
            self.sockets.discard(sock)
            connection.close()

        self.sockets.add(sock)
        try:
            if self.gone:
                raise ConnectionError("has failed")
            connection.request(method, path, body or None, {**headers, **({"Range": span} if span else {})})
            response = connection.getresponse()
            if response.status != (206 if offset else 200):
                raise ConnectionError(f"answered {response.status}")
        except BaseException:
            close()
            raise
        return response, close

    def open_hub(self, item: Item, offset: int) -> Tuple[Any, Callable[[], None]]:
        response = open_url(f"{self.url}/{urllib.parse.quote(item.path)}", self.token, offset)
        if offset and response.status != 206:
            response.close()
            raise ConnectionError("does not continue a file")
        return response, response.close


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a hub to its storage, and sends the token only within one host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        same = urllib.parse.urlsplit(newurl)[:2] == urllib.parse.urlsplit(req.full_url)[:2]
        if new is not None and same and req.get_header("Authorization"):
            new.add_unredirected_header("Authorization", req.get_header("Authorization"))
        return new


def open_url(url: str, token: Optional[str], offset: int = 0) -> Any:
    request = urllib.request.Request(url)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    return urllib.request.build_opener(Redirects).open(request, timeout=SILENCE_S)


@contextlib.contextmanager
def as_connection_errors() -> Iterator[None]:
    """Turn network errors into ConnectionError, to tell them from those of a disk."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConnectionError(str(reason) or type(error).__name__) from error


def hub(request: Json, _: IO[bytes]) -> None:
    """The files of a repository at its newest commit; large ones with their sha256, small ones with git's sha1."""
    base, repo = str(request["url"]).rstrip("/"), request["repo"]
    try:
        with open_url(f"{base}/api/models/{repo}", request.get("token")) as reply:
            commit = read_page(reply)["sha"]
        rows: List[Json] = []
        url: Optional[str] = f"{base}/api/models/{repo}/tree/{commit}?recursive=true"
        while url:
            with open_url(url, request.get("token")) as reply:
                rows += [hub_row(entry) for entry in read_page(reply) if entry["type"] == "file"]
                url = next_page(base, reply.headers.get("Link", ""))
            if len(rows) > MOST_ROWS:
                raise ValueError("its list does not end")
    except urllib.error.HTTPError as error:
        cause = error.headers.get("X-Error-Code") or error.reason
        text = f"the hub answered {error.code} for {repo} ({cause})."
        send_event("failed", text=text, status=error.code)
        return
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"the hub did not answer for {repo} ({getattr(error, 'reason', error)})."
        send_event("failed", text=text, status=0)
        return
    send_event(
        "manifest",
        files=without(rows, request.get("leave_out", ())),
        commit=commit,
        url=f"{base}/{repo}/resolve/{commit}",
    )


def read_page(reply: Any) -> Any:
    body = reply.read(LONGEST_PAGE_BYTES + 1)
    if len(body) > LONGEST_PAGE_BYTES:
        raise ValueError("its answer does not end")
    return json.loads(body)


def next_page(base: str, links: str) -> Optional[str]:
    """The address of the next page; only one of the hub itself, because the token is sent along."""
    more = re.search('<([^>]{1,4000})>;[ \t]*rel="next"', links)
    if not more:
        return None
    if urllib.parse.urlsplit(more.group(1))[:2] != urllib.parse.urlsplit(base)[:2]:
        raise ValueError(f"its list continues on another host: {more.group(1)[:100]}")
    return more.group(1)


def hub_row(entry: Json) -> Json:
    large = entry.get("lfs")
    hashes = {"sha256": large["oid"]} if large else {"git_sha1": entry["oid"]}
    return {"path": entry["path"], "kind": "file", "size": entry["size"], "mode": 0o644, **hashes}

"""Somebody who has files: another courier, or a hub."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.parse
import urllib.request
from typing import Any, Callable, Iterator, List, Optional, Set, Tuple

from .depot import Item
from .signature import authorization
from .talk import Json

SILENCE_S = 20.0  # a source that sends nothing for this long is left for another


class Source:
    """Somebody who has files: another courier, or a hub."""

    def __init__(self, row: Json) -> None:
        self.name, self.url, self.token = str(row["name"]), str(row["url"]).rstrip("/"), row.get("token")
        self.kind = str(row.get("kind", "courier"))
        self.rest_until_s = 0.0
        self.said = ""
        self.sockets: Set[socket.socket] = set()
        self.gone = False

    def leave(self) -> None:
        """It has failed: whoever waits for its bytes stops waiting."""
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
    """Follows a hub to its storage, and takes the token along only within one host."""

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
    """Whatever a network can do, apart from what a disk can do."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConnectionError(str(reason) or type(error).__name__) from error

"""Who may ask the console anything.

It can start and stop things, so being able to reach its port is not enough, and neither is being a page in the same
browser:

- The link carries a token that is good once; whoever brings it first gets a cookie (HttpOnly, SameSite=Strict).
- Browsers send that cookie to every port of the machine, also to a tunnel and the node behind it. It therefore opens
  nothing but the page's own files. Everything else needs the link's token too, in a header: the page keeps it in
  localStorage, which a browser keeps apart by port.
- `Host` must be a name of this machine itself, or one that was allowed: a page whose name is rebound to 127.0.0.1
  arrives with its own. The port is free, because `ssh -L` changes it.
- `Origin`, where there is one, must be the page's own; what changes something must have it, and a JSON body.
- Nothing but GET under `--read-only`, and what is posted to and changes nothing.

Every answer forbids what the page does not need (Content-Security-Policy): scripts, styles, pictures and connections
are its own, and nothing may frame it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable, Iterable
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corral.base.errors import AccessError, UsageError
from corral.console.context import refusal
from corral.serve.asgi_server import note_key

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MOST_SESSIONS = 64
READING = ("GET", "HEAD")
SECRET = "x-corral-secret"  # noqa: S105 - a header's name
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
ANOTHER_LINK = "Open the link that `corral console` prints in its terminal: after each use it prints another."


class Tickets:
    """Tokens of links, each good once, and the cookies that they became; only digests are kept."""

    def __init__(self, used: Callable[[], None] = lambda: None) -> None:
        self._once: set[bytes] = set()
        self._sessions: dict[bytes, bytes] = {}  # cookie -> token of its link
        self._lock = threading.Lock()
        self.used = used

    def issue(self) -> str:
        """A token for one link; one that was issued before and never used is good no longer."""
        token = secrets.token_urlsafe(24)
        with self._lock:
            self._once = {_digest(token)}
        return token

    def redeem(self, token: str) -> str | None:
        """The cookie for a token, the first time it is shown."""
        with self._lock:
            if _digest(token) not in self._once:
                return None
            self._once.clear()
            session = secrets.token_urlsafe(32)
            self._sessions[_digest(session)] = _digest(token)
            while len(self._sessions) > MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        self.used()
        return session

    def knows(self, session: str) -> bool:
        return _digest(session) in self._sessions

    def is_of_link(self, session: str, token: str) -> bool:
        """Whether the session came from the link with this token."""
        return hmac.compare_digest(self._sessions.get(_digest(session), b""), _digest(token))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def host_name(host: str) -> str:
    """`Host` without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() and port.isascii() else host).lower()


class Guard:
    """Stands before every path."""

    def __init__(
        self, app: ASGIApp, tickets: Tickets, open_paths: Iterable[str] | None = None, hosts: Iterable[str] = ()
    ) -> None:
        """`open_paths` are all that may be posted to; None: everything."""
        self._app, self._tickets = app, tickets
        self._open_paths = None if open_paths is None else frozenset(open_paths)
        self._hosts = frozenset((*LOOPBACK, *(host.lower() for host in hosts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        guarded = _with_headers(send)
        if problem := self._problem(scope["method"], scope["path"], headers):
            await problem(scope, receive, guarded)
            return
        host = headers["host"]
        if (fresh := self._redeemed(scope)) is not None:
            note_key(scope)
            await self._app(scope, receive, _with_headers(send, _cookie(host, fresh)))
        elif not self._tickets.knows(session := _given_cookie(headers, host)):
            await _stranger(scope["path"])(scope, receive, guarded)
        elif _is_page(scope) or self._tickets.is_of_link(session, headers.get(SECRET, "")):
            note_key(scope)
            await self._app(scope, receive, guarded)
        else:
            error = AccessError("the request has the console's cookie, but not the token of its link.", ANOTHER_LINK)
            await refusal(error, 403)(scope, receive, guarded)

    def _problem(self, method: str, path: str, headers: Headers) -> Response | None:
        """Why a request is refused whoever sends it."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or host_name(hosts[0]) not in self._hosts:
            shown = (hosts or [""])[0][:80]
            error = AccessError(f"this console does not answer to the name {shown!r}.", "Open it as 127.0.0.1, or"
                                " allow the name with --host.")  # fmt: skip
            return refusal(error, 421)
        origins = headers.getlist("origin")
        own = f"http://{hosts[0]}"
        if any(not hmac.compare_digest(one.encode(), own.encode()) for one in origins):
            return refusal(AccessError("the request comes from another page.", "Use the console's own."), 403)
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and (
            headers.get("sec-fetch-mode") != "navigate"
        ):
            return refusal(AccessError("the request comes from another page.", "Use the console's own."), 403)
        return None if method in READING else self._problem_of_change(path, headers, bool(origins))

    def _problem_of_change(self, path: str, headers: Headers, has_origin: bool) -> Response | None:
        if self._open_paths is not None and path not in self._open_paths:
            return refusal(AccessError("this console only shows: it runs with --read-only.",
                                       "Start one without it, or type the command in a terminal."), 403)  # fmt: skip
        if not has_origin:
            return refusal(AccessError("the request does not say which page it comes from.", "Send Origin."), 403)
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return refusal(
                UsageError("a request that changes something must have a JSON body.", "Send application/json."), 415
            )
        return None

    def _redeemed(self, scope: Scope) -> str | None:
        """The new cookie, where the link of the page carries a good token."""
        if scope["method"] != "GET" or scope["path"] != "/":
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("once", [])
        return self._tickets.redeem(given[0]) if len(given) == 1 else None


def _is_page(scope: Scope) -> bool:
    """Whether only a file of the page is read: the same for everybody, and without the owner's data."""
    return scope["method"] in READING and (scope["path"] == "/" or scope["path"].startswith("/static/"))


def _cookie_name(host: str) -> str:
    """Cookies are not told apart by port: consoles behind several ports of one machine need names of their own."""
    port = host.rpartition(":")[2]
    return f"corral_console_{port if port.isdigit() and port.isascii() else 80}"


def _cookie(host: str, session: str) -> str:
    return f"{_cookie_name(host)}={session}; HttpOnly; SameSite=Strict; Path=/"


def _given_cookie(headers: Headers, host: str) -> str:
    pairs = (pair.strip().partition("=") for line in headers.getlist("cookie") for pair in line.split(";"))
    return next((value for name, _, value in pairs if name == _cookie_name(host)), "")


def _stranger(path: str) -> Response:
    if path == "/":  # a person: a page that says what to do
        text = f"This console does not know your browser.\n\n{ANOTHER_LINK}\n"
        return Response(text, 401, media_type="text/plain")
    return refusal(AccessError("this console does not know your browser.", ANOTHER_LINK), 401)


def _with_headers(send: Send, cookie: str = "") -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            if cookie:
                headers.append("set-cookie", cookie)
        await send(message)

    return sending

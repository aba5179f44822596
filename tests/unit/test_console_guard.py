"""The console's door: one link, one cookie, its own name and its own page, and nothing else."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import corral.console
from corral.console.server import Console, ConsoleOptions, static_files

SECRETS: dict[str, str] = {}  # cookie -> the token of the link that it came from
STATIC = Path(corral.console.__file__).parent / "static"


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def error(self) -> dict[str, object]:
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "remedy", "code"}
        return found  # type: ignore[no-any-return]


def ask(console: Console, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
    address = urlsplit(console.url)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if secret := SECRETS.get(sent.get("cookie", "")):
            sent.setdefault("x-corral-secret", secret)
        connection.putrequest(method, path, skip_host="host" in sent)
        if body is not None:
            sent.setdefault("content-length", str(len(body)))
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(body.encode() if body is not None else None)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def enter(console: Console) -> str:
    """The cookie that the link gives; the page keeps the token of its link, and so does `ask`."""
    link = console.link()
    found = ask(console, "/?" + link.partition("/?")[2])
    assert found.status == 200
    cookie = found.headers["set-cookie"].partition(";")[0]
    SECRETS[cookie] = link.partition("once=")[2]
    return cookie


@pytest.fixture(params=[False], ids=["console"])
def console(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Console]:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    with Console(ConsoleOptions(port=0, read_only=request.param)) as running:
        yield running


read_only = pytest.mark.parametrize("console", [True], indirect=True, ids=["read-only"])


def test_a_link_is_good_once(console: Console) -> None:
    path = "/" + console.link().rpartition("/")[2]
    first = ask(console, path)
    assert first.status == 200
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask(console, path).status == 401
    pair = cookie.partition(";")[0]
    assert ask(console, path, cookie=pair).status == 200  # a reload, by who has the cookie
    token = path.partition("once=")[2]
    assert ask(console, "/api/about", cookie=pair, x_corral_secret=token).status == 200


def test_a_new_link_makes_the_old_one_worthless(console: Console) -> None:
    old = "/" + console.link().rpartition("/")[2]
    console.link()
    assert ask(console, old).status == 401


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/about", "/api/commands", "/api/no-such", "/?once=x"])
def test_without_the_cookie_there_is_nothing(console: Console, path: str) -> None:
    enter(console)
    port = urlsplit(console.url).port
    for cookie in ("", f"corral_console_{port}=", f"corral_console_{port}=guess", "corral_console_1=x"):
        found = ask(console, path, cookie=cookie)
        assert found.status == 401
        assert b"corral console" in found.body
        assert b"import" not in found.body


FOREIGN_HOSTS = ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "", "localhost.",
                 "[::2]:{port}", "127.0.0.1@evil.example", "127.0.0.1:{port}:80"]  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_name_bound_to_this_machine_is_refused(console: Console, host: str) -> None:
    """DNS rebinding: the page's own name arrives as Host, whatever address it has now."""
    cookie = enter(console)
    found = ask(console, "/api/about", host=host.format(port=urlsplit(console.url).port), cookie=cookie)
    assert found.status == 421
    assert found.error["code"] == 6
    link = "/" + console.link().rpartition("/")[2]
    assert ask(console, link, host="evil.example").status == 421  # and it uses no link up
    assert ask(console, link).status == 200


def test_a_port_that_ssh_forwarded_is_fine(console: Console) -> None:
    path = "/" + console.link().rpartition("/")[2]
    found = ask(console, path, host="localhost:9999")
    cookie = found.headers["set-cookie"].partition(";")[0]
    assert cookie.startswith("corral_console_9999=")
    token = path.partition("once=")[2]
    assert ask(console, "/api/about", host="localhost:9999", cookie=cookie, x_corral_secret=token).status == 200


def test_a_name_that_was_allowed_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    with Console(ConsoleOptions(port=0, hosts=("Login01.example",))) as console:
        assert ask(console, "/", host="login01.example:8765").status == 401
        assert ask(console, "/", host="login02.example:8765").status == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1",
                                    "", "http://localhost:{port}"])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_page_is_refused(console: Console, origin: str, method: str) -> None:
    cookie, port = enter(console), urlsplit(console.url).port
    found = ask(console, "/api/about", method, "{}" if method == "POST" else None, cookie=cookie,
                origin=origin.format(port=port), content_type="application/json")  # fmt: skip
    assert found.status == 403
    assert "another page" in str(found.error["message"])


def test_a_page_that_sends_no_origin_is_told_by_its_site(console: Console) -> None:
    """An image or a script of another site, with the cookie of a browser that would send it."""
    cookie = enter(console)
    assert ask(console, "/api/about", cookie=cookie, sec_fetch_site="cross-site").status == 403
    assert ask(console, "/api/about", cookie=cookie, sec_fetch_site="same-site").status == 403  # another port
    assert ask(console, "/api/about", cookie=cookie, sec_fetch_site="same-origin").status == 200


def test_what_changes_something_needs_origin_and_json(console: Console) -> None:
    cookie, own = enter(console), console.url
    assert ask(console, "/api/x", "POST", "{}", cookie=cookie, content_type="application/json").status == 403
    form = ask(console, "/api/x", "POST", "a=1", cookie=cookie, origin=own,
               content_type="application/x-www-form-urlencoded")  # fmt: skip
    assert form.status == 415
    plain = ask(console, "/api/x", "POST", "{}", cookie=cookie, origin=own, content_type="text/plain")
    assert plain.status == 415
    fine = ask(console, "/api/x", "POST", "{}", cookie=cookie, origin=own, content_type="application/json")
    assert fine.status == 404  # there is no such path: the guard let it through


@read_only
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_read_only_only_shows(console: Console, method: str) -> None:
    cookie = enter(console)
    found = ask(console, "/api/fleet/stop", method, "{}", cookie=cookie, origin=console.url,
                content_type="application/json")  # fmt: skip
    assert found.status == 403
    assert "--read-only" in str(found.error["message"])
    assert json.loads(ask(console, "/api/about", cookie=cookie).body)["read_only"] is True


@pytest.mark.parametrize(("playground", "status"), [(False, 403), (True, 502)])
def test_read_only_asks_no_model_unless_that_was_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, playground: bool, status: int
) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # nobody listens: the request came so far
    body = json.dumps({"server": "", "prompt": "Hi", "model": "m"})
    with Console(ConsoleOptions(port=0, read_only=True, playground=playground)) as console:
        cookie = enter(console)

        def post(path: str) -> Answer:
            return ask(
                console, path, "POST", body, cookie=cookie, origin=console.url, content_type="application/json"
            )

        assert json.loads(ask(console, "/api/about", cookie=cookie).body)["asks"] is playground
        assert post("/api/play/prompt").status == status
        assert post("/api/play/texts").status == 200  # the request as text: nobody is asked
        for path in ("/api/fleet/start", "/api/fleet/stop", "/api/fleet/restart", "/api/play/askx", "/api/play"):
            assert post(path).status == 403


def test_every_answer_forbids_what_the_page_does_not_need(console: Console) -> None:
    cookie = enter(console)
    for path, given in (("/", cookie), ("/", ""), ("/static/app.js", cookie), ("/api/about", cookie), ("/x", cookie)):
        headers = ask(console, path, cookie=given).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy  # no other host
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "name", ["../app.py", "..%2fapp.py", "/etc/passwd", "vendor/../../app.py", "vendor/uPlot.LICENSE"]
)
def test_only_the_pages_own_files(console: Console, name: str) -> None:
    assert ask(console, f"/static/{name}", cookie=enter(console)).status == 404


def test_no_page_makes_markup_from_text() -> None:
    """A model's words, a log's line, a node's name: they can only become text."""
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    )
    for path in STATIC.glob("*.js"):
        assert not forbidden.search(path.read_text(encoding="utf-8")), path.name
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script>|\son\w+=|style=", page)  # the policy would refuse them


def test_the_page_asks_no_other_host_and_is_small() -> None:
    files = static_files()
    assert sum(len(data) for name, data in files.items() if not name.endswith("LICENSE")) < 260_000
    for name, data in files.items():
        if not name.startswith("vendor/"):
            found = set(re.findall(rb"https?://[^\s\"'`)]+", data))
            assert found <= {b"http://www.w3.org/2000/svg"}, name

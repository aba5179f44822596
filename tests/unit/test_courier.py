"""The courier on loopback: damage, truncation, resume, wrong tokens, paths that lead out, links, packs, idleness."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.base.bundle import bundle
from corral.node.courier import folder as folders
from corral.node.courier import hashes
from corral.node.courier.hashes import ChangedError
from corral.node.courier.protocol import authorization
from tests.fake_hub import FakeHub

COURIER = bundle("node/courier").encode()
BOOT = f"import sys; exec(compile(sys.stdin.buffer.read({len(COURIER)}), 'courier', 'exec'))"
Json = dict[str, Any]


class Talk:
    """A courier process and the conversation with it."""

    def __init__(self, command: str, **order: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", BOOT, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(COURIER)
        self.say(**order)
        self.where: Json = {}

    def say(self, payload: bytes = b"", **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n" + payload)
        self.process.stdin.flush()

    def hear(self, *kinds: str) -> Json:
        """The next event of these kinds; a failure nobody expects is an error."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: Json = json.loads(line)
            if event["event"] in kinds:
                return event
            assert event["event"] != "failed", event
        raise AssertionError(f"it ended with {self.process.wait()}: {self.process.stderr.read()!r}")  # type: ignore[union-attr]

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(120)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture
def talks() -> Iterator[list[Talk]]:
    started: list[Talk] = []
    yield started
    for talk in started:
        if talk.process.stdin is not None and not talk.process.stdin.closed:
            talk.process.kill()
            with pytest.MonkeyPatch.context():
                try:
                    talk.end()
                except OSError:
                    talk.process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder in small: two shards, small files, links, an executable, an empty folder and file."""
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    (root / "hollow").mkdir()
    (root / "config.json").write_text("{}")
    (root / "empty").write_bytes(b"")
    for number in (1, 2):
        (root / f"model-{number}.safetensors").write_bytes(os.urandom(3_000_000 + number))
    for number in range(40):
        (root / "sub" / f"{number} ü.py").write_bytes(os.urandom(number * 100))
    (root / "sub" / "run").write_text("#!/bin/sh\n")
    (root / "sub" / "run").chmod(0o755)
    (root / "inner").symlink_to("sub/run")
    (tmp_path / "outside.txt").write_text("from outside")
    (root / "outer").symlink_to("../outside.txt")
    (root / "original").mkdir()
    (root / "original" / "consolidated.00.pth").write_bytes(b"twice the same")
    return root


def serve(talks: list[Talk], folder: Path, **more: Any) -> tuple[Json, list[Json]]:
    talk = Talk("serve", folder=str(folder), address="127.0.0.1", token="right", hash="all",
                leave_out=["original/*"], **more)  # fmt: skip
    talks.append(talk)
    port = talk.hear("listening")["port"]
    files: list[Json] = talk.hear("manifest")["files"]
    return {"name": "giver", "url": f"http://127.0.0.1:{port}", "token": "right"}, files


def fetch(talks: list[Talk], destination: Path, **more: Any) -> Talk:
    talk = Talk("fetch", folder=str(destination), address="127.0.0.1", token="mine", nonce=os.urandom(4).hex(),
                stall_s=more.pop("stall_s", 30), **more)  # fmt: skip
    talks.append(talk)
    where = talk.hear("listening")
    talk.where = {"name": destination.name, "url": f"http://127.0.0.1:{where['port']}", "token": "mine"}
    return talk


def bring(
    talks: list[Talk], destination: Path, files: list[Json], *sources: Json, check: str = "hash", **order: Any
) -> Json:
    talk = fetch(talks, destination, **order)
    talk.say(do="compare", files=files, check=check)
    need = talk.hear("need")
    talk.say(do="go", sources=list(sources))
    done = talk.hear("done")
    assert talk.end() == 0
    return {**need, **done}


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything that must be equal, own files aside."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith(("original", ".corral-hashes")):
            continue
        status = path.lstat()
        if path.is_symlink() and name != "outer":
            found[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            found[name] = ("folder",)
        else:
            body = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = (body, path.stat().st_mode & 0o777, path.stat().st_mtime_ns, status.st_size and 1)
    return found


def part_of(row: Json) -> str:
    mark = hashlib.sha1(f"{row['size']}:{row['sha256']}".encode()).hexdigest()[:8]
    return f".{row['path']}.{mark}.corral-part"


def test_a_folder_arrives_as_it_is(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    bring(talks, tmp_path / "copy", files, source)
    assert contents(tmp_path / "copy") == contents(folder)
    assert not (tmp_path / "copy" / "outer").is_symlink()  # a link that led out became what it led to
    assert not (tmp_path / "copy" / "original").exists()
    assert not list((tmp_path / "copy").rglob("*.corral-part"))
    assert not list((tmp_path / "copy").glob(".corral-nonce*"))


def test_links_of_an_environment_stay_links(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder, links_out="keep")
    bring(talks, tmp_path / "copy", files, source, links_out="keep")
    assert str((tmp_path / "copy" / "outer").readlink()) == "../outside.txt"


def test_only_the_damaged_shard_is_fetched_again(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    copy = tmp_path / "copy"
    bring(talks, copy, files, source)
    shard = copy / "model-2.safetensors"
    before = shard.stat()
    with shard.open("r+b") as file:
        file.seek(1000)
        file.write(b"\0\0\0\0")
    os.utime(shard, ns=(before.st_mtime_ns, before.st_mtime_ns))  # the times do not give it away
    again = bring(talks, copy, files, source)
    assert again["damaged"] == ["model-2.safetensors"]
    assert again["bytes"] == shard.stat().st_size
    assert contents(copy) == contents(folder)


def test_a_truncated_shard_is_fetched_again(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    copy = tmp_path / "copy"
    bring(talks, copy, files, source)
    os.truncate(copy / "model-1.safetensors", 1234)
    assert bring(talks, copy, files, source)["damaged"] == ["model-1.safetensors"]
    assert contents(copy) == contents(folder)


def test_a_part_is_continued(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    row = next(row for row in files if row["path"] == "model-1.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / part_of(row)).write_bytes((folder / row["path"]).read_bytes()[:2_000_000])
    came = bring(talks, copy, files, source)
    assert came["bytes"] == sum(file["size"] for file in files) - 2_000_000
    assert contents(copy) == contents(folder)


def test_a_part_with_wrong_bytes_is_found_out(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    row = next(row for row in files if row["path"] == "model-1.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / part_of(row)).write_bytes(b"x" * 2_000_000)
    bring(talks, copy, files, source)
    assert contents(copy) == contents(folder)


def test_a_whole_part_that_was_never_named_is_judged(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    row = next(row for row in files if row["path"] == "model-1.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / part_of(row)).write_bytes((folder / row["path"]).read_bytes())
    bring(talks, copy, files, source)
    assert contents(copy) == contents(folder)


def write_unseen(path: Path, body: bytes) -> None:
    """Other bytes, and nothing that shows it: as a disk does that loses some."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(body)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))


def test_a_damaged_source_never_becomes_a_file(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    write_unseen(folder / "model-1.safetensors", b"\0" * 100)
    talk = fetch(talks, tmp_path / "copy")
    talk.say(do="compare", files=files, check="hash")
    talk.hear("need")
    talk.say(do="go", sources=[source])
    assert "model-1.safetensors" in talk.hear("failed")["text"]
    assert not (tmp_path / "copy" / "model-1.safetensors").exists()
    number = next(number for number, row in enumerate(files) if row["path"] == "model-1.safetensors")
    talks[0].say(do="doubt", file=number)
    assert talks[0].hear("changed")["path"] == "model-1.safetensors"


# ------------------------------------------------------------------------------------------- a source that changes
@pytest.mark.parametrize("how", ["rewritten", "gone", "new", "longer"])
def test_a_source_that_changes_says_so_and_gives_nothing_more(talks: list[Talk], folder: Path, how: str) -> None:
    source, _ = serve(talks, folder)
    changed, size = folder / "model-1.safetensors", 3_000_001
    if how == "gone":
        changed.unlink()
    elif how == "new":
        changed = folder / "model-3.safetensors"
        changed.write_bytes(b"abc")
    else:
        with changed.open("ab" if how == "longer" else "r+b") as file:
            file.write(b"abc")
    told = talks[0].hear("changed")
    assert (told["path"], told["how"]) == (changed.name, "rewritten" if how == "longer" else how)
    sizes = {"rewritten": (size, size), "gone": (size, 0), "new": (0, 3), "longer": (size, size + 3)}
    assert (told["was_bytes"], told["now_bytes"]) == sizes[how]
    assert ask(source, "/files/0")[0] == 503


def test_an_environment_may_grow_files_that_nobody_asked_for(talks: list[Talk], folder: Path) -> None:
    _, files = serve(talks, folder, links_out="keep")
    number = next(number for number, row in enumerate(files) if row["path"] == "config.json")
    talks[0].say(do="watch", files=[number])
    (folder / "new.pyc").write_text("compiled")
    (folder / "model-1.safetensors").write_text("other")
    talks[0].say(do="still")
    talks[0].hear("unchanged")
    (folder / "config.json").write_text("[]")
    assert talks[0].hear("changed")["path"] == "config.json"


def test_a_file_that_grows_while_it_is_hashed_is_a_source_that_changes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, clean_home: Path
) -> None:
    def slow(path: str, _: object) -> str:
        with Path(path).open("ab") as file:
            file.write(b"more")
        return "0" * 64

    rows = folders.listing(str(folder), (), "follow")
    known = hashes.HashCache(str(folder), own=False)
    monkeypatch.setattr(hashes, "sha256_of", slow)
    with pytest.raises(ChangedError):
        hashes.hash_files(str(folder), rows, "all", known)
    assert not known.known, "the hash of no version is remembered"


# ------------------------------------------------------------------------------------------- what earlier ones left
def test_parts_that_nobody_continues_go_and_those_of_a_live_pull_stay(
    talks: list[Talk], folder: Path, tmp_path: Path
) -> None:
    _, files = serve(talks, folder)
    wanted = next(row for row in files if row["path"] == "model-1.safetensors")
    copy = tmp_path / "copy"
    (copy / "sub").mkdir(parents=True)
    (copy / "other").mkdir()
    own = copy / part_of(wanted)
    old = [copy / ".model-1.safetensors.00000000.corral-part", copy / "sub" / ".gone.py.00000000.corral-part"]
    foreign = [copy / "other" / ".x.00000000.corral-part", copy / "a.corral-part", copy / ".corral-mine"]
    for path in (own, *old, *foreign):
        path.write_bytes(b"x" * 1000)
    handle = os.open(copy, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    talk = fetch(talks, copy)
    talk.say(do="compare", files=files, check="hash")
    assert talk.hear("need")["freed_bytes"] == 0
    assert all(path.exists() for path in old), "another pull writes into this folder"
    os.close(handle)
    talk.say(do="compare", files=files, check="hash")
    assert talk.hear("need")["freed_bytes"] == 2000
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (own, *foreign))


def test_a_part_whose_hash_is_not_known_yet_stays(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    wanted = next(row for row in files if row["path"] == "model-1.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / part_of(wanted)).write_bytes((folder / wanted["path"]).read_bytes()[:2_000_000])
    stale = copy / ".model-1.safetensors.00000000.corral-part"
    stale.write_bytes(b"x")
    talk = fetch(talks, copy)
    unknown = [{name: value for name, value in row.items() if name != "sha256"} for row in files]
    talk.say(do="compare", files=unknown, check="known")
    talk.hear("need")
    found = {str(number): row["sha256"] for number, row in enumerate(files) if row["kind"] == "file"}
    talk.say(do="go", sources=[source], hashes=found)
    assert talk.hear("done")["bytes"] == sum(file["size"] for file in files) - 2_000_000
    assert not stale.exists()


def test_parts_given_up_beside_it_go_after_a_week(talks: list[Talk], tmp_path: Path) -> None:
    old, fresh = [tmp_path / "models" / name / "sub" / ".x.00000000.corral-part" for name in ("old", "fresh")]
    for path in (old, fresh):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 1000)
    os.utime(old, (0, 0))
    talk = fetch(talks, tmp_path / "models" / "this", beside=True)
    talk.say(do="compare", files=[row("a")], check="hash")
    assert talk.hear("need")["freed_bytes"] == 1000
    assert (old.exists(), fresh.exists()) == (False, True)


# ------------------------------------------------------------------------------------------- a source that failed
def test_whoever_waits_for_one_that_failed_goes_elsewhere_at_once(
    talks: list[Talk], folder: Path, tmp_path: Path
) -> None:
    """The one before it cannot write: its connections end, and no silence is waited for."""
    source, files = serve(talks, folder)
    first, second = fetch(talks, tmp_path / "one"), fetch(talks, tmp_path / "two")
    for talk in (first, second):
        talk.say(do="compare", files=files, check="hash")
        talk.hear("need")
    row = next(row for row in files if row["path"] == "model-1.safetensors")
    number, half = files.index(row), (folder / "model-1.safetensors").read_bytes()[: 1 << 20]
    first.say(do="go", sources=[])
    second.say(do="go", sources=[{**first.where}])
    first.say(do="data", file=number, offset=0, length=len(half), payload=half)
    waiting = tmp_path / "two" / part_of(row)
    while not (waiting.exists() and waiting.stat().st_size == 1 << 20):
        threading.Event().wait(0.01)
    (tmp_path / "one" / part_of(row)).unlink()  # and a folder of that name: nothing can be written
    (tmp_path / "one" / part_of(row)).mkdir()
    first.say(do="data", file=number, offset=len(half), length=len(half), payload=half)
    assert "cannot be written" in first.hear("failed")["text"]
    assert ask({**first.where}, f"/files/{number}", "mine")[0] == 503
    second.say(do="sources", sources=[source])
    second.hear("done")
    assert second.end() == 0
    assert contents(tmp_path / "two") == contents(folder)


def test_a_file_is_passed_on_while_it_arrives(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    first, second = fetch(talks, tmp_path / "one"), fetch(talks, tmp_path / "two")
    for talk in (first, second):
        talk.say(do="compare", files=files, check="hash")
        talk.hear("need")
    second.say(do="go", sources=[first.where])  # the one behind starts first, and waits
    row = next(row for row in files if row["path"] == "model-1.safetensors")
    number, half = files.index(row), (folder / "model-1.safetensors").read_bytes()[: 1 << 20]
    first.say(do="go", sources=[])
    first.say(do="data", file=number, offset=0, length=len(half), payload=half)
    waiting = tmp_path / "two" / part_of(row)
    event = threading.Event()
    while not (waiting.exists() and waiting.stat().st_size == 1 << 20):
        event.wait(0.01)
    assert not (tmp_path / "one" / row["path"]).exists()
    first.say(do="sources", sources=[source])
    assert first.hear("done")["bytes"] == second.hear("done")["bytes"] == sum(file["size"] for file in files)
    assert first.end() == second.end() == 0
    assert contents(tmp_path / "two") == contents(folder) == contents(tmp_path / "one")


def test_another_source_takes_over(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    nobody = {"name": "nobody", "url": "http://127.0.0.1:9", "token": "x"}
    source, files = serve(talks, folder)
    bring(talks, tmp_path / "copy", files, nobody, source)
    assert contents(tmp_path / "copy") == contents(folder)


def test_with_nobody_to_ask_it_says_so(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    _, files = serve(talks, folder)
    talk = fetch(talks, tmp_path / "copy", stall_s=0.5)
    talk.say(do="compare", files=files, check="hash")
    talk.hear("need")
    talk.say(do="go", sources=[{"name": "nobody", "url": "http://127.0.0.1:9", "token": "x"}])
    assert "nobody: Connection refused" in talk.hear("failed")["text"]


def ask(
    source: Json, path: str, token: str | None = "right", method: str = "GET", **headers: str
) -> tuple[int, bytes]:
    address = source["url"].removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=60)
    signed = authorization(token or "", method, path, headers.get("Range", ""))
    sent = {**headers, **({"Authorization": signed} if token else {})}
    connection.request(method, path, headers=sent)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body


def test_the_server_gives_listed_files_to_those_who_know_the_token(talks: list[Talk], folder: Path) -> None:
    source, files = serve(talks, folder)
    number = next(n for n, row in enumerate(files) if row["path"] == "model-1.safetensors")
    body = (folder / "model-1.safetensors").read_bytes()
    assert ask(source, f"/files/{number}") == (200, body)
    assert ask(source, f"/files/{number}", Range="bytes=100-199") == (206, body[100:200])
    assert ask(source, f"/files/{number}", Range="bytes=3000000-") == (206, body[3_000_000:])
    assert ask(source, f"/files/{number}", Range="bytes=99999999-")[0] == 416
    for token in (None, "wrong", "righ", "right2"):
        assert ask(source, f"/files/{number}", token) == (401, b"")
    for path in ("/", "/files/", "/files/9999", "/files/-1", "/files/../../etc/passwd", "/etc/passwd",
                 "/files/%2e%2e/%2e%2e/etc/passwd", f"/files/{folder}/config.json"):  # fmt: skip
        assert ask(source, path)[0] == 404
    assert ask(source, "/pack", method="POST")[0] == 400


@pytest.mark.parametrize("path", ["../evil", "/tmp/evil", "a/../../evil", "", "a//b", "./a"])
def test_a_manifest_cannot_lead_out_of_the_folder(talks: list[Talk], tmp_path: Path, path: str) -> None:
    talk = fetch(talks, tmp_path / "copy")
    row = {"path": path, "kind": "file", "size": 4, "mode": 0o644, "sha256": "0" * 64}
    talk.say(do="compare", files=[row], check="hash")
    assert "not a path inside" in talk.hear("failed")["text"]


def test_a_link_in_the_destination_cannot_lead_out(talks: list[Talk], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "sub").symlink_to(tmp_path / "elsewhere")
    talk = fetch(talks, tmp_path / "copy")
    row = {"path": "sub/evil", "kind": "file", "size": 4, "mode": 0o644, "sha256": "0" * 64}
    talk.say(do="compare", files=[row], check="hash")
    assert "leads out" in talk.hear("failed")["text"]


def row(path: str, body: bytes = b"hi", **changed: Any) -> Json:
    found = {
        "path": path,
        "kind": "file",
        "size": len(body),
        "mode": 0o644,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return {**found, **changed}


def link(path: str, target: str) -> Json:
    return {"path": path, "kind": "link", "size": 0, "target": target}


@pytest.mark.parametrize("links_out", ["keep", "follow"])
def test_a_lying_source_writes_no_file_through_its_own_link(
    talks: list[Talk], tmp_path: Path, links_out: str
) -> None:
    """The attack: a link to ~/.ssh in the manifest, then authorized_keys through it."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "authorized_keys").write_text("mine\n")
    talk = fetch(talks, tmp_path / "copy", links_out=links_out)
    files = [link("sub", str(tmp_path / ".ssh")), row("sub/authorized_keys", b"theirs\n")]
    talk.say(do="compare", files=files, check="hash")
    assert "sub" in talk.hear("failed")["text"]
    assert (tmp_path / ".ssh" / "authorized_keys").read_text() == "mine\n"


LYING_MANIFESTS: list[Any] = [
    [link("out", "../elsewhere")], [link("a/out", "../../elsewhere")], [link("out", "/etc")],
    [link("a/b", ".."), link("y", "a/b/..")], [link("a/b", ".."), link("y", "a/b/../elsewhere")],
    [link("x", "deep"), link("y", "x/..")], [link("x", "a"), link("y", "x/b")], [link("x", ".")], [link("x", "")],
    [link("x", "a\0b")], [link("x", "y//z")], [row("a"), row("a/b")], [row("a"), row("a")],
    [row(".corral-hashes.json")], [row("sub/.x.12345678.corral-part")], [row("a\nb")], [row("x" * 300)],
    [row("/".join("x" * 3000))], [row("a", size=-1)], [row("a", size=1 << 61)], [row("a", size=True)],
    [row("a", mode="x")], [row("a", mode=1 << 20)], [row("a", mtime_ns=1 << 70)], [row("a", sha256="x")],
    [row("a", sha256=5)], [row("a", kind="device")], [row("\ud800")], [{"path": "a"}], [5], {"a": 1}, None,
]  # fmt: skip


@pytest.mark.parametrize("files", LYING_MANIFESTS, ids=range(len(LYING_MANIFESTS)))
def test_manifests_that_lie_are_refused_whole(talks: list[Talk], tmp_path: Path, files: Any) -> None:
    (tmp_path / "elsewhere").mkdir()
    talk = fetch(talks, tmp_path / "copy")
    talk.say(do="compare", files=files, check="hash")
    assert talk.hear("failed")["text"]
    talk.end()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not [path for path in (tmp_path / "copy").iterdir() if not path.name.startswith(".corral-")]


def test_a_link_that_appears_while_files_arrive_is_not_followed(talks: list[Talk], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    talk = fetch(talks, tmp_path / "copy")
    talk.say(do="compare", files=[row("sub/one"), row("sub/two")], check="hash")
    talk.hear("need")
    talk.say(do="go", sources=[])
    talk.say(do="data", file=0, offset=0, length=2, payload=b"hi")
    talk.say(do="held")
    assert talk.hear("held")["held"] == [[1, 0]]
    (tmp_path / "copy" / "sub").rename(tmp_path / "copy" / "other")
    (tmp_path / "copy" / "sub").symlink_to(tmp_path / "elsewhere")
    talk.say(do="data", file=1, offset=0, length=2, payload=b"hi")
    assert "leads out" in talk.hear("failed")["text"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_planted_part_is_not_followed(talks: list[Talk], tmp_path: Path) -> None:
    (tmp_path / "prey").write_text("mine")
    (tmp_path / "copy").mkdir()
    body = os.urandom(2 << 20)
    (tmp_path / "copy" / part_of(row("big", body))).symlink_to(tmp_path / "prey")
    talk = fetch(talks, tmp_path / "copy")
    talk.say(do="compare", files=[row("big", body)], check="hash")
    talk.hear("need")
    talk.say(do="go", sources=[])
    talk.say(do="data", file=0, offset=0, length=1 << 20, payload=body[: 1 << 20])
    assert "cannot be written" in talk.hear("failed")["text"]
    assert (tmp_path / "prey").read_text() == "mine"


def test_modes_give_nobody_more_than_reading(talks: list[Talk], tmp_path: Path) -> None:
    talk = fetch(talks, tmp_path / "copy")
    talk.say(do="compare", files=[row("a", mode=0o6777), row("b", mode=0)], check="hash")
    talk.hear("need")
    talk.say(do="go", sources=[])
    for number in (0, 1):
        talk.say(do="data", file=number, offset=0, length=2, payload=b"hi")
    talk.hear("done")
    assert (tmp_path / "copy" / "a").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "copy" / "b").stat().st_mode & 0o7777 == 0o600


def test_names_as_long_as_a_file_system_has_them_arrive(talks: list[Talk], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ("x" * 255)).write_bytes(b"hi")
    (tmp_path / "model" / os.fsdecode(b"no utf-8 \xff")).write_bytes(b"hi")
    source, files = serve(talks, tmp_path / "model")
    bring(talks, tmp_path / "copy", files, source)
    assert contents(tmp_path / "copy") == contents(tmp_path / "model")


def test_links_that_cannot_be_judged_alone_travel_as_what_they_lead_to(talks: list[Talk], tmp_path: Path) -> None:
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_text("content")
    (root / "way").symlink_to("sub")
    (root / "plain").symlink_to("sub/file")
    (root / "through").symlink_to("way/file")
    (root / "around").symlink_to("sub/../sub/file")
    source, files = serve(talks, root)
    bring(talks, tmp_path / "copy", files, source)
    assert {name: (tmp_path / "copy" / name).is_symlink() for name in ("way", "plain", "through", "around")} == {
        "way": True, "plain": True, "through": False, "around": False,
    }  # fmt: skip
    assert (tmp_path / "copy" / "around").read_text() == "content"


# ------------------------------------------------------------------------------------------- whoever else listens
def test_no_token_is_on_the_wire_and_no_request_works_twice(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    """The attack: somebody in between hears a request, lets it through, and sends it again."""
    source, files = serve(talks, folder)
    heard: list[bytes] = []

    def listen(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = listener.accept()
                with caller:
                    heard.append(caller.recv(65536))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        spy = {**source, "name": "spy", "url": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        thread = threading.Thread(target=listen, args=(listener,))
        thread.start()
        bring(talks, tmp_path / "copy", files[:1], spy, source)  # one file: one request
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert heard
    assert not any(b"right" in request for request in heard)
    for expected in (b"HTTP/1.1 20", b"HTTP/1.1 401"):
        with socket.create_connection(("127.0.0.1", int(source["url"].rpartition(":")[2])), timeout=60) as wire:
            wire.sendall(heard[0])
            assert wire.recv(100).startswith(expected)


def test_a_signature_is_good_for_its_own_request_only(talks: list[Talk], folder: Path) -> None:
    source, _ = serve(talks, folder)
    connection = http.client.HTTPConnection(source["url"].removeprefix("http://"), timeout=60)
    for method, path, span, signed in (
        ("GET", "/files/1", "", authorization("right", "GET", "/files/0")),
        ("GET", "/files/0", "bytes=1-", authorization("right", "GET", "/files/0")),
        ("POST", "/pack", "", authorization("right", "POST", "/pack", body=b"[1]")),
        ("GET", "/files/0", "", "Bearer right"),
    ):
        headers = {"Authorization": signed, **({"Range": span} if span else {})}
        connection.request(method, path, b"[0]" if method == "POST" else None, headers)
        assert connection.getresponse().status == 401
        connection.close()


def test_strangers_cannot_keep_the_others_out(talks: list[Talk], folder: Path) -> None:
    source, files = serve(talks, folder)
    number = next(n for n, one in enumerate(files) if one["path"] == "config.json")
    port = int(source["url"].rpartition(":")[2])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    try:
        for stranger in strangers:
            stranger.sendall(b"GET /files/0 HTTP/1.1\r\nX: ")
        assert ask(source, f"/files/{number}") == (200, b"{}")
        status = Path(f"/proc/{talks[-1].process.pid}/status").read_text()
        assert int(status.partition("Threads:")[2].split()[0]) < 100
    finally:
        for stranger in strangers:
            stranger.close()


def test_the_hubs_token_goes_to_no_other_host(talks: list[Talk], folder: Path) -> None:
    """The attack: a hub (or somebody in between) whose list goes on elsewhere."""
    (folder / "outer").unlink()
    seen: list[str | None] = []

    class Thief(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None:
            pass

    with FakeHub({"some/model": folder}) as hub, http.server.HTTPServer(("127.0.0.1", 0), Thief) as thief:
        threading.Thread(target=thief.serve_forever, daemon=True).start()
        hub.next_page = f"http://127.0.0.1:{thief.server_port}/more"
        talk = Talk("hub", url=hub.url, repo="some/model", token="hf_secret")
        assert "another host" in talk.hear("failed")["text"]
        talk.end()
        hub.next_page, hub.redirect = "", f"http://127.0.0.1:{thief.server_port}/storage"
        talk = Talk("hub", url=hub.url, repo="some/model", token="hf_secret")
        talk.hear("failed", "manifest")
        talk.end()
        thief.shutdown()
    assert seen == [None]  # followed, and without the token


def test_two_cannot_write_into_one_folder(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    _, files = serve(talks, folder)
    first, second = fetch(talks, tmp_path / "copy"), fetch(talks, tmp_path / "copy")
    for talk in (first, second):
        talk.say(do="compare", files=files, check="hash")
        talk.hear("need")
    first.say(do="go", sources=[])
    first.say(do="held")
    first.hear("held")
    second.say(do="go", sources=[])
    assert "another pull" in second.hear("failed")["text"]


def test_it_ends_with_its_input_and_when_idle(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    talk = fetch(talks, tmp_path / "copy")
    assert talk.end() == 0
    idle = Talk("serve", folder=str(folder), address="127.0.0.1", token="t", hash="known", idle_s=0.2)
    talks.append(idle)
    idle.hear("manifest")
    assert idle.process.wait(120) == 75


def test_hashes_are_remembered_until_a_file_changes(talks: list[Talk], folder: Path, clean_home: Path) -> None:
    def known() -> set[str]:
        talk = Talk("manifest", folder=str(folder), hash="known")
        talks.append(talk)
        rows: list[Json] = talk.hear("manifest")["files"]
        assert talk.end() == 0
        return {row["path"] for row in rows if "sha256" in row}

    assert not known()
    serve(talks, folder)
    assert "model-1.safetensors" in known()
    with (folder / "model-1.safetensors").open("r+b") as file:
        file.write(b"\0")
    assert "model-1.safetensors" not in known()
    assert "model-2.safetensors" in known()
    assert not (folder / ".corral-hashes.json").exists()  # a source is left as it was


def test_verify_names_what_is_wrong(talks: list[Talk], folder: Path) -> None:
    _, files = serve(talks, folder)
    (folder / "config.json").write_text("[]")
    (folder / "model-2.safetensors").unlink()
    talk = Talk("verify", folder=str(folder), files=files, own=False)
    talks.append(talk)
    need = talk.hear("need")
    assert need["damaged"] == ["config.json"]
    assert need["files"] == 2


def test_from_a_hub_with_a_cut_connection(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    (folder / "outer").unlink()
    with FakeHub({"some/model": folder}, gated={"some/model"}) as hub:
        refused = Talk("hub", url=hub.url, repo="some/model", token="bad")
        assert refused.hear("failed")["status"] == 403
        refused.end()
        talk = Talk("hub", url=hub.url, repo="some/model", token="tok-en-that-is-good", leave_out=["original/*"])
        listed = talk.hear("manifest")
        talk.end()
        assert not any(row["path"].startswith("original") for row in listed["files"])
        hub.break_after["model-1.safetensors"] = 1_500_000
        source = {"name": "hub", "kind": "hub", "url": listed["url"], "token": "tok-en-that-is-good"}
        bring(talks, tmp_path / "copy", listed["files"], source)
        assert hub.served["model-1.safetensors"] < 6_000_002  # continued, not begun again
    for row in listed["files"]:
        assert (tmp_path / "copy" / row["path"]).read_bytes() == (folder / row["path"]).read_bytes()


def test_read_speed(talks: list[Talk], folder: Path) -> None:
    talk = Talk("read-speed", folder=str(folder), seconds=0.2)
    assert talk.hear("read-speed")["bytes_per_s"] > 0
    talk.end()

"""The courier on loopback: damage, truncation, resume, wrong tokens, paths that lead out, links, packs, idleness."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.bundle import bundle
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
        code = self.process.wait(30)
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


def bring(talks: list[Talk], destination: Path, files: list[Json], *sources: Json, check: str = "hash") -> Json:
    talk = fetch(talks, destination)
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
    bring(talks, tmp_path / "copy", files, source)
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


def test_a_damaged_source_never_becomes_a_file(talks: list[Talk], folder: Path, tmp_path: Path) -> None:
    source, files = serve(talks, folder)
    with (folder / "model-1.safetensors").open("r+b") as file:
        file.write(b"\0" * 100)
    talk = fetch(talks, tmp_path / "copy")
    talk.say(do="compare", files=files, check="hash")
    talk.hear("need")
    talk.say(do="go", sources=[source])
    assert "model-1.safetensors" in talk.hear("failed")["text"]
    assert not (tmp_path / "copy" / "model-1.safetensors").exists()


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
    connection = http.client.HTTPConnection(address, timeout=10)
    sent = {**headers, **({"Authorization": f"Bearer {token}"} if token else {})}
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


def test_a_link_of_the_list_itself_cannot_lead_out(talks: list[Talk], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    talk = fetch(talks, tmp_path / "copy")
    link = {"path": "sub", "kind": "link", "size": 0, "target": str(tmp_path / "elsewhere")}
    row = {"path": "sub/evil", "kind": "file", "size": 2, "mode": 0o644, "sha256": hashlib.sha256(b"hi").hexdigest()}
    talk.say(do="compare", files=[link, row], check="hash")
    talk.hear("need")
    talk.say(do="go", sources=[])
    talk.say(do="data", file=1, offset=0, length=2, payload=b"hi")
    assert "leads out" in talk.hear("failed")["text"]
    assert not list((tmp_path / "elsewhere").iterdir())


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
    assert idle.process.wait(30) == 75


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

"""The courier's commands; the request of each is one line of JSON."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import IO, Sequence

from .fetch import Fetch
from .files import CourierFiles, Item
from .folder import Nonce, Tree, free_bytes, listing, read_speed, visible_nonces
from .hashes import ChangedError, HashCache, WatchedFolder, hash_files
from .protocol import CourierError, Json, messages, read_line, send_event
from .server import end_when_idle, start_server
from .sources import hub


def serve(request: Json, stdin: IO[bytes]) -> None:
    folder = os.path.expanduser(request["folder"])
    if not os.path.isdir(folder):
        raise CourierError(f"there is no folder {folder}.")
    nonce = Nonce(folder, request["nonce"]) if request.get("nonce") else None
    try:
        leave_out, links_out = request.get("leave_out", ()), request.get("links_out", "follow")
        rows = listing(folder, leave_out, links_out)
        files = CourierFiles([], request.get("uplink_bytes_per_s", 0))
        watched = WatchedFolder(folder, rows, leave_out, links_out, files)
        files.may_send = watched.may_send
        hashes = HashCache(folder, own=False)
        hash_files(folder, rows, request.get("hash", "known"), hashes)
        files.items[:] = [Item(number, row, Tree(folder)) for number, row in enumerate(rows)]
        for item in files.items:
            files.grow(item, item.size, done=True)
        send_event("listening", **start_server(request.get("address", ""), files, request["token"]))
        send_event("manifest", files=rows)
        end_when_idle(files, request.get("idle_s", 3600))
        for message in messages(stdin):
            files.active_s = time.monotonic()
            if message["do"] == "look":
                send_event("seen", names=visible_nonces(folder, message["names"]))
            elif message["do"] == "hash":
                wanted = [rows[number] for number in message["files"]]
                hash_files(folder, wanted, "all", hashes)
                send_event("hashes", hashes={str(number): rows[number]["sha256"] for number in message["files"]})
            elif message["do"] == "watch":
                watched.wanted = message["files"]
            elif message["do"] == "doubt":
                watched.hash_again(message["file"])
            elif message["do"] == "still" and watched.is_same():
                send_event("unchanged")
    finally:
        if nonce:
            nonce.remove()


def fetch(request: Json, stdin: IO[bytes]) -> None:
    work = Fetch(request)
    try:
        os.makedirs(work.folder, exist_ok=True)
    except OSError as error:
        raise CourierError(f"{work.folder} cannot be made: {error.strerror}.") from None
    nonce = Nonce(work.folder, request["nonce"])
    try:
        address = start_server(request.get("address", ""), work.files, request["token"])
        send_event("listening", **address, writable=nonce.written, free_bytes=free_bytes(work.folder))
        end_when_idle(work.files, request.get("idle_s", 3600))
        work.handle_messages(stdin)
    finally:
        nonce.remove()


def manifest(request: Json, _: IO[bytes]) -> None:
    folder = os.path.expanduser(request["folder"])
    rows = listing(folder, request.get("leave_out", ()), request.get("links_out", "follow"))
    hash_files(folder, rows, request.get("hash", "all"), HashCache(folder, own=False))
    send_event("manifest", files=rows)


def verify(request: Json, _: IO[bytes]) -> None:
    Fetch(request).compare(request["files"], request.get("check", "again"))


COMMANDS = {"serve": serve, "fetch": fetch, "manifest": manifest, "verify": verify, "hub": hub,
            "read-speed": read_speed}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in COMMANDS:
        sys.stderr.write(f"courier: the command is one of {', '.join(COMMANDS)}\n")
        return 2
    request = read_line(sys.stdin.buffer)
    if request is None:
        sys.stderr.write("courier: no request came on standard input\n")
        return 2
    try:
        COMMANDS[arguments[0]](request, sys.stdin.buffer)
    except CourierError as error:
        send_event("failed", text=str(error))
        return 1
    except ChangedError as changed:
        changed.report()
        return 1
    except (BrokenPipeError, ConnectionError):  # the caller is gone
        return 1
    except OSError as error:
        text = f"{error.strerror or error}: {error.filename or request.get('folder', '')}."
        send_event("failed", text=text, errno=error.errno)
        return 1
    return 0


def start() -> None:
    code = main(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)  # does not wait for threads that serve or wait


if __name__ == "__main__":
    start()

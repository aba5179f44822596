"""The courier's commands, each an order that came as one line of JSON."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import IO, Sequence

from .fetch import Fetch
from .files import CourierFiles, Item
from .folder import Nonce, Tree, free_bytes, listing, read_speed, seen
from .hashes import ChangedError, Hashes, Watched, hash_files
from .protocol import Json, TroubleError, read_line, tell
from .server import end_when_idle, start_server
from .sources import hub


def serve(order: Json, stdin: IO[bytes]) -> None:
    folder = os.path.expanduser(order["folder"])
    if not os.path.isdir(folder):
        raise TroubleError(f"there is no folder {folder}.")
    nonce = Nonce(folder, order["nonce"]) if order.get("nonce") else None
    try:
        leave_out, links_out = order.get("leave_out", ()), order.get("links_out", "follow")
        rows = listing(folder, leave_out, links_out)
        depot = CourierFiles([], order.get("uplink_bytes_per_s", 0))
        watched = Watched(folder, rows, leave_out, links_out, depot)
        depot.allows = watched.allows
        hashes = Hashes(folder, own=False)
        hash_files(folder, rows, order.get("hash", "known"), hashes)
        depot.items[:] = [Item(number, row, Tree(folder)) for number, row in enumerate(rows)]
        for item in depot.items:
            depot.grow(item, item.size, done=True)
        tell("listening", **start_server(order.get("address", ""), depot, order["token"]))
        tell("manifest", files=rows)
        end_when_idle(depot, order.get("idle_s", 3600))
        while True:
            message = read_line(stdin)
            if message is None or message["do"] == "end":
                return
            depot.active_s = time.monotonic()
            if message["do"] == "look":
                tell("seen", names=seen(folder, message["names"]))
            elif message["do"] == "hash":
                wanted = [rows[number] for number in message["files"]]
                hash_files(folder, wanted, "all", hashes)
                tell("hashes", hashes={str(number): rows[number]["sha256"] for number in message["files"]})
            elif message["do"] == "watch":
                watched.wanted = message["files"]
            elif message["do"] == "doubt":
                watched.hash_again(message["file"])
            elif message["do"] == "still" and watched.is_same():
                tell("unchanged")
    finally:
        if nonce:
            nonce.remove()


def fetch(order: Json, stdin: IO[bytes]) -> None:
    work = Fetch(order)
    try:
        os.makedirs(work.folder, exist_ok=True)
    except OSError as error:
        raise TroubleError(f"{work.folder} cannot be made: {error.strerror}.") from None
    nonce = Nonce(work.folder, order["nonce"])
    try:
        where = start_server(order.get("address", ""), work.depot, order["token"])
        tell("listening", **where, writable=nonce.written, free_bytes=free_bytes(work.folder))
        end_when_idle(work.depot, order.get("idle_s", 3600))
        work.obey(stdin)
    finally:
        nonce.remove()


def manifest(order: Json, _: IO[bytes]) -> None:
    folder = os.path.expanduser(order["folder"])
    rows = listing(folder, order.get("leave_out", ()), order.get("links_out", "follow"))
    hash_files(folder, rows, order.get("hash", "all"), Hashes(folder, own=False))
    tell("manifest", files=rows)


def verify(order: Json, _: IO[bytes]) -> None:
    work = Fetch(order)
    work.compare(order["files"], order.get("check", "again"))


COMMANDS = {"serve": serve, "fetch": fetch, "manifest": manifest, "verify": verify, "hub": hub,
            "read-speed": read_speed}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in COMMANDS:
        sys.stderr.write(f"courier: say one of {', '.join(COMMANDS)}\n")
        return 2
    order = read_line(sys.stdin.buffer)
    if order is None:
        sys.stderr.write("courier: no order came on standard input\n")
        return 2
    try:
        COMMANDS[arguments[0]](order, sys.stdin.buffer)
    except TroubleError as trouble:
        tell("failed", text=str(trouble))
        return 1
    except ChangedError as changed:
        changed.tell()
        return 1
    except (BrokenPipeError, ConnectionError):  # whoever wanted this is gone
        return 1
    except OSError as error:
        text = f"{error.strerror or error}: {error.filename or order.get('folder', '')}."
        tell("failed", text=text, errno=error.errno)
        return 1
    return 0


def start() -> None:
    code = main(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)  # threads that serve or wait do not hold it up


if __name__ == "__main__":
    start()

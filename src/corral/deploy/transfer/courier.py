"""One `node/courier` on a host, or on this machine, as a process that exchanges lines of JSON with this one.

Nothing is placed on the host: the courier's source code travels on standard input, before the order. The courier ends
when this process closes the connection or dies. Tokens go through standard input only.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from corral.base.bundle import bundle
from corral.base.errors import ConflictError, CorralError, DataError, UnreachableError
from corral.base.ssh import Ssh
from corral.base.untrusted import plain
from corral.deploy.transfer.courier_events import LONGEST_LINE_BYTES, CourierRow, read_event


class ChangedSourceError(ConflictError):
    """The source was written to while it was copied; nothing more of it is sent."""


def changed_source(where: str, event: Mapping[str, Any]) -> ChangedSourceError:
    """The error for a courier's event `changed`."""
    more = f" and {event['more']} more" if event["more"] else ""
    return ChangedSourceError(
        f"{where} changed while it was being copied: {_change(event)}{more}.",
        "Wait until nothing writes there any more, then run the same command again: files that have arrived whole "
        "are kept.",
        path=event["path"],
    )


def _change(event: Mapping[str, Any]) -> str:
    path, was, now = event["path"], event["was_bytes"], event["now_bytes"]
    if event["how"] == "gone":
        return f"{path} is gone"
    if event["how"] == "new":
        return f"{path} is new"
    return f"{path} had {was:,} bytes and has {now:,}" if was != now else f"{path} was written to"


HERE = "this machine"
SSH_FAILED = 255  # what ssh itself ends with
MOST_WAITING = 1000  # events that were not read yet: a courier that sends more must wait
LONGEST_COMPLAINT_BYTES = 1 << 16
SMALL_BYTES = 1 << 20  # as in node/courier/fetch.py: smaller files travel whole
FRAME_BYTES = 1 << 20
Event = dict[str, Any]


@lru_cache(maxsize=1)
def _source() -> bytes:
    return bundle("node/courier").encode()


def _argv(ssh: Ssh, host: str, command: str) -> list[str]:
    boot = f"import sys; exec(compile(sys.stdin.buffer.read({len(_source())}), 'courier', 'exec'))"
    if host == HERE:
        return [sys.executable, "-I", "-c", boot, command]
    return [*ssh.prefix(host), "--", shlex.join(["python3", "-I", "-c", boot, command])]


@dataclass
class Courier:
    """One running courier; its events go to `inbox` as (courier, event), the last one being `gone`."""

    ssh: Ssh
    host: str
    command: str
    inbox: queue.Queue[tuple[Courier, Event]]
    token: str = ""
    _process: subprocess.Popen[bytes] = field(init=False)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def start(self, order: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            _argv(self.ssh, self.host, self.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to handle: the couriers end when their input does
        )
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self._reader.start()
        self.send(order, before=_source())

    def send(self, message: Mapping[str, Any], payload: bytes = b"", before: bytes = b"") -> bool:
        """Send a message; False when the courier has ended."""
        assert self._process.stdin is not None
        try:
            with self._writing:
                self._process.stdin.write(before + json.dumps(message).encode() + b"\n" + payload)
                self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        """Close its input, which ends it, and wait."""
        assert self._process.stdin is not None
        try:
            with self._writing:
                self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream, thread in ((self._process.stdout, self._reader), (self._process.stderr, self._errors)):
            thread.join(5)
            if stream is not None and not thread.is_alive():
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := self._process.stdout.readline(LONGEST_LINE_BYTES + 1):
                if event := read_event(line):
                    self.inbox.put((self, event))
        except DataError as error:  # an impossible event: nothing more is read from it
            self._process.kill()
            self.inbox.put((self, {"event": "failed", "text": error.message}))
        code = self._process.wait()
        self._errors.join(5)
        ended = (
            "ssh lost the connection to it" if code == SSH_FAILED else f"the copying program ended with code {code}"
        )
        text = self._stderr[-1] if self._stderr else ended
        self.inbox.put((self, {"event": "gone", "code": code, "text": text}))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while line := self._process.stderr.readline(LONGEST_COMPLAINT_BYTES):
            if text := plain(line.decode("utf-8", "replace").strip(), 500):
                self._stderr = [*self._stderr[-20:], text]


def ask_courier(ssh: Ssh, host: str, command: str, order: Mapping[str, Any], wanted: Sequence[str]) -> Event:
    """Run a courier for a single answer."""
    inbox: queue.Queue[tuple[Courier, Event]] = queue.Queue(MOST_WAITING)
    courier = Courier(ssh, host, command, inbox)
    courier.start(order)
    try:
        while True:
            _, event = inbox.get()
            if event["event"] in wanted:
                return event
            if event["event"] == "failed":
                raise CorralError(f"{host}: {event['text']}", "", host=host, status=event.get("status"))
            if event["event"] == "changed":
                raise changed_source(f"{host}:{order.get('folder', '')}", event)
            if event["event"] == "gone":
                raise UnreachableError(f"{host}: {event['text']}", f"Try `ssh {host}` by hand.", host=host)
    finally:
        courier.close()


@dataclass(frozen=True)
class Push:
    """Sends files of this machine down the ssh connection of one host: what it lacks, and again what came damaged.

    `held` waits for the host's list of what it holds; None: the transfer is over.
    """

    courier: Courier
    folder: Path
    files: Sequence[CourierRow]
    held: Callable[[], Event | None]
    is_over: Callable[[], bool]
    trouble: Callable[[Event], None]
    uplink_bytes_per_s: float = 0

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.is_over() and self.courier.send({"do": "held"}):
            answer = self.held()
            if answer is None:
                return
            rows = [row for row in answer["held"] if row[0] < len(self.files)]
            for number, have in sorted(rows, key=lambda row: self.files[row[0]].size >= SMALL_BYTES):
                if not self._file(number, have):
                    return

    def _file(self, number: int, offset: int) -> bool:
        path = self.folder / self.files[number].path
        try:
            with path.open("rb") as file:
                file.seek(offset)
                while self._is_same(number, os.fstat(file.fileno())):
                    block = file.read(FRAME_BYTES)
                    if not block:
                        return True
                    if self.uplink_bytes_per_s:
                        time.sleep(len(block) / self.uplink_bytes_per_s)
                    order = {"do": "data", "file": number, "offset": offset, "length": len(block)}
                    if self.is_over() or not self.courier.send(order, block):
                        return False
                    offset += len(block)
        except FileNotFoundError:
            self._is_same(number, None)
        except OSError as error:
            self.trouble({"event": "failed", "text": f"{path} cannot be read here: {error.strerror}."})
        return False

    def _is_same(self, number: int, stat: os.stat_result | None) -> bool:
        """Whether a file is still the one that was listed; if not, that is reported, and nothing more is sent."""
        row = self.files[number]
        if stat and (stat.st_size, stat.st_mtime_ns) == (row.size, row.mtime_ns):
            return True
        how, now = ("rewritten", stat.st_size) if stat else ("gone", 0)
        self.trouble({"event": "changed", "path": row.path, "how": how, "was_bytes": row.size, "now_bytes": now,
                      "more": 0})  # fmt: skip
        return False

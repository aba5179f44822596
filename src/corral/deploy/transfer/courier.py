"""The near end of a courier: one `node/courier` on a host, or here, spoken to in lines of JSON.

Nothing is placed on the host: the source travels on standard input, before the order. The courier ends when this
process closes the connection or dies. Tokens go through standard input only.

A source that is written to while it is copied: one error, with what changed and what to do.
"""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from corral.base.bundle import bundle
from corral.base.errors import ConflictError, CorralError, DataError, UnreachableError
from corral.base.ssh import Ssh
from corral.base.untrusted import plain
from corral.deploy.transfer.courier_events import LONGEST_LINE_BYTES, read_event


class ChangedSourceError(ConflictError):
    """Nothing more of it is sent."""


def changed_source(where: str, event: Mapping[str, Any]) -> ChangedSourceError:
    """The error for what a courier said of its files."""
    more = f" and {event['more']} more" if event["more"] else ""
    return ChangedSourceError(
        f"{where} changed while it was being copied: {_told(event)}{more}.",
        "Wait until nothing writes there any more, then run the same command again: files that have arrived whole "
        "are kept.",
        path=event["path"],
    )


def _told(event: Mapping[str, Any]) -> str:
    path, was, now = event["path"], event["was_bytes"], event["now_bytes"]
    if event["how"] == "gone":
        return f"{path} is gone"
    if event["how"] == "new":
        return f"{path} is new"
    return f"{path} had {was:,} bytes and has {now:,}" if was != now else f"{path} was written to"


HERE = "this machine"
SSH_FAILED = 255  # what ssh itself ends with
MOST_WAITING = 1000  # events that nobody has looked at yet: a courier that says more must wait
LONGEST_COMPLAINT_BYTES = 1 << 16
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
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self._reader.start()
        self.send(order, before=_source())

    def send(self, message: Mapping[str, Any], payload: bytes = b"", before: bytes = b"") -> bool:
        """Say something; False when nobody listens any more."""
        assert self._process.stdin is not None
        try:
            with self._writing:
                self._process.stdin.write(before + json.dumps(message).encode() + b"\n" + payload)
                self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        """End it: its input ends, and so does it."""
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
        except DataError as error:  # it lies: nothing more is heard from it
            self._process.kill()
            self.inbox.put((self, {"event": "failed", "text": error.message}))
        code = self._process.wait()
        self._errors.join(5)
        ended = "ssh lost the connection to it" if code == SSH_FAILED else f"its courier ended with code {code}"
        said = self._said[-1] if self._said else ended
        self.inbox.put((self, {"event": "gone", "code": code, "text": said}))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while line := self._process.stderr.readline(LONGEST_COMPLAINT_BYTES):
            if text := plain(line.decode("utf-8", "replace").strip(), 500):
                self._said = [*self._said[-20:], text]


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

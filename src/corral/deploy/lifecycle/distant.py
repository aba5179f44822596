"""A deployment of another machine's home, brought here through that machine (`corral tunnel --through`).

The address may change while the tunnel is open: a job is put back into its queue and starts on another node, or its
successor takes over. So that machine's `corral` is asked again, every few seconds and as soon as the far end refuses
a connection, while the near end, which clients know, keeps its port. New requests go to the newest of a chain that is
ready, over a connection that is opened before they do; running ones finish on the one that they began on. When the
server is gone for good, an error says so.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from corral.base.errors import ConflictError, CorralError, NotFoundError, UnreachableError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.base.processes import terminated_as_interrupted
from corral.base.record import from_json
from corral.base.ssh import Forward, Ssh
from corral.client.endpoint import Endpoint
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle.tunnel import OPEN_S, NearEnd, accepts, hold_forward, near_end, near_socket
from corral.node.sockets import free_port

ASK_EVERY_S = 5.0
LEAST_PAUSE_S = 2.0  # between two requests, however many connections are refused
LOOK_S = 0.2
TRIES = 3  # failed requests in a row before it gives up


@dataclass(frozen=True)
class FarStatus:
    """The status of the deployment as the other machine reports it, or of the successor that serves now."""

    name: str
    state: State
    text: str
    endpoint: Endpoint | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def summary(self) -> str:
        return f"{self.state}: {self.text}" if self.text else f"{self.state}"


@dataclass(frozen=True)
class Distant:
    """A deployment of another machine's home, reached through that machine."""

    name: str
    through: str  # the host whose `corral` knows the deployment: a login node
    program: tuple[str, ...]  # that `corral`
    endpoint: Endpoint  # as that host reaches it
    local_port: int
    key_file: Path  # the key, brought here

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.local_port}/v1"

    @property
    def forward(self) -> Forward:
        far = urlsplit(self.endpoint.base_url)
        host = f"[{far.hostname}]" if ":" in (far.hostname or "") else far.hostname
        return Forward(self.local_port, f"{host}:{far.port}", self.through)


def ask_status(name: str, through: str, program: Sequence[str], ssh: Ssh | None = None) -> FarStatus:
    """The status that the other machine's `corral` reports; of its successor where the deployment has ended."""
    status = _status(name, through, program, ssh or Ssh())
    followers = [one for one in status.get("followed_by") or () if isinstance(one, dict)]
    ready = [one for one in followers if one.get("state") == State.READY]
    coming = [one for one in followers if one.get("state") not in ENDED] if status["state"] in ENDED else []
    if ready or coming:
        status = _status(str((ready or coming)[-1].get("name")), through, program, ssh or Ssh())
    endpoint = from_json(Endpoint, status["endpoint"], strict=False) if status.get("endpoint") else None
    return FarStatus(str(status["name"]), State(status["state"]), str(status.get("text") or ""), endpoint)


def _status(name: str, through: str, program: Sequence[str], ssh: Ssh) -> dict[str, Any]:
    done = ssh.run(through, [*program, "status", name, "--json"], timeout_s=60)
    try:
        body: dict[str, Any] = json.loads(done.stdout)
        if "error" in body:
            kind = NotFoundError if body.get("exit_code") == NotFoundError.exit_code else UnreachableError
            raise kind(f"{through}: {body['error']['message']}", f"`ssh {through} corral ps` lists what is there.")
        State(body["state"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnreachableError(
            f"`{shlex.join(program)}` on {through} did not say where {name!r} is: {done.last_line or 'no output'}",
            "Name the command as it is called there: --corral /path/to/corral.",
        ) from None
    return body


def find_distant(name: str, through: str, program: Sequence[str], port: int | None) -> Distant:
    """Ask the other machine's `corral` where the deployment is, and bring its key here."""
    status = ask_status(name, through, program)
    if status.endpoint is None or status.endpoint.key_file is None:
        raise NotFoundError(
            f"{name!r} on {through} is {status.state}: {status.text or 'no endpoint yet'}.",
            f"Wait for it there: corral wait {shlex.quote(name)}",
        )
    folder = home_dir() / "distant" / f"{through}-{DeploymentFolder.of(name).path.name}"
    make_private_dir(folder)
    near = free_port("127.0.0.1", first=port or 0)
    if port and near != port:
        raise ConflictError(f"port {port} of this machine is taken.", "Leave --port out and a free one is chosen.")
    distant = Distant(name, through, tuple(program), status.endpoint, near, folder / "key")
    _bring_key(distant)
    return distant


def _bring_key(distant: Distant) -> None:
    assert distant.endpoint.key_file is not None
    key = Ssh().run(distant.through, ["cat", distant.endpoint.key_file], timeout_s=30, check=True).stdout
    write_atomic(distant.key_file, key)


def hold_distant(distant: Distant, say: Callable[[str], None]) -> None:
    """Keep the forward open wherever the server moves; raises when it is gone."""
    over = threading.Event()
    with (
        terminated_as_interrupted(),
        near_end(distant.local_port, near_socket()) as near,
        _Watch(distant, say) as watch,
    ):
        leads: Distant | None = None
        forwards: list[threading.Thread] = []
        try:
            while True:
                now = watch.distant()
                if now is not None and now != leads:
                    forwards.append(_move(near, now, len(forwards) + 1, say, watch, over))
                    leads = now
                time.sleep(LOOK_S)
        finally:
            over.set()
            for thread in forwards:
                thread.join()


def _move(
    near: NearEnd, to: Distant, number: int, say: Callable[[str], None], watch: _Watch, over: threading.Event
) -> threading.Thread:
    """Open a forward and lead new requests through it; it ends once another leads and its last request is over."""
    socket, leads = near_socket(number), threading.Event()

    def wanted() -> bool:
        return not over.is_set() and (not leads.is_set() or near.uses(socket))

    def hold() -> None:
        hold_forward(to.forward.command(socket), say, wanted, watch.ask_soon)
        socket.unlink(missing_ok=True)

    thread = threading.Thread(target=hold, name="corral-forward", daemon=True)
    thread.start()
    until = time.monotonic() + OPEN_S
    while not accepts(socket) and time.monotonic() < until:
        time.sleep(LOOK_S)
    near.lead_to(socket)
    leads.set()
    return thread


class _Watch:
    """Asks the other machine in a thread of its own, and reports changes."""

    def __init__(self, distant: Distant, say: Callable[[str], None]) -> None:
        self._now: Distant | None = distant
        self._first, self._say = distant, say
        self._gone: CorralError | None = None
        self._failures = 0
        self._last_text = ""
        self._soon, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="corral-far-end", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._soon.set()

    def distant(self) -> Distant | None:
        """Where it is now; None while it has no address. Raises when it is gone."""
        if self._gone:
            raise self._gone
        return self._now

    def ask_soon(self) -> None:
        self._soon.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self._soon.wait(ASK_EVERY_S if self._now else LEAST_PAUSE_S)
            self._soon.clear()
            if not self._over.is_set():
                self._ask()
                self._over.wait(LEAST_PAUSE_S)

    def _ask(self) -> None:
        first = self._first
        try:
            self._update(ask_status(first.name, first.through, first.program))
            self._failures = 0
        except NotFoundError as error:
            self._gone = NotFoundError(f"the server is gone: {error.message}", error.remedy)
        except CorralError as error:
            self._failures += 1
            self._tell(f"{first.through} cannot be asked about {first.name}: {error.message}")
            if self._failures >= TRIES and self._now is None:
                self._gone = error

    def _update(self, status: FarStatus) -> None:
        first = self._first
        if status.ended:
            again = f"Start it again there: corral up; `corral logs {shlex.quote(status.name)}` shows its last lines."
            self._gone = NotFoundError(
                f"the server is gone: {status.name} on {first.through} is {status.summary.rstrip('.')}.", again
            )
        elif status.endpoint is None or status.endpoint.key_file is None:
            self._now = None
            self._tell(f"{status.name} on {first.through} is {status.summary}; waiting for its address")
        elif self._now is None or self._now.endpoint != status.endpoint:
            moved = replace(first, endpoint=status.endpoint)
            _bring_key(moved)
            self._now = moved
            self._tell(
                f"{status.name} on {first.through} is now at {status.endpoint.base_url}; the tunnel leads there"
            )

    def _tell(self, text: str) -> None:
        if text != self._last_text:
            self._last_text = text
            self._say(text)

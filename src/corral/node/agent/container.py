"""The container that a rank's engine may run in: finding it, its processes and sockets, and removing it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Any, Dict, List, Sequence, Set, Tuple

from ..files import read_json
from ..processes import ENDED, end_all, process_table
from ..sockets import listener_users, sockets_of

Json = Dict[str, Any]
CLEANUP_ATTEMPTS = 15


class Container:
    """The container of a rank; false for a rank whose runtime has none.

    Its processes are children of a daemon. They are found by their control group, which names the container and which
    every user may read; the process number that the daemon gives belongs to the daemon's own namespace, and may mean
    another process here.
    """

    def __init__(self, spec: Json) -> None:
        self.cleanup: List[List[str]] = spec.get("cleanup") or []
        self.query: List[str] = spec.get("pid_query") or []
        self.env = {k: v for k, v in os.environ.items() if k not in spec.get("unset_env", [])}
        self.id = ""
        self.queried = 0.0  # monotonic

    def __bool__(self) -> bool:
        return bool(self.query)

    def forget(self) -> None:
        """A new one is about to start."""
        self.id, self.queried = "", 0.0

    def find(self, every_s: float = 1.0) -> str:
        """The container's id once it runs; queried until then, at most every so many seconds."""
        if self.query and not self.id and time.monotonic() - self.queried >= every_s:
            fields = self._run(self.query)[1].split()
            self.queried = time.monotonic()
            if len(fields) >= 2 and len(fields[1]) >= 12:
                self.id = fields[1]
        return self.id

    def processes(self) -> Set[int]:
        """The container's running processes, as far as they are visible here."""
        found: Set[int] = set()
        if not self.find():
            return found
        for pid, process in process_table().items():
            with contextlib.suppress(OSError), open("/proc/%d/cgroup" % pid) as file:
                if process.state not in ENDED and self.id in file.read():
                    found.add(pid)
        return found

    def owns(self, sockets: Set[str], port: int) -> bool:
        """Whether these sockets, which listen on a port, are the container's, as far as that is visible.

        Of another user's processes (root's, in a plain user's container) only the user is visible; of processes in
        another namespace nothing at all.
        """
        if not self.find(0.0):
            return False
        inside = self.processes()
        users = set()
        for pid in inside:
            try:
                os.listdir("/proc/%d/fd" % pid)
            except PermissionError:
                with contextlib.suppress(OSError):
                    users.add(os.stat("/proc/%d" % pid).st_uid)
            except OSError:
                pass
        return not inside or not sockets - sockets_of(inside) or bool(users & listener_users(port))

    def remove(self) -> None:
        """Remove the container, whatever state it is in."""
        for argv in self.cleanup:
            for _ in range(CLEANUP_ATTEMPTS):  # a daemon that is already removing the container refuses
                if self._run(argv, 40)[0] in (0, 127):  # 127: there is no client
                    break
                time.sleep(0.2)
        if self.id:
            end_all(self.processes, 0.0)  # the daemon did not answer

    def is_left(self) -> bool:
        """Whether it still exists, or cannot be queried."""
        self.id = ""
        if self.query and self._run(self.query)[0] not in (0, 127):
            return True
        return bool(self.find(0.0))

    def _run(self, argv: List[str], timeout_s: float = 20) -> Tuple[int, str]:
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                env=self.env,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return 1, ""
        if done.returncode:
            sys.stderr.write("%s: %s\n" % (argv[3:] or argv, done.stderr.decode("utf-8", "replace").strip()))
        return done.returncode, done.stdout.decode("utf-8", "replace")


def containers_of(launch_id: str, engine_files: Sequence[str]) -> List[Container]:
    """The containers of a launch, from the specs beside these files."""
    containers = []
    for path in engine_files:
        spec = read_json(os.path.join(os.path.dirname(path), "spec.json"))
        if spec.get("launch_id") == launch_id and spec.get("cleanup"):
            containers.append(Container(spec))
    return containers

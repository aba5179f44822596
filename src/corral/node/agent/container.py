"""The container that a rank's engine may run in: found, told from others, removed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Any, Dict, List, Sequence, Set, Tuple

from ..files import read_json
from ..processes import end_all, process_table
from ..sockets import listener_users, sockets_of

Json = Dict[str, Any]
CLEANUP_ATTEMPTS = 15


class Container:
    """The container of a rank whose runtime is one; nothing at all for every other rank.

    Its processes belong to a daemon. They are told by their control group, which names the container and which
    everybody may read; the number that the daemon gives is one of the daemon's own process namespace, and may mean
    somebody else's process here.
    """

    def __init__(self, spec: Json) -> None:
        self.cleanup: List[List[str]] = spec.get("cleanup") or []
        self.query: List[str] = spec.get("pid_query") or []
        self.env = {k: v for k, v in os.environ.items() if k not in spec.get("unset_env", [])}
        self.id = ""
        self.asked = 0.0

    def __bool__(self) -> bool:
        return bool(self.query)

    def forget(self) -> None:
        """A new one is about to start."""
        self.id, self.asked = "", 0.0

    def look(self, every_s: float = 1.0) -> str:
        """The container's id once it runs; its client is not asked again after that, nor too often before."""
        if self.query and not self.id and time.monotonic() - self.asked >= every_s:
            words = self._run(self.query)[1].split()
            self.asked = time.monotonic()
            if len(words) >= 2 and len(words[1]) >= 12:
                self.id = words[1]
        return self.id

    def processes(self) -> Set[int]:
        """Every process in the container that can be seen from here."""
        found: Set[int] = set()
        if not self.look():
            return found
        for pid, row in process_table().items():
            with contextlib.suppress(OSError), open("/proc/%d/cgroup" % pid) as file:
                if row[3] not in "ZX" and self.id in file.read():
                    found.add(pid)
        return found

    def owns(self, sockets: Set[str], port: int) -> bool:
        """Whether these sockets, which listen on a port and are no child's, are the container's, as far as one sees.

        Of another user's processes (root's, in a container of a plain user's) only the user can be seen; of processes
        in a namespace beside ours nothing at all.
        """
        if not self.look(0.0):
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
        """Take the container away, whatever state it is in."""
        for argv in self.cleanup:
            for _ in range(CLEANUP_ATTEMPTS):  # a daemon refuses while it is itself removing the container
                if self._run(argv, 40)[0] in (0, 127):  # 127: there is no client
                    break
                time.sleep(0.2)
        if self.id:
            end_all(self.processes, 0.0)  # the daemon did not answer

    def is_left(self) -> bool:
        """Whether it is still there, or nobody can say that it is not."""
        self.id = ""
        if self.query and self._run(self.query)[0] not in (0, 127):
            return True
        return bool(self.look(0.0))

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
    """The containers of a launch, as the specs beside these files tell."""
    found = []
    for path in engine_files:
        spec = read_json(os.path.join(os.path.dirname(path), "spec.json"))
        if spec.get("launch_id") == launch_id and spec.get("cleanup"):
            found.append(Container(spec))
    return found

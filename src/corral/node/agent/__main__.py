"""The agent's commands: `run`, which is the supervisor of a worker, and `sweep`, for when neither is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from typing import Any, Dict, List, NoReturn, Sequence

from ..files import write_json
from ..processes import become_subreaper, descendants, end_all, identity, marked
from ..states import Reason, State
from . import __doc__ as usage
from .container import Container, containers_of
from .journal import Journal, private_tmp
from .worker import Worker


def _work(spec: Dict[str, Any], journal: Journal) -> NoReturn:
    """Run the worker in the process that was forked for it."""
    code = 1
    try:
        os.setsid()
        become_subreaper()
        code = Worker(spec, journal).run()
    except BaseException as error:  # whatever it is must reach the journal
        if not journal.ended:
            with contextlib.suppress(OSError):
                text = "the agent failed: %r" % error
                journal.write_state(State.FAILED, reason=Reason.AGENT_KILLED, text=text)
    finally:
        end_all(lambda: descendants(os.getpid()), 5.0)
        shutil.rmtree(private_tmp(spec["launch_id"]), ignore_errors=True)
        os._exit(code)


def supervise(spec_path: str) -> int:
    """Start the worker, wait until it ends, and clean up after it whatever happened."""
    with open(spec_path) as file:
        spec = json.load(file)
    become_subreaper()
    journal = Journal(spec["events"], spec["rank"])
    write_json(spec["agent_file"], identity(os.getpid()))
    # a stop request is a file, which also works over a shared file system and cannot be lost as a signal can
    signal.signal(signal.SIGTERM, lambda *_: open(spec["stop_file"], "w").close())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    worker = os.fork()
    if worker == 0:
        _work(spec, journal)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return 1
        if pid == worker:
            break
    end_all(lambda: descendants(os.getpid()) | marked(spec["launch_id"], [spec["engine_file"]]), 3.0)
    Container(spec).remove()
    shutil.rmtree(private_tmp(spec["launch_id"]), ignore_errors=True)
    for path in spec.get("secrets", []):  # copies on this node alone, which nothing needs any more
        with contextlib.suppress(OSError):
            os.unlink(path)
    if os.WIFSIGNALED(status):
        text = "the agent was killed by signal %d; the engine was taken down" % os.WTERMSIG(status)
        journal.catch_up()
        if not journal.ended:
            journal.write_state(State.FAILED, reason=Reason.AGENT_KILLED, text=text)
        return 1
    return os.WEXITSTATUS(status)


def sweep(launch_id: str, engine_files: Sequence[str]) -> int:
    """End what a launch left behind, and print what is left nevertheless."""
    containers = containers_of(launch_id, engine_files)
    end_all(lambda: marked(launch_id, engine_files), 5.0)
    for container in containers:
        container.remove()
    left = marked(launch_id, engine_files)
    containers_left = [container.id for container in containers if container.is_left()]
    shutil.rmtree(private_tmp(launch_id), ignore_errors=True)
    sys.stdout.write(json.dumps({"left": sorted(left), "containers": containers_left}) + "\n")
    return 1 if left or containers_left else 0


def main(argv: List[str]) -> int:
    if len(argv) == 2 and argv[0] == "run":
        return supervise(argv[1])
    if len(argv) >= 2 and argv[0] == "sweep":
        return sweep(argv[1], argv[2:])
    sys.stderr.write(usage or "")
    return 2


def start() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    start()

"""The supervisor: starts the worker, stays until it ends, cleans up after it, and sweeps up when neither is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from typing import Any, Dict, NoReturn, Sequence

from ..files import write_json
from ..processes import become_subreaper, descendants, end_all, identity, marked
from ..states import Reason, State
from .container import Container, containers_of
from .journal import Journal, private_tmp
from .worker import Worker


def _work(spec: Dict[str, Any], journal: Journal) -> NoReturn:
    """The worker's whole life, in the process that was forked for it."""
    code = 1
    try:
        os.setsid()
        become_subreaper()
        code = Worker(spec, journal).run()
    except BaseException as error:  # the last door: whatever it is must reach the journal
        if not journal.ended:
            with contextlib.suppress(OSError):
                text = "the agent failed: %r" % error
                journal.tell_state(State.FAILED, reason=Reason.AGENT_KILLED, text=text)
    finally:
        end_all(lambda: descendants(os.getpid()), 5.0)
        shutil.rmtree(private_tmp(spec["launch_id"]), ignore_errors=True)
        os._exit(code)


def supervise(spec_path: str) -> int:
    """Start the worker, stay until it ends, and clean up after it whatever happened."""
    with open(spec_path) as file:
        spec = json.load(file)
    become_subreaper()
    journal = Journal(spec["events"], spec["rank"])
    write_json(spec["agent_file"], identity(os.getpid()))
    # a stop is a file, so that it can also be asked for over a shared file system, and survives a lost signal
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
    for path in spec.get("secrets", []):  # copies on this node alone: of no use to anybody any more
        with contextlib.suppress(OSError):
            os.unlink(path)
    if os.WIFSIGNALED(status):
        text = "the agent was killed by signal %d; the engine was taken down" % os.WTERMSIG(status)
        journal.catch_up()
        if not journal.ended:
            journal.tell_state(State.FAILED, reason=Reason.AGENT_KILLED, text=text)
        return 1
    return os.WEXITSTATUS(status)


def sweep(launch_id: str, engine_files: Sequence[str]) -> int:
    """End what a launch left behind, and say what is left even so."""
    containers = containers_of(launch_id, engine_files)
    end_all(lambda: marked(launch_id, engine_files), 5.0)
    for container in containers:
        container.remove()
    left = marked(launch_id, engine_files)
    containers_left = [container.id for container in containers if container.is_left()]
    shutil.rmtree(private_tmp(launch_id), ignore_errors=True)
    sys.stdout.write(json.dumps({"left": sorted(left), "containers": containers_left}) + "\n")
    return 1 if left or containers_left else 0

"""What the ssh target does on a node, one command each: place and start, report, stop, remove.

    python3 - start|report|stop|remove REQUEST      (REQUEST is JSON; `start` reads a tar archive on standard input)

Prints one JSON object. Standard library only, Python 3.8 or later, nothing of corral: the source is sent with the
command and is not kept on the node.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from typing import Any, Dict, Optional

from .files import write_atomic
from .processes import boot_id, is_running

Json = Dict[str, Any]
MOST_BYTES = 4 << 20  # of one file in one report
SECRETS = ("key", "token")


def alive(path: str) -> Optional[bool]:
    """Whether the agent whose identity is in this file runs; None when the file cannot be read."""
    try:
        with open(path) as file:
            return is_running(json.load(file))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def start_agent(request: Json) -> Json:
    """Unpack the archive into the deployment's folder, then start an agent, which outlives this session."""
    os.umask(0o077)
    folder, rank = request["folder"], request["rank"]
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            path = os.path.join(folder, member.name)
            if not member.isfile() or os.path.relpath(path, folder).startswith(".."):
                raise ValueError("%s does not belong in a deployment" % member.name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            source = archive.extractfile(member)
            assert source is not None
            write_atomic(path, source.read())  # nodes that share a home unpack the same files at the same moment
    rank_folder = os.path.join(folder, "rank%d" % rank)
    with open(os.path.join(rank_folder, "agent.log"), "ab") as log:
        agent = subprocess.Popen(
            [
                sys.executable,
                "-I",
                os.path.join(folder, "node", "agent.py"),
                "run",
                os.path.join(rank_folder, "spec.json"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=rank_folder,
        )
    until = time.monotonic() + 60
    while not os.path.exists(os.path.join(rank_folder, "agent.json")):
        if agent.poll() is not None or time.monotonic() > until:
            with open(os.path.join(rank_folder, "agent.log"), errors="replace") as text:
                return {"error": "the node agent did not start: %s" % (text.read().strip()[-500:] or "no output")}
        time.sleep(0.01)
    return {"pid": agent.pid}


def report(request: Json) -> Json:
    """What the rank wrote after the given offsets, and whether its agent runs."""
    rank_folder = os.path.join(request["folder"], "rank%d" % request["rank"])
    if not os.path.isdir(rank_folder):
        return {"missing": True, "boot_id": boot_id()}
    answer: Json = {"alive": alive(os.path.join(rank_folder, "agent.json")), "boot_id": boot_id(), "files": {}}
    if answer["alive"] is False:  # an agent deletes its secrets when it ends; one that was killed did not
        forget_secrets(request["folder"])
    for name, offset in request["files"].items():
        with contextlib.suppress(OSError), open(os.path.join(rank_folder, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            offset = 0 if size < offset else offset  # trimmed by the agent
            if size - offset > MOST_BYTES and name == "engine.log":
                offset = size - MOST_BYTES
            file.seek(offset)
            data = file.read(MOST_BYTES)
            answer["files"][name] = {"offset": offset, "data": base64.b64encode(data).decode()}
    for name in ("agent.json", "heartbeat.json"):
        with contextlib.suppress(OSError, ValueError), open(os.path.join(rank_folder, name)) as text:
            answer[name] = json.load(text)
            answer[name + "_age_s"] = max(0.0, time.time() - os.fstat(text.fileno()).st_mtime)
    return answer


def forget_secrets(folder: str) -> None:
    """Delete the copies of key and token on this node, which nothing uses any more."""
    for name in SECRETS:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))


def stop_agent(request: Json) -> Json:
    """Ask the agent to stop, wait, and end what it may have left behind."""
    folder, rank = request["folder"], request["rank"]
    rank_folder = os.path.join(folder, "rank%d" % rank)
    if not os.path.isdir(rank_folder):
        return {"left": []}
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(rank_folder, "stop"), os.O_WRONLY | os.O_CREAT, 0o600))
    agent = os.path.join(rank_folder, "agent.json")
    until = time.monotonic() + request["grace_s"]
    while alive(agent) and time.monotonic() < until:
        time.sleep(0.1)
    if alive(agent):  # it does not react any more
        with open(agent) as file:
            number = json.load(file)["pid"]
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
        time.sleep(1)
    script = os.path.join(folder, "node", "agent.py")
    command = [sys.executable, "-I", script, "sweep", request["launch_id"], os.path.join(rank_folder, "engine.json")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=60, check=False)
    left: Json = json.loads(done.stdout or b'{"left": ["the sweep printed nothing"]}')
    return left


def is_deployment(folder: str) -> bool:
    """Whether a folder holds what a start places and nothing else; on a full disk, most of that may be missing."""
    if os.path.isfile(os.path.join(folder, "node", "agent.py")):
        return True
    ours = ("node", "key", "token", "rank", ".key.", ".token.")
    return os.path.isdir(folder) and all(name.startswith(ours) for name in os.listdir(folder))


def remove(request: Json) -> Json:
    """Delete the deployment's folder; on a shared file system the first node deletes it for all."""
    folder = request["folder"]
    if is_deployment(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return {"removed": not os.path.exists(folder)}


def start() -> None:
    actions = {"start": start_agent, "report": report, "stop": stop_agent, "remove": remove}
    answer = actions[sys.argv[1]](json.loads(sys.argv[2]))
    answer["host"] = socket.gethostname()
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    start()

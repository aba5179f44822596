"""The node agent: starts one rank of the engine, watches it, tells what happens, and takes it down whole.

    python3 agent.py run SPEC.json      # run until the engine ends or a stop is asked for
    python3 agent.py sweep LAUNCH_ID [ENGINE.json...]    # end whatever a launch left behind (when its agent is gone);
                                        # a spec.json beside an ENGINE.json says how to remove its container

Two processes share the work. The *keeper* is the parent and does almost nothing, so that almost nothing can go wrong
with it; the *worker* starts the engine in a session of its own, turns its log into events, probes it and stops it.
If the worker dies, the keeper ends every process of the engine and writes why; if the keeper dies, the worker does.
Both are subreapers, so no child of the engine escapes by losing its parent. A container's processes are no children:
the spec says how to find them (`pid_query`) and how to remove the container (`cleanup`), and both processes, and a
sweep, do so.

What it writes, all inside the deployment's folder: events (append-only, synced), a heartbeat, the engine's log. It
never reads an exit code of 0 as success: any exit nobody asked for is a failure. It never judges by a deadline, only
by a stall: no new log line that means progress, no processor time, no disk traffic for `stall_s`.

Standard library only, Python 3.8 or later, nothing of corral: the file is copied to where the engine runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

Json = Dict[str, Any]
# a restart would change nothing
FINAL_REASONS = ("requested", "walltime", "agent_killed", "not_guarded", "port_taken")
HALTED = "halted"  # a member's rank was taken down because the head said so: the head knows the reason
REJOIN_S = 300.0  # with restarts left, how long the nodes of a gang wait for one that was lost
MARKER = "CORRAL_LAUNCH"  # environment variable that every process of a launch carries
TICK_S = 0.2
HEARTBEAT_S = 2.0
STOPPED_S = 6.0  # a rank of several whose processes are all stopped for this long is hung
DRAIN_LOOK_S = 1.0
HEALTH_EVERY_S = 5.0
COMPLETION_EVERY_S = 60.0
MAX_LOG_BYTES = 64 << 20
CLEANUP_ATTEMPTS = 15

# ---------------------------------------------------------------------------------------------- the engine's words
# (pattern, phase or None, names of the groups as observed values)
PHASES = [
    (r"Unable to find image '|Trying to pull |Starting to build|Converting OCI blobs", "pulling image", ()),
    (r"Starting to load model", "loading", ()),
    (r"Loading \S+ checkpoint shards:\s+\d+% Completed \| (\d+)/(\d+)", "loading", ("done", "total")),
    (r"Time spent downloading weights", "loading", ()),
    (r"Loading weights took ([\d.]+) seconds", "loading", ("weights_read_s",)),
    (r"Model loading took ([\d.]+) GiB (?:memory )?and ([\d.]+) seconds", "loading", ("weights_gib", "load_s")),
    (r"(?:Using cache directory|Dynamo bytecode transform time|Compiling a graph|Start compil)", "compiling", ()),
    (r"Directly load the compiled graph|Directly load AOT compilation", "compiling", ()),
    (r"torch\.compile (?:takes|took) ([\d.]+) s", "compiling", ("compile_s",)),
    (r"Warming up model for the compilation", "compiling", ()),
    (r"Available KV cache memory: ([\d.]+) GiB", "warming", ("kv_gib",)),
    (
        r"KV cache size: ([\d,]+) tokens(?:, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x)?",
        "warming",
        ("kv_tokens", "context", "concurrency"),
    ),
    (r"Capturing CUDA graphs[^|]*?(\d+)%\|.*?\| (\d+)/(\d+)", "warming", ("percent", "done", "total")),
    (r"Graph capturing finished in ([\d.]+) secs, took ([\d.-]+) GiB", "warming", ("graph_s", "graph_gib")),
    (r"init engine \(.*?\) took ([\d.]+)", "warming", ("init_engine_s",)),
    (r"Starting vLLM (?:API )?server", "warming", ()),
    (r"Application startup complete", "warming", ()),
]
PATTERNS = [(re.compile(pattern), phase, names) for pattern, phase, names in PHASES]
PROGRESS_NAMES = ("done", "total", "percent")
# lines that an engine repeats while nothing happens: they are no sign of progress
WAITING = re.compile(
    r"No available shared memory broadcast block|Waiting for \d+ (?:local|remote)"
    r"|waiting for .*engine.*to (?:start|connect)|[Ss]till waiting",
)


def read_line(line: str) -> Optional[Tuple[Optional[str], Json]]:
    """What one line of the engine's log says: (phase, observed values), or None."""
    for pattern, phase, names in PATTERNS:
        match = pattern.search(line)
        if match:
            found = zip(names, match.groups())  # noqa: B905 - strict is newer than 3.8
            return phase, {name: _number(text) for name, text in found if text is not None}
    return None


def _number(text: str) -> Any:
    text = text.replace(",", "")
    return float(text) if "." in text else int(text)


# -------------------------------------------------------------------------------------------------------- processes
def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    _prctl(36, 1)


def prepare_engine() -> None:
    """In the engine's process, before it becomes the engine: end with us, and take signals as usual."""
    _prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def process_table() -> Dict[int, Tuple[int, int, int, str]]:
    """pid -> (parent, session, processor ticks used, state) of every process that can be seen."""
    table = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open("/proc/%s/stat" % name) as file:
                    fields = file.read().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                table[int(name)] = (int(fields[1]), int(fields[3]), ticks, fields[0])
    return table


def descendants(root: int) -> Set[int]:
    """All living processes below `root`."""
    table = process_table()
    children: Dict[int, List[int]] = {}
    for pid, (parent, _, _, state) in table.items():
        if state not in "ZX":
            children.setdefault(parent, []).append(pid)
    found: Set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def engine_sessions(engine_files: Sequence[str]) -> Set[int]:
    """Sessions that engines were started in; the kernel gives no number again while a session has it."""
    found = set()
    for path in engine_files:
        with contextlib.suppress(OSError, ValueError, KeyError), open(path) as file:
            engine = json.load(file)
            now = identity(engine["pid"])
            if engine["boot_id"] == now["boot_id"] and now["start_ticks"] in (0, engine["start_ticks"]):
                found.add(int(engine["pid"]))
    return found


def marked(launch_id: str, engine_files: Sequence[str] = ()) -> Set[int]:
    """Processes that belong to a launch, by environment or by session.

    Two signs, because one can be lost: vLLM's processes write their titles over their environment, and Ray's have
    sessions of their own.
    """
    wanted = ("%s=%s" % (MARKER, launch_id)).encode()
    table = process_table()
    found = set()
    for pid in table:
        with contextlib.suppress(OSError), open("/proc/%d/environ" % pid, "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.add(pid)
    sessions = {table[pid][1] for pid in found if pid in table} | engine_sessions(engine_files)
    sessions.discard(os.getsid(0))
    found |= {pid for pid, row in table.items() if row[1] in sessions}
    return {pid for pid in found if table.get(pid, (0, 0, 0, "X"))[3] not in "ZX"} - {os.getpid(), os.getppid()}


def send(pids: Set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def reap() -> None:
    """Collect ended children that were handed to us."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(find: Any, grace_s: float) -> None:
    """TERM, wait, KILL whatever `find()` returns, until it returns nothing."""
    deadline = time.monotonic() + grace_s
    send(find(), signal.SIGTERM)
    send(find(), signal.SIGCONT)  # a stopped process hears nothing until it goes on
    while find() and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)
    hard_deadline = time.monotonic() + 10
    while find() and time.monotonic() < hard_deadline:
        send(find(), signal.SIGKILL)
        reap()
        time.sleep(0.05)


def disk_bytes(pids: Set[int]) -> int:
    """Bytes the processes read and wrote so far."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open("/proc/%d/io" % pid) as file:
                values = dict(line.split(": ") for line in file.read().splitlines())
            # system calls, and what mapped files brought in behind their back
            total += sum(int(values[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return total


def listeners(host: str, port: int) -> Set[str]:
    """Inodes of the sockets that answer on this address and port: bound to it, or to every address."""
    try:
        own = socket.inet_aton(host)[::-1].hex().upper()  # as the kernel writes it
    except OSError:
        own = ""  # IPv6: any listener on the port counts
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/net/" + table) as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].rpartition(":")
                if (
                    fields[3] == "0A"
                    and int(number, 16) == port
                    and (not own or address in (own, "0" * len(address)))
                ):
                    found.add(fields[9])
    return found


def sockets_of(pids: Set[int]) -> Set[str]:
    """Inodes of all sockets that these processes hold."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/%d/fd" % pid):
                with contextlib.suppress(OSError):
                    link = os.readlink("/proc/%d/fd/%s" % (pid, name))
                    if link.startswith("socket:["):
                        found.add(link[8:-1])
    return found


def listener_users(port: int) -> Set[int]:
    """Users whose sockets listen on a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/net/" + table) as file:
            for fields in (line.split() for line in file.readlines()[1:]):
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(int(fields[7]))
    return found


def kernel_oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory since boot."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# ---------------------------------------------------------------------------------------------------------- journal
def private_tmp(launch_id: str) -> str:
    """A temporary folder of this launch alone; short, because a socket's path may have 107 bytes at most."""
    base = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    return os.path.join(base if len(base) < 40 else "/tmp", "corral-" + launch_id)  # noqa: S108


class Journal:
    """Appends events; one write and one sync each."""

    def __init__(self, path: str, rank: int) -> None:
        # opened once: when the folder is set aside for a new launch, late words stay with the old one
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._rank = rank
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.ended = False

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def write(self, kind: str, **details: Any) -> None:
        body = {"t": round(time.time(), 3), "kind": kind, "rank": self._rank, "elapsed_s": round(self.elapsed(), 3)}
        body.update(details)
        line = (json.dumps(body) + "\n").encode()
        try:
            with self._lock:
                end = os.lseek(self._descriptor, 0, os.SEEK_END)
                if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
                    line = b"\n" + line  # close a line that a crash tore
                os.write(self._descriptor, line)
                os.fsync(self._descriptor)
        except OSError:  # a full disk must not end a server that runs; only its states must be told
            if kind == "state":
                raise


def write_atomic(path: str, body: Json) -> None:
    temporary = "%s.%d.tmp" % (path, os.getpid())
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(body, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def identity(pid: int) -> Json:
    """The process as `corral` recognises it later: number, machine, boot, start."""
    boot, ticks = "", 0
    with contextlib.suppress(OSError, IndexError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        with open("/proc/%d/stat" % pid) as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    return {"pid": pid, "host": socket.gethostname(), "boot_id": boot, "start_ticks": ticks}


# -------------------------------------------------------------------------------------------------------- container
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


# ------------------------------------------------------------------------------------------------------- the server
class Server:
    """The engine's HTTP side, as seen from its own node."""

    def __init__(self, serve: Json) -> None:
        everywhere = serve["host"] in ("0.0.0.0", "::", "")  # noqa: S104
        self.host = "127.0.0.1" if everywhere else serve["host"]
        self.port, self.model, self.key_file = serve["port"], serve["model"], serve["key_file"]

    def call(
        self, method: str, path: str, body: Any = None, key: bool = True, timeout_s: float = 10
    ) -> Tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            if key:
                with open(self.key_file) as file:
                    headers["Authorization"] = "Bearer " + file.read().strip()
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def accepts(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), 1).close()
        except OSError:
            return False
        return True

    def complete(self, timeout_s: float) -> Tuple[int, str]:
        body = {"model": self.model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        return self.call("POST", "/v1/completions", body, timeout_s=timeout_s)

    def counters(self) -> Tuple[float, float]:
        """(requests running or waiting, a sum that moves while they do) from the engine's own metrics.

        Tokens are counted when a prompt is done; the share of the KV cache in use also moves within a long prompt.
        """
        status, text = self.call("GET", "/metrics")
        if status != 200:
            raise OSError("metrics answered %d" % status)
        names = {"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0}
        moving = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc")
        names.update(dict.fromkeys(moving, 1))
        sums = [0.0, 0.0]
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in names:
                sums[names[name]] += float(line.rpartition(" ")[2])
        return sums[0], sums[1]


class Probe(threading.Thread):
    """Asks the server, off the main loop: first until it is ready, then whether it still lives."""

    def __init__(self, server: Server, hung_s: float, container: Container, gang: Optional[Json] = None) -> None:
        super().__init__(daemon=True)
        self.server, self.hung_s, self.container = server, hung_s, container
        # over several nodes a rank can be gone while /health still says 200: idle ones are asked often
        self.answer_s = min(float(gang["patience_s"]), hung_s) if gang else hung_s
        self.look_every_s = min(HEALTH_EVERY_S, hung_s / 4, *([self.answer_s / 4] if gang else []))
        self.ask_every_s = self.answer_s / 2 if gang else COMPLETION_EVERY_S
        self.ready: Optional[Json] = None
        self.fault: Optional[Tuple[str, str]] = None  # (reason, text)
        self.stopping = threading.Event()
        self.refusals = 0  # completions in a row that the server could not answer

    def run(self) -> None:
        with contextlib.suppress(Exception):
            self._until_ready()
        while self.fault is None and not self.stopping.wait(self.look_every_s):
            self._watch()

    def _until_ready(self) -> None:
        while not self.stopping.wait(1.0 if self.refusals else 0.1):
            if not self.server.accepts():
                continue
            # vLLM binds early and listens late: another server may answer here in the meantime, and is not ours
            strange = listeners(self.server.host, self.server.port) - sockets_of(descendants(os.getpid()))
            if strange and not self.container.owns(strange, self.server.port):
                self.fault = ("port_taken", "another process took port %d first" % self.server.port)
                return
            try:
                if self.server.call("GET", "/health", key=False)[0] != 200:
                    continue
                if self.server.call("GET", "/v1/models", key=False)[0] not in (401, 403):
                    self.fault = ("not_guarded", "the server answers without a key")
                    return
                began = time.monotonic()
                status, text = self.server.complete(timeout_s=self.hung_s)
            except (OSError, http.client.HTTPException):
                continue
            if status == 200:
                self.ready = {"first_completion_s": round(time.monotonic() - began, 3)}
                self._moved, self._tokens, self._asked = time.monotonic(), -1.0, time.monotonic()
                return
            self.refusals += 1
            if status < 500 or self.refusals >= 20:
                self.fault = ("engine_exited", "the first completion was answered %d: %s" % (status, text[:300]))
                return

    def _watch(self) -> None:
        now = time.monotonic()
        try:
            if self.server.call("GET", "/health", key=False)[0] == 503:
                self.fault = ("engine_exited", "/health says that the engine behind the server is dead")
                return
            busy, tokens = self.server.counters()
            if tokens != self._tokens:
                self._tokens, self._moved = tokens, now
            elif not busy and now - self._asked >= self.ask_every_s:
                self._asked = now
                self._moved = now
                status, text = self._ask()
                self.refusals = self.refusals + 1 if status >= 500 else 0
                if self.refusals >= 3:
                    self.fault = ("engine_exited", "completions are answered %d: %s" % (status, text[:300]))
            elif not busy:
                self._moved = now
        except (OSError, http.client.HTTPException):
            pass
        if self.fault is None and time.monotonic() - self._moved > self.hung_s:
            self.fault = ("engine_hung", "no answer and no token for %d s" % self.hung_s)

    def _ask(self) -> Tuple[int, str]:
        """One token from an idle engine; silence is a fault, unless somebody else's long prompt came just before."""
        try:
            return self.server.complete(timeout_s=self.answer_s)
        except socket.timeout:
            busy, tokens = self.server.counters()
            if busy > 1 or tokens != self._tokens:
                self._moved = time.monotonic()
                return 200, ""
            text = "an idle engine did not answer a completion of one token within %d s" % self.answer_s
            self.fault = ("engine_hung", text)
            raise


# ----------------------------------------------------------------------------------------------------------- worker
def gang_module() -> Any:
    """The file that lies beside this one; an isolated interpreter does not look there by itself."""
    folder = os.path.dirname(os.path.abspath(__file__))
    path = next(p for p in (os.path.join(folder, n) for n in ("corral_gang.py", "gang.py")) if os.path.exists(p))
    found = importlib.util.spec_from_file_location("corral_gang", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Worker:
    """Runs the engine once or, with restarts, several times."""

    def __init__(self, spec: Json, journal: Journal) -> None:
        self.spec = spec
        self.journal = journal
        self.keeper = os.getppid()
        self.state = "starting"
        self.phase = "starting"
        self.log_offset = 0
        self.last_progress: Tuple[Any, ...] = ()
        self.container = Container(spec)
        self.progress: Json = {}
        self.head: Any = None  # of a gang, when this rank leads it
        self.follower: Any = None  # of a gang, when another does
        self.running = False
        self.epoch = 0  # of the gang's attempt that this member runs
        self.ended: Optional[Json] = None  # how this rank's last attempt ended
        self.activity_at = self.ended_at = time.monotonic()

    def run(self) -> int:
        gang = self.spec.get("gang")
        if gang and self.spec["rank"]:
            self.follower = gang_module().Follower(gang, self.spec["rank"], self._standing)
            return self._follow()
        if gang:
            try:
                self.head = gang_module().Head(gang, self._standing, self._beat_sometimes)
            except OSError as error:
                text = "the head cannot listen on %s:%s for the other nodes: %s" % (gang["head"], gang["port"], error)
                self._end("network", {"text": text})
                return 0
        return self._lead()

    def _lead(self) -> int:
        attempts = 1 + int(self.spec.get("restarts", 0))
        for attempt in range(1, attempts + 1):
            reason, details = self._gather(attempt) or self._run_once(attempt)
            if self.head:
                if reason == "engine_exited" and "failed_rank" not in details:
                    reason, details = self.head.root_cause(reason, details, self.ended_at)
                self.head.halt(self.spec["grace_s"] + 15)
            if attempt == attempts or reason in FINAL_REASONS:
                self._end(reason, details)
                return 0
            self.journal.write("restart", attempt=attempt, of=attempts - 1, reason=reason, **details)
            self._tell_state("starting", restarting=True)
            if not self._pause(min(30.0, 2.0 ** (attempt - 1))):
                self._end("requested" if self._stop_asked() else "agent_killed", {})
                return 0
        return 0

    def _gather(self, attempt: int) -> Optional[Tuple[str, Json]]:
        """Count the other nodes in, then let all start; what hinders, or None."""
        if not self.head:
            return None
        hindrance: Optional[Tuple[str, Json]] = self.head.gather(
            self._hindrance, *([REJOIN_S] if attempt > 1 else [])
        )
        if hindrance is None:
            self.head.run(attempt)
        return hindrance

    def _hindrance(self) -> str:
        """Why there is no point in waiting any longer; empty while there is."""
        self._beat_sometimes()
        if self._stop_asked():
            return "requested"
        return "agent_killed" if os.getppid() != self.keeper else ""

    def _follow(self) -> int:
        """A member's life: run when the head says so, stop when it says so or is lost."""
        epoch = 0
        while True:
            order = self.follower.order
            lost = self.follower.lost()
            if order.get("end"):
                self._end(order["end"], {"text": order.get("text", "")})
                return 0
            if self._stop_asked() or os.getppid() != self.keeper:
                reason = "requested" if self._stop_asked() else "agent_killed"
                self.ended = {"epoch": order.get("epoch", 0), "reason": reason, "text": "", "ago_s": 0}
                time.sleep(2.5)  # the head hears it
                self._end(reason, {})
                return 0
            if lost and not (epoch and self.spec.get("restarts") and self.follower.silent_s() < REJOIN_S):
                self._end("node_lost", {"text": lost, "node": self.follower.head_name})
                return 0
            if order.get("run") and not lost and order["epoch"] > epoch:
                self.epoch = epoch = order["epoch"]
                reason, details = self._run_once(epoch)
                if reason != HALTED:
                    text = details.get("text", "")
                    self.ended = {"epoch": epoch, "reason": reason, "text": text, "details": details}
                    self.journal.write("rank_ended", reason=reason, **details)
                self._tell_state("starting", waiting_for=self.follower.head_name)
            time.sleep(TICK_S)
            self._beat_sometimes()

    def _standing(self) -> Json:
        """How this rank stands, for the other agents of the gang."""
        now = time.monotonic()
        ended = dict(self.ended, ago_s=round(now - self.ended_at, 2)) if self.ended else None
        found = {"state": self.state, "phase": self.phase, "running": self.running, "ended": ended}
        found["quiet_s"] = round(now - self.activity_at, 1)
        found.update(self.progress)
        return found

    def _beat_sometimes(self) -> None:
        now = time.monotonic()
        if now - getattr(self, "_beaten", 0.0) >= HEARTBEAT_S:
            self._beaten = now
            self._beat()

    def _end(self, reason: str, details: Json) -> None:
        if self.head:
            self.head.end(reason, details)
        self._tell_state("stopped" if reason in ("requested", "walltime") else "failed", reason=reason, **details)
        self.journal.ended = True

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; false when it is not wanted any more."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._stop_asked() or os.getppid() != self.keeper:
                return False
            time.sleep(TICK_S)
            self._beat()
        return True

    def _stop_asked(self) -> bool:
        return os.path.exists(self.spec["stop_file"])

    def _run_once(self, attempt: int) -> Tuple[str, Json]:
        """Start the engine and stay with it to its end: (reason, details)."""
        self.log_offset = os.path.getsize(self.spec["log"]) if os.path.exists(self.spec["log"]) else 0
        self.log_from = self.log_offset
        self.oom_kills = kernel_oom_kills()
        self.container.forget()
        self.ended, self.running, self.activity_at = None, True, time.monotonic()
        try:
            self.engine = self._start()
        except OSError as error:
            self.running = False
            return "engine_broken", {"text": "the engine could not be started: %s" % error}
        with contextlib.suppress(OSError):
            write_atomic(self.spec["engine_file"], identity(self.engine.pid))
        self._tell_state("starting", attempt=attempt, pid=self.engine.pid)
        serve, gang = self.spec.get("serve"), self.spec.get("gang")
        self.probe = Probe(Server(serve), self.spec["hung_s"], self.container, gang) if serve else None
        if self.probe:
            self.probe.start()
        reason, details = self._watch()
        self.ended_at = time.monotonic()
        if self.probe:
            self.probe.stopping.set()
        if reason == "engine_exited":
            details.update(was_ready=self.state == "ready", log_from=self.log_from)
            if kernel_oom_kills() > self.oom_kills:  # within the last heartbeat
                details["kernel_oom_kill"] = True
        if self.state == "ready":
            self._tell_state("draining")  # not ready any more, and not yet gone
        # a container's client passes the signal on and stays until the container has ended
        end_all(self._own_processes if self.container else self._engine_processes, self.spec["grace_s"])
        self.container.remove()
        self.running = False
        self._read_log()
        return reason, details

    def _start(self) -> "subprocess.Popen[bytes]":
        env = {k: v for k, v in os.environ.items() if k not in self.spec.get("unset_env", [])}
        env.update(self.spec["env"])
        env[MARKER] = self.spec["launch_id"]
        env["TMPDIR"] = private_tmp(self.spec["launch_id"])
        os.makedirs(env["TMPDIR"], mode=0o700, exist_ok=True)
        log = os.open(self.spec["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            return subprocess.Popen(
                self.spec["argv"],
                env=env,
                cwd=self.spec["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare_engine,
            )
        finally:
            os.close(log)

    def _own_processes(self) -> Set[int]:
        found = descendants(os.getpid())
        if not found and self.engine.poll() is None:
            found = {self.engine.pid}
        return found

    def _engine_processes(self) -> Set[int]:
        return self._own_processes() | self.container.processes()

    def _watch(self) -> Tuple[str, Json]:
        beat = self.activity_at = time.monotonic()
        halted = 0
        last_ticks = last_bytes = 0
        checked = 0.0
        window = min(10.0, self.spec["stall_s"] / 4)
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if self._read_log():
                self.activity_at = now
            code = self.engine.poll()
            if code is not None:
                return self._exit_reason(code)
            if self._stop_asked():
                return "requested", {}
            if os.getppid() != self.keeper:
                return "agent_killed", {"text": "the agent's keeper process was killed"}
            others = self._others()
            if others:
                return others
            drained = self._drained(now)
            if drained:
                return drained
            if self.probe and self.probe.fault and self.state != "draining":
                return self.probe.fault[0], {"text": self.probe.fault[1]}
            if self.probe and self.probe.ready and self.state not in ("ready", "draining"):
                self._read_log()  # what the engine said before it answered, and no line later
                self._tell_state("ready", **self.probe.ready)
            if now - beat >= HEARTBEAT_S or not checked:
                beat = now
                self._beat()
                halted = halted + 1 if self.spec.get("gang") and self._processes_stopped() else 0
                if halted * HEARTBEAT_S >= STOPPED_S:
                    return "engine_hung", {"text": "its processes were stopped by a signal and do nothing"}
                if self.engine.poll() is None:
                    self.oom_kills = kernel_oom_kills()
                self._trim_log()
            if now - checked >= window:
                processes = self._engine_processes()
                table = process_table()
                ticks = sum(table[pid][2] for pid in processes if pid in table)
                moved = disk_bytes(processes)
                if ticks - last_ticks > 5 * window or moved - last_bytes > 1 << 20:  # 5% of a core, or 1 MiB
                    self.activity_at = now
                last_ticks, last_bytes, checked = ticks, moved, now
            served = self.state in ("ready", "draining")
            if not served and not self.follower and self._quiet_s(now) > self.spec["stall_s"]:
                text = "no log line, processor time or disk traffic for %d s while %s" % (
                    self.spec["stall_s"],
                    self.phase,
                )
                return "stalled", {"text": text}

    def _processes_stopped(self) -> bool:
        """Whether somebody stopped the whole rank: the others would wait for it."""
        table = process_table()
        states = [table[pid][3] for pid in self._engine_processes() if pid in table]
        return bool(states) and all(state in "Tt" for state in states)

    def _drained(self, now: float) -> Optional[Tuple[str, Json]]:
        """A drain, when one is asked for: over when no request runs any more, or when its time is up."""
        path = self.spec.get("drain_file")
        if not path or not os.path.exists(path):
            return None
        if self.state not in ("ready", "draining"):
            return "walltime", {"text": "the time limit was near before it was ready"}
        if self.state == "ready":
            seconds = 60.0
            with contextlib.suppress(OSError, ValueError), open(path) as file:
                seconds = float(file.read())
            self.drain_until, self.drain_look, self.idle_looks = now + seconds, now + 2 * DRAIN_LOOK_S, 0
            self._tell_state("draining", reason="walltime", text="the time limit is near: no new requests")
        if now >= self.drain_until:
            return "walltime", {"text": "the time limit came before all running requests had ended"}
        if now >= self.drain_look:
            self.drain_look = now + DRAIN_LOOK_S
            with contextlib.suppress(OSError, http.client.HTTPException):
                busy = self.probe.server.counters()[0] if self.probe else 0
                self.idle_looks = 0 if busy else self.idle_looks + 1
        if self.idle_looks >= 2:
            return "walltime", {"text": "the time limit was near; all running requests had ended"}
        return None

    def _quiet_s(self, now: float) -> float:
        """Seconds since anything moved on this node or, in a gang, on any."""
        own = now - self.activity_at
        return min(own, self.head.quiet_s()) if self.head else own

    def _others(self) -> Optional[Tuple[str, Json]]:
        """What the rest of the gang means for this rank, if it must end."""
        if self.head:
            found: Optional[Tuple[str, Json]] = self.head.fault()
            return found
        if self.follower:
            order = self.follower.order
            lost = self.follower.lost()
            if lost:
                return "node_lost", {"text": lost, "node": self.follower.head_name}
            if order and (order.get("end") or not order.get("run") or order["epoch"] != self.epoch):
                return HALTED, {}
            if self.state != "ready" and order.get("head", {}).get("state") == "ready":
                self._tell_state("ready")
        return None

    def _exit_reason(self, code: int) -> Tuple[str, Json]:
        if self._stop_asked():
            return "requested", {}
        if self.container and 128 < code <= 128 + 64:
            code = 128 - code  # a container's client tells a signal this way
        details: Json = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
        how = "with code %d" % code if code >= 0 else "by signal %d (%s)" % (-code, signal_name(-code))
        what = "the engine"
        if self.container:
            what, details["container"] = "the engine's container", True
        details["text"] = "%s ended %s while %s, and nobody asked it to" % (what, how, self.phase)
        return "engine_exited", details

    def _tell_state(self, state: str, **details: Any) -> None:
        self.state = state
        if state in ("starting", "loading", "ready"):
            self.phase = state
        self.journal.write("state", state=state, **details)
        self._beat()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            write_atomic(self.spec["heartbeat"], {"t": time.time(), "state": self.state, "phase": self.phase})

    def _trim_log(self) -> None:
        """Keep the log bounded: the engine appends, so cutting it short is safe."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self.spec["log"]) > MAX_LOG_BYTES:
                shutil.copyfile(self.spec["log"], self.spec["log"] + ".1")
                os.chmod(self.spec["log"] + ".1", 0o600)
                os.truncate(self.spec["log"], 0)
                self.log_offset = 0

    def _new_lines(self) -> Iterator[str]:
        with contextlib.suppress(OSError):
            with open(self.spec["log"], "rb") as file:
                file.seek(self.log_offset)
                data = file.read(1 << 20)
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if not whole and len(data) == 1 << 20:
                whole = len(data)  # one endless line
            self.log_offset += whole
            for line in re.split(rb"[\r\n]+", data[:whole]):
                if line:
                    yield line.decode("utf-8", "replace")

    def _read_log(self) -> bool:
        """Turn new log lines into events; whether any of them means progress."""
        progress = False
        for line in self._new_lines():
            progress = progress or not WAITING.search(line)
            if self.state == "ready":
                continue
            found = read_line(line)
            if found:
                self._note(*found)
        return progress

    def _note(self, phase: Optional[str], values: Json) -> None:
        if phase == "loading" and self.state == "starting":
            self._tell_state("loading")
        progress = {name: values.pop(name) for name in PROGRESS_NAMES if name in values}
        key = (phase, *progress.values())
        if phase and (phase != self.phase or progress) and key != self.last_progress:
            self.last_progress = key
            self.phase = phase
            self.progress = progress
            self.journal.write("phase", phase=phase, **progress)
        if values:
            self.journal.write("observed", **values)


# ----------------------------------------------------------------------------------------------------------- keeper
def keep(spec_path: str) -> int:
    """Start the worker, stay until it ends, and clean up after it whatever happened."""
    with open(spec_path) as file:
        spec = json.load(file)
    become_subreaper()
    journal = Journal(spec["events"], spec["rank"])
    write_atomic(spec["agent_file"], identity(os.getpid()))
    # a stop is a file, so that it can also be asked for over a shared file system, and survives a lost signal
    signal.signal(signal.SIGTERM, lambda *_: open(spec["stop_file"], "w").close())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    worker = os.fork()
    if worker == 0:
        code = 1
        try:
            os.setsid()
            become_subreaper()
            code = Worker(spec, journal).run()
        except BaseException as error:  # the last door: whatever it is must reach the journal
            if not journal.ended:
                with contextlib.suppress(OSError):
                    text = "the agent failed: %r" % error
                    journal.write("state", state="failed", reason="agent_killed", text=text)
        finally:
            end_all(lambda: descendants(os.getpid()), 5.0)
            shutil.rmtree(private_tmp(spec["launch_id"]), ignore_errors=True)
            os._exit(code)
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
    if os.WIFSIGNALED(status):
        text = "the agent was killed by signal %d; the engine was taken down" % os.WTERMSIG(status)
        journal.write("state", state="failed", reason="agent_killed", text=text)
        return 1
    return os.WEXITSTATUS(status)


def containers_of(launch_id: str, engine_files: Sequence[str]) -> List[Container]:
    """The containers of a launch, as the specs beside these files tell."""
    found = []
    for path in engine_files:
        with contextlib.suppress(OSError, ValueError), open(os.path.join(os.path.dirname(path), "spec.json")) as file:
            spec = json.load(file)
            if spec.get("launch_id") == launch_id and spec.get("cleanup"):
                found.append(Container(spec))
    return found


def main(argv: List[str]) -> int:
    if len(argv) == 2 and argv[0] == "run":
        return keep(argv[1])
    if len(argv) >= 2 and argv[0] == "sweep":
        containers = containers_of(argv[1], argv[2:])
        end_all(lambda: marked(argv[1], argv[2:]), 5.0)
        for container in containers:
            container.remove()
        left = marked(argv[1], argv[2:])
        containers_left = [container.id for container in containers if container.is_left()]
        shutil.rmtree(private_tmp(argv[1]), ignore_errors=True)
        sys.stdout.write(json.dumps({"left": sorted(left), "containers": containers_left}) + "\n")
        return 1 if left or containers_left else 0
    sys.stderr.write(__doc__ or "")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

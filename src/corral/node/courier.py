"""The courier: carries a folder to this node, and hands it on to others while it still arrives.

    python3 courier.py serve          # lists and hashes a folder, serves its files to other couriers
    python3 courier.py fetch          # brings files into a folder, and serves those it has, whole or growing
    python3 courier.py manifest       # names, sizes and hashes of a folder
    python3 courier.py verify         # which files of a manifest are missing or damaged in a folder
    python3 courier.py hub            # the files of a hub repository, with the hashes the hub promises
    python3 courier.py read-speed     # how fast this folder's storage reads

Every order comes as one line of JSON on standard input, and so do tokens: nothing secret is ever an argument. Every
answer is one line of JSON on standard output. `serve` and `fetch` go on reading lines (see `Fetch.obey`) and end when
their input does, when told to, or after `idle_s` without any traffic: they cannot outlive the connection that wanted
them. Between nodes it is plain HTTP with a bearer token per courier.

What makes a chain of nodes as fast as one copy: a request for a file that is still arriving is answered with the
bytes that are there, and the rest follows as it comes. What makes it safe: a file gets its name only after its hash
was right, whoever it came from; until then it is a `.corral-part` file, which a later run continues.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node over ssh.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import fnmatch
import functools
import hashlib
import hmac
import http.client
import http.server
import json
import os
import queue
import re
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

Json = Dict[str, Any]
SMALL_BYTES = 1 << 20  # smaller files travel many to a request, and only when whole
PACK_BYTES = 8 << 20
PACK_FILES = 500
BLOCK_BYTES = 256 << 10
CONNECTIONS = 4
ATTEMPTS = 4  # per file, after a wrong hash
SILENCE_S = 20.0  # a source that sends nothing for this long is left for another
REST_S = 1.0  # before a source that failed is asked again
HASHES_FILE = ".corral-hashes.json"
OWN_FILES = (".corral-*", ".*.corral-part")


class TroubleError(Exception):
    """One sentence for the user."""


# ------------------------------------------------------------------------------------------------ talking
_out_lock = threading.Lock()


def tell(event: str, **fields: Any) -> None:
    with _out_lock:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def read_line(stream: IO[bytes]) -> Optional[Json]:
    line = stream.readline()
    return json.loads(line) if line.endswith(b"\n") else None


class Pace:
    """Calls `say` with the numbers at most twice a second, from whichever thread."""

    def __init__(self, say: Callable[[int, int], None], total: int) -> None:
        self.say, self.total, self.done, self.told_s = say, total, 0, 0.0
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if time.monotonic() - self.told_s < 0.5:
                return
            self.told_s = time.monotonic()
        self.say(self.done, self.total)


# ------------------------------------------------------------------------------------------------ folders
def listing(folder: str, leave_out: Sequence[str], links_out: str) -> List[Json]:
    """Files, links and empty folders below `folder`, by name. Links that stay inside are kept as links; those that
    lead out are followed (a hub cache's) or kept (an environment's), as `links_out` says."""
    root = os.path.realpath(folder)
    rows: List[Json] = []

    def visit(here: str, below: str, depth: int) -> None:
        if depth > 64:
            raise TroubleError(f"{here} is nested too deeply: do its links form a circle?")
        entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        if not entries and below:
            rows.append({"path": below, "kind": "folder", "size": 0, "mode": os.stat(here).st_mode & 0o777})
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            patterns = (*OWN_FILES, *leave_out)
            if any(fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(entry.name, pattern) for pattern in patterns):
                continue
            if entry.is_symlink() and (links_out == "keep" or stays_inside(root, entry.path)):
                rows.append({"path": path, "kind": "link", "size": 0, "target": os.readlink(entry.path)})
            elif entry.is_dir():
                visit(entry.path, path, depth + 1)
            elif entry.is_file():
                found = entry.stat()
                rows.append({"path": path, "kind": "file", "size": found.st_size, "mode": found.st_mode & 0o777,
                             "mtime_ns": found.st_mtime_ns})  # fmt: skip
            elif entry.is_symlink():
                raise TroubleError(f"{entry.path} is a link to nothing.")

    visit(root, "", 0)
    return rows


def stays_inside(root: str, link: str) -> bool:
    if os.path.isabs(os.readlink(link)):
        return False
    return (os.path.realpath(link) + "/").startswith(root + "/")


def inside(folder: str, path: str) -> str:
    """Where a manifest's path lies in the folder; refuses one that would lead out of it."""
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise TroubleError(f"{path!r} is not a path inside a folder.")
    place = os.path.join(folder, path)
    if not is_within(folder, os.path.dirname(place)):
        raise TroubleError(f"{path!r} leads out of {folder} by a link.")
    return place


@functools.lru_cache(maxsize=None)
def is_within(folder: str, parent: str) -> bool:
    """Whether no link leads from one to the other; remembered, for environments of tens of thousands of files."""
    return (os.path.realpath(parent) + "/").startswith(os.path.realpath(folder) + "/")


class Hashes:
    """Known hashes of a folder's files, valid while a file's size, times and inode are what they were."""

    def __init__(self, folder: str, own: bool) -> None:
        self.place = os.path.join(folder, HASHES_FILE)  # travels with the data, also to other nodes that see it
        if not own and not os.path.exists(self.place):
            cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            name = f"{socket.gethostname()}:{os.path.realpath(folder)}"
            self.place = os.path.join(cache, "corral", "hashes", hashlib.sha1(name.encode()).hexdigest() + ".json")  # noqa: S324
        self.lock = threading.Lock()
        try:
            with open(self.place, encoding="utf-8") as file:
                self.known: Dict[str, List[Any]] = json.load(file)
        except (OSError, ValueError):
            self.known = {}

    def get(self, path: str, place: str) -> Optional[str]:
        found = self.known.get(path)
        return str(found[0]) if found and found[1:] == self.key(place) else None

    def put(self, path: str, place: str, sha256: str) -> None:
        with self.lock:
            self.known[path] = [sha256, *self.key(place)]

    @staticmethod
    def key(place: str) -> List[int]:
        found = os.stat(place)
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]

    def save(self) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is hashed again next time
            os.makedirs(os.path.dirname(self.place), exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".corral-hashes.", dir=os.path.dirname(self.place))
            with os.fdopen(handle, "w", encoding="utf-8") as file, self.lock:
                json.dump(self.known, file)
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.place)


def sha256_of(place: str, on_bytes: Callable[[int], None]) -> str:
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    with open(place, "rb", buffering=0) as file:
        while True:
            count = file.readinto(buffer)
            if not count:
                return digest.hexdigest()
            digest.update(memoryview(buffer)[:count])
            on_bytes(count)


def git_sha1_of(place: str) -> str:
    with open(place, "rb") as file:
        return git_sha1(file.read())


def git_sha1(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()  # noqa: S324


def promised_hash(place: str) -> Optional[str]:
    """A hub cache names large files by their hash."""
    if not os.path.islink(place):
        return None
    real = os.path.realpath(place)
    name = os.path.basename(real)
    named = os.path.basename(os.path.dirname(real)) == "blobs" and re.fullmatch("[0-9a-f]{64}", name)
    return name if named else None


def hash_files(folder: str, rows: Sequence[Json], how: str, hashes: Hashes) -> None:
    """Put `sha256` into the rows. `known`: only what is known already; `all`: hash the rest; `again`: hash all."""
    todo = []
    for row in rows:
        if row["kind"] != "file":
            continue
        place = os.path.join(folder, row["path"])
        found = None if how == "again" else hashes.get(row["path"], place) or promised_hash(place)
        if found:
            row["sha256"] = found
        elif how != "known":
            todo.append(row)
    pace = Pace(lambda done, total: tell("hashing", done=done, total=total), sum(row["size"] for row in todo))

    def work(row: Json) -> None:
        place = os.path.join(folder, row["path"])
        row["sha256"] = sha256_of(place, pace.add)
        hashes.put(row["path"], place, row["sha256"])

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(work, todo))
    if todo:
        hashes.save()


# ------------------------------------------------------------------------------------------------ files that arrive
class Item:
    """One file of the manifest as it is here: how many of its bytes, and where."""

    def __init__(self, number: int, row: Json, folder: str) -> None:
        self.number, self.path, self.size = number, str(row["path"]), int(row["size"])
        self.kind, self.mode = str(row["kind"]), int(row.get("mode", 0o644))
        self.mtime_ns: Optional[int] = row.get("mtime_ns")
        self.target = str(row.get("target", ""))
        self.sha256, self.git_sha1 = row.get("sha256"), row.get("git_sha1")
        self.place = inside(folder, self.path)
        self.at = self.place  # where the bytes are now
        self.have, self.done, self.generation, self.damaged = 0, False, 0, 0
        self.claimed = False

    @property
    def part(self) -> str:
        name = hashlib.sha1(f"{self.size}:{self.sha256 or self.git_sha1}".encode()).hexdigest()[:8]  # noqa: S324
        return os.path.join(os.path.dirname(self.place), f".{os.path.basename(self.place)}.{name}.corral-part")

    def fits(self, digest: "Digest") -> bool:
        if self.sha256:
            return hmac.compare_digest(digest.sha256.hexdigest(), self.sha256)
        return hmac.compare_digest(digest.git.hexdigest(), str(self.git_sha1))


class Digest:
    """The hash a file is judged by, grown block by block."""

    def __init__(self, item: Item) -> None:
        self.sha256 = hashlib.sha256()
        self.git = hashlib.sha1(b"blob %d\0" % item.size)  # noqa: S324
        self.both = not item.sha256

    def update(self, block: Any) -> None:
        self.sha256.update(block)
        if self.both:
            self.git.update(block)


class Depot:
    """The items of one folder and everybody who waits for their bytes."""

    def __init__(self, items: List[Item], uplink_bytes_per_s: float = 0) -> None:
        self.items = items
        self.changed = threading.Condition()
        self.uplink, self.free_at_s = uplink_bytes_per_s, 0.0
        self.sent_bytes, self.active_s = 0, time.monotonic()

    def grow(self, item: Item, have: int, done: bool = False) -> None:
        with self.changed:
            item.have, item.done = have, done
            item.at = item.place if done else item.part
            self.active_s = time.monotonic()
            self.changed.notify_all()

    def reset(self, item: Item) -> None:
        with self.changed:
            item.have, item.generation = 0, item.generation + 1
            self.changed.notify_all()

    def open(self, item: Item, offset: int, timeout_s: float) -> Tuple[IO[bytes], int]:
        """The file, once it has bytes after `offset`, and which attempt at it this is."""
        with self.changed:
            ready = self.changed.wait_for(lambda: item.done or item.have > offset, timeout_s)
            if not ready:
                raise TimeoutError(item.path)
            return open(item.at, "rb", buffering=0), item.generation

    def available(self, item: Item, offset: int, generation: int, timeout_s: float) -> int:
        with self.changed:
            self.changed.wait_for(lambda: item.done or item.have > offset or item.generation != generation, timeout_s)
            if item.generation != generation:
                raise ConnectionError(f"{item.path} is fetched anew")
            return item.size if item.done else item.have

    def send(self, sock: socket.socket, item: Item, offset: int, end: int, timeout_s: float) -> None:
        if offset >= end:
            return
        file, generation = self.open(item, offset, timeout_s)
        with file:
            while offset < end:
                until = min(end, self.available(item, offset, generation, timeout_s))
                if until <= offset:
                    raise TimeoutError(item.path)
                count = sock.sendfile(file, offset, self.portion(until - offset))
                if not count:
                    raise ConnectionError(f"{item.path} is shorter than it was")
                offset += count
                self.sent_bytes += count
                self.active_s = time.monotonic()

    def portion(self, wanted: int) -> int:
        """How much may go out now: everything, unless the uplink is limited."""
        if not self.uplink:
            return min(wanted, 16 << 20)
        count = min(wanted, max(16 << 10, int(self.uplink / 50)))
        with self.changed:
            start_s = max(time.monotonic(), self.free_at_s)
            self.free_at_s = start_s + count / self.uplink
        time.sleep(max(0.0, start_s - time.monotonic()))
        return count


# ------------------------------------------------------------------------------------------------ serving
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    depot: Depot
    token: str

    def allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self.token}".encode()):
            return True
        self.refuse(401)
        return False

    def refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def do_GET(self) -> None:
        """`/files/NUMBER`, with `Range: bytes=FROM-` or `FROM-TO`."""
        if not self.allowed():
            return None
        matched = re.fullmatch(r"/files/(\d{1,9})", self.path)
        if not matched or int(matched.group(1)) >= len(self.depot.items):
            return self.refuse(404)
        item = self.depot.items[int(matched.group(1))]
        start, end = 0, item.size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            start, end = int(wanted.group(1)), min(item.size, int(wanted.group(2) or item.size) + 1)
        if item.kind != "file" or start > end or (wanted and start >= item.size):
            return self.refuse(416 if wanted else 404)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{item.size}")
        return self.body([(item, start, end)])

    def do_POST(self) -> None:
        """`/pack` with a list of numbers: those files, one after the other."""
        if not self.allowed():
            return None
        try:
            numbers = json.loads(self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 1 << 20)))
            items = [self.depot.items[int(number)] for number in numbers if int(number) >= 0]
        except (ValueError, TypeError, IndexError):
            return self.refuse(400)
        if self.path != "/pack" or any(item.kind != "file" for item in items):
            return self.refuse(404)
        self.send_response(200)
        return self.body([(item, 0, item.size) for item in items])

    def body(self, spans: List[Tuple[Item, int, int]]) -> None:
        self.send_header("Content-Length", str(sum(end - start for _, start, end in spans)))
        self.end_headers()
        self.wfile.flush()
        try:
            for item, start, end in spans:
                self.depot.send(self.connection, item, start, end, 600)
        except OSError:  # the receiver left, or what was promised did not come: it will ask again
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, depot: Depot, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), type("Bound", (Handler,), {"depot": depot, "token": token}))

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def start_server(address: str, depot: Depot, token: str) -> Json:
    """Where others reach this courier."""
    address = address or own_address()
    try:
        server = Server(address, depot, token)
    except OSError:  # the others' name for this node is not an address of its own (NAT)
        server = Server("0.0.0.0", depot, token)  # noqa: S104
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"address": address, "port": int(server.server_address[1])}


def own_address() -> str:
    """The address by which ssh came here, or the one this node would send from."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4:
        return words[2]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def end_when_idle(depot: Depot, idle_s: float) -> None:
    def watch() -> None:
        while time.monotonic() - depot.active_s < idle_s:
            time.sleep(min(1.0, idle_s / 4))
        os._exit(75)

    threading.Thread(target=watch, daemon=True).start()


class Nonce:
    """A file by which other nodes can tell whether they see the same storage."""

    def __init__(self, folder: str, name: str) -> None:
        self.place = nonce_place(folder, name)
        self.written = False
        with contextlib.suppress(OSError):
            for old in os.scandir(folder):  # of a courier that was killed
                if old.name.startswith(".corral-nonce-") and time.time() - old.stat().st_mtime > 86400:
                    os.unlink(old.path)
        with contextlib.suppress(OSError):
            os.close(os.open(self.place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            self.written = True

    def remove(self) -> None:
        if self.written:
            with contextlib.suppress(OSError):
                os.unlink(self.place)


def seen(folder: str, names: Sequence[str]) -> List[str]:
    # one look per fresh name, not a listing: network file systems remember listings
    return [name for name in names if os.path.exists(nonce_place(folder, name))]


def nonce_place(folder: str, name: str) -> str:
    return os.path.join(folder, f".corral-nonce-{name}")


def serve(order: Json, stdin: IO[bytes]) -> None:
    folder = os.path.expanduser(order["folder"])
    if not os.path.isdir(folder):
        raise TroubleError(f"there is no folder {folder}.")
    nonce = Nonce(folder, order["nonce"]) if order.get("nonce") else None
    try:
        rows = listing(folder, order.get("leave_out", ()), order.get("links_out", "follow"))
        hashes = Hashes(folder, own=False)
        hash_files(folder, rows, order.get("hash", "known"), hashes)
        items = [Item(number, row, folder) for number, row in enumerate(rows)]
        depot = Depot(items, order.get("uplink_bytes_per_s", 0))
        for item in items:
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
    finally:
        if nonce:
            nonce.remove()


# ------------------------------------------------------------------------------------------------ fetching
class Source:
    """Somebody who has files: another courier, or a hub."""

    def __init__(self, row: Json) -> None:
        self.name, self.url, self.token = str(row["name"]), str(row["url"]).rstrip("/"), row.get("token")
        self.kind = str(row.get("kind", "courier"))
        self.rest_until_s = 0.0
        self.said = ""

    def open(self, items: List[Item], offset: int) -> Tuple[Any, Callable[[], None]]:
        """A response whose body is the items, one after the other, the first from `offset`."""
        if self.kind == "hub":
            return self.open_hub(items[0], offset)
        place = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=SILENCE_S)
        headers = {"Authorization": f"Bearer {self.token}"}
        if len(items) > 1:
            body = json.dumps([item.number for item in items]).encode()
            connection.request("POST", "/pack", body, headers)
        else:
            if offset:
                headers["Range"] = f"bytes={offset}-"
            connection.request("GET", f"/files/{items[0].number}", None, headers)
        response = connection.getresponse()
        if response.status != (206 if offset else 200):
            connection.close()
            raise ConnectionError(f"answered {response.status}")
        return response, connection.close

    def open_hub(self, item: Item, offset: int) -> Tuple[Any, Callable[[], None]]:
        response = open_url(f"{self.url}/{urllib.parse.quote(item.path)}", self.token, offset)
        if offset and response.status != 206:
            response.close()
            raise ConnectionError("does not continue a file")
        return response, response.close


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a hub to its storage, and takes the token along only within one host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        same = urllib.parse.urlsplit(newurl)[:2] == urllib.parse.urlsplit(req.full_url)[:2]
        if new is not None and same and req.get_header("Authorization"):
            new.add_unredirected_header("Authorization", req.get_header("Authorization"))
        return new


def open_url(url: str, token: Optional[str], offset: int = 0) -> Any:
    request = urllib.request.Request(url)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    return urllib.request.build_opener(Redirects).open(request, timeout=SILENCE_S)


@contextlib.contextmanager
def as_connection_errors() -> Iterator[None]:
    """Whatever a network can do, apart from what a disk can do."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConnectionError(str(reason) or type(error).__name__) from error


class Fetch:
    """Brings the items of a manifest into a folder, from whichever source delivers."""

    def __init__(self, order: Json) -> None:
        self.folder = os.path.expanduser(order["folder"])
        self.depot = Depot([], order.get("uplink_bytes_per_s", 0))
        self.stall_s = float(order.get("stall_s", 120))
        self.sources: List[Source] = []
        self.units: "queue.Queue[List[Item]]" = queue.Queue()
        self.alive_s = time.monotonic()  # when anybody last delivered or promised anything
        self.starved = False
        self.began_s = 0.0
        self.arrived_bytes = 0
        self.failed = threading.Event()
        self.lock_handle = -1
        self.missing: List[Item] = []
        is_within.cache_clear()
        self.digests: Dict[int, Digest] = {}
        self.hashes = Hashes(self.folder, own=bool(order.get("own", True)))

    # -- what is asked of it
    def obey(self, stdin: IO[bytes]) -> None:
        """Lines until the end: look, compare, go, sources, held, data (with bytes behind it), end."""
        while True:
            message = read_line(stdin)
            if message is None or message["do"] == "end":
                return
            self.depot.active_s = time.monotonic()
            if message["do"] == "look":
                tell("seen", names=seen(self.folder, message["names"]))
            elif message["do"] == "compare":
                self.compare(message["files"], message["check"])
            elif message["do"] == "go":
                self.go(message)
            elif message["do"] == "sources":
                self.set_sources(message["sources"])
            elif message["do"] == "held":
                tell("held", held=self.held())
            elif message["do"] == "data":
                self.take(self.depot.items[message["file"]], message["offset"], stdin, message["length"])

    def compare(self, rows: List[Json], check: str) -> None:
        """Which files are not here, or not as they should be; a part that is here counts."""
        items = [Item(number, row, self.folder) for number, row in enumerate(rows)]
        self.depot.items[:] = items
        pace = Pace(lambda done, total: tell("checking", done=done, total=total), sum(item.size for item in items))
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            good = list(pool.map(lambda item: self.is_here(item, check, pace), items))
        ours = os.path.exists(os.path.join(self.folder, HASHES_FILE))
        damaged = [item.path for item, here in zip(items, good) if here is None]  # noqa: B905
        for item, here in zip(items, good):  # noqa: B905
            if here:
                self.depot.grow(item, item.size, done=True)
        self.missing = [item for item in items if not item.done]
        for item in self.missing:
            self.find_part(item)
        foreign = "config.json" in damaged and not ours  # another model's folder: not ours to overwrite
        if check != "sizes" and not foreign:
            self.hashes.save()
        needed = sum(item.size - item.have for item in self.missing)
        tell("need", bytes=needed, held=self.held(), damaged=damaged, foreign=foreign,
             free_bytes=free_bytes(self.folder),
             have_bytes=sum(item.have for item in items), files=len(self.missing),
             unknown=[item.number for item in self.missing
                      if item.kind == "file" and not (item.sha256 or item.git_sha1)])  # fmt: skip

    def find_part(self, item: Item) -> None:
        if item.size >= SMALL_BYTES and not item.done and os.path.exists(item.part):
            self.depot.grow(item, min(item.size, os.path.getsize(item.part)))

    def is_here(self, item: Item, check: str, pace: Pace) -> Optional[bool]:
        """True: as it should be. False: not there. None: there, but damaged."""
        if item.kind == "link":
            return os.path.islink(item.place) and os.readlink(item.place) == item.target
        if item.kind == "folder":
            return os.path.isdir(item.place)
        if not os.path.isfile(item.place):
            return False
        if os.path.getsize(item.place) != item.size:
            return None
        if check == "sizes" or not (item.sha256 or item.git_sha1):
            return True
        if not item.sha256:
            return True if git_sha1_of(item.place) == item.git_sha1 else None
        found = None if check == "again" else self.hashes.get(item.path, item.place)
        if found is None and check == "known":
            return True
        if found is None:
            found = sha256_of(item.place, pace.add)
            self.hashes.put(item.path, item.place, found)
        return True if found == item.sha256 else None

    def held(self) -> List[List[int]]:
        return [[item.number, item.have] for item in self.missing if not item.done]

    def set_sources(self, rows: List[Json]) -> None:
        with self.depot.changed:
            self.sources = [Source(row) for row in rows]
            self.alive_s = time.monotonic()
            self.depot.changed.notify_all()

    def go(self, message: Json) -> None:
        for number, sha256 in message.get("hashes", {}).items():
            item = self.depot.items[int(number)]
            item.sha256 = sha256
            self.find_part(item)
        self.lock_folder()
        self.began_s = time.monotonic()
        self.set_sources(message["sources"])
        for item in self.missing:
            if item.kind == "link":
                self.make(item)
        is_within.cache_clear()  # those links may lead out
        for item in self.missing:
            if item.kind != "link" and item.size == 0:
                self.make(item)
        for unit in units([item for item in self.missing if not item.done]):
            self.units.put(unit)
        for _ in range(CONNECTIONS):
            threading.Thread(target=self.work, daemon=True).start()
        threading.Thread(target=self.watch, daemon=True).start()

    def lock_folder(self) -> None:
        """Two couriers must not write into one folder; the lock goes when the process does."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TroubleError(f"another pull is writing into {self.folder}.") from None
        except OSError:
            pass  # a file system without locks for folders
        self.lock_handle = handle

    # -- the work
    def watch(self) -> None:
        """Tells how far it is until everything is there, or nobody delivers any more."""
        pace = Pace(lambda done, total: tell("progress", done=done, total=total), 0)
        pace.total = sum(item.size for item in self.depot.items)
        while not self.failed.is_set():
            with self.depot.changed:
                finished = all(item.done for item in self.missing)
                if not finished:
                    self.depot.changed.wait(0.25)
                done = sum(item.size if item.done else item.have for item in self.depot.items)
            if finished:
                self.finish()
                return
            pace.add(done - pace.done)
            quiet_s = time.monotonic() - self.alive_s
            if quiet_s > min(3.0, self.stall_s / 4) and not self.starved:
                self.starved = True
                tell("starved")
            if quiet_s > self.stall_s:
                said = "; ".join(f"{source.name}: {source.said or 'silent'}" for source in self.sources)
                self.fail(f"nobody delivered for {self.stall_s:g} s ({said or 'no source is left'}).")
            time.sleep(0.1)

    def finish(self) -> None:
        if any(item.size < SMALL_BYTES for item in self.missing):
            sync_file_system(self.folder)
        self.hashes.save()
        tell("done", bytes=self.arrived_bytes, seconds=time.monotonic() - self.began_s)

    def fail(self, text: str) -> None:
        if not self.failed.is_set():
            self.failed.set()
            tell("failed", text=text)

    def work(self) -> None:
        while not self.failed.is_set():
            try:
                unit = self.units.get_nowait()
            except queue.Empty:
                return
            try:
                self.bring(unit)
            except TroubleError as trouble:
                self.fail(str(trouble))
            except OSError as error:
                self.fail(f"{self.folder} cannot be written to: {error.strerror or error}.")

    def bring(self, unit: List[Item]) -> None:
        while not self.failed.is_set():
            rest = [item for item in unit if not item.done]
            if not rest:
                return
            source = self.pick(rest[0])
            if source is None:
                continue
            with self.claim(rest) as mine:
                if not mine:
                    time.sleep(0.05)
                    continue
                try:
                    self.receive(source, rest if source.kind == "courier" else rest[:1])
                except ConnectionError as error:
                    source.rest_until_s = time.monotonic() + REST_S
                    source.said = str(error)

    @contextlib.contextmanager
    def claim(self, items: List[Item]) -> Iterator[bool]:
        with self.depot.changed:
            free = not any(item.claimed or item.done for item in items)
            for item in items if free else []:
                item.claimed = True
        try:
            yield free
        finally:
            with self.depot.changed:
                for item in items if free else []:
                    item.claimed = False

    def pick(self, item: Item) -> Optional[Source]:
        """The best source that is not resting; after a damaged copy, the next one. None after a short wait."""
        now_s = time.monotonic()
        with self.depot.changed:
            awake = [source for source in self.sources if source.rest_until_s <= now_s]
            if awake:
                return awake[item.damaged % len(awake)]
            self.depot.changed.wait(0.1)
        return None

    def receive(self, source: Source, items: List[Item]) -> None:
        single = items[0] if len(items) == 1 and items[0].size >= SMALL_BYTES else None
        if single is not None:
            self.resume(single)
            if single.have == single.size:  # the part was whole, only not yet judged
                return self.stream(single, None, "an earlier run")
        with as_connection_errors():
            response, close = source.open(items, single.have if single is not None else 0)
        try:
            self.alive_s = time.monotonic()
            for item in items:
                if single is not None:
                    self.stream(item, response, source.name)
                else:
                    with as_connection_errors():
                        body = read_exactly(response, item.size)
                    self.heard()
                    self.keep_small(item, body, source.name)
        finally:
            close()
        return None

    def heard(self) -> None:
        self.alive_s, self.starved = time.monotonic(), False

    def resume(self, item: Item) -> None:
        """Continue the part that is here: its bytes are read once, for the hash."""
        if item.number in self.digests:
            return
        inside(self.folder, item.path)  # once more: a link of this very list may lead out by now
        os.makedirs(os.path.dirname(item.place), exist_ok=True)
        digest = Digest(item)
        with open(item.part, "ab+", buffering=0) as part:
            part.truncate(min(item.size, os.path.getsize(item.part)))
            part.seek(0)
            have = 0
            while have < item.size:
                block = part.read(1 << 20)
                if not block:
                    break
                digest.update(block)
                have += len(block)
                self.heard()
        self.digests[item.number] = digest
        self.depot.grow(item, have)

    def stream(self, item: Item, response: Any, source: str) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        digest = self.digests[item.number]
        handle = os.open(item.part, os.O_WRONLY)
        try:
            os.lseek(handle, item.have, os.SEEK_SET)
            while item.have < item.size:
                with as_connection_errors():
                    count = response.readinto(buffer[: min(BLOCK_BYTES, item.size - item.have)])
                if not count:
                    raise ConnectionError("stopped in the middle of a file")
                self.append(item, digest, handle, buffer[:count])
            self.settle(item, digest, handle, source)
        finally:
            os.close(handle)

    def append(self, item: Item, digest: Digest, handle: int, block: memoryview) -> None:
        written = 0
        while written < len(block):
            written += os.write(handle, block[written:])
        digest.update(block)
        self.arrived_bytes += len(block)
        self.heard()
        self.depot.grow(item, item.have + len(block))

    def settle(self, item: Item, digest: Digest, handle: int, source: str) -> None:
        """The file is whole: judge it by its hash, and only then give it its name."""
        del self.digests[item.number]
        if not item.fits(digest):
            os.unlink(item.part)
            self.depot.reset(item)
            return self.complain(item, source)
        os.fsync(handle)
        self.name(item, item.part, digest.sha256.hexdigest())
        return None

    def keep_small(self, item: Item, body: bytes, source: str) -> None:
        digest = Digest(item)
        digest.update(body)
        if not item.fits(digest):
            return self.complain(item, source)
        inside(self.folder, item.path)
        os.makedirs(os.path.dirname(item.place), exist_ok=True)
        with open(item.part, "wb", buffering=0) as file:
            file.write(body)
        self.arrived_bytes += len(body)
        self.name(item, item.part, digest.sha256.hexdigest())
        return None

    def name(self, item: Item, part: str, sha256: str) -> None:
        os.chmod(part, item.mode)
        if item.mtime_ns is not None:  # compiled Python files are valid only for their source's time
            os.utime(part, ns=(item.mtime_ns, item.mtime_ns))
        with self.depot.changed:
            os.replace(part, item.place)
            self.depot.grow(item, item.size, done=True)
        self.hashes.put(item.path, item.place, sha256)

    def complain(self, item: Item, source: str) -> None:
        item.damaged += 1
        tell("damaged", file=item.number, path=item.path, source=source)
        if item.damaged >= ATTEMPTS:
            raise TroubleError(f"{item.path} came {ATTEMPTS} times with a wrong hash, last from {source}.")

    def make(self, item: Item) -> None:
        """Links, empty folders and empty files need nobody."""
        os.makedirs(os.path.dirname(item.place), exist_ok=True)
        if item.kind == "folder":
            os.makedirs(item.place, exist_ok=True)
        elif item.kind == "link":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(item.place)
            os.symlink(item.target, item.place)
        else:
            self.keep_small(item, b"", "this node")
        self.depot.grow(item, item.size, done=True)

    # -- bytes that come over ssh
    def take(self, item: Item, offset: int, stdin: IO[bytes], length: int) -> None:
        body = read_exactly(stdin, length)
        self.heard()
        with self.claim([item]) as mine:
            if not mine or self.failed.is_set():
                return None  # somebody else brings it; what is missing in the end is asked for again
            try:
                if item.size < SMALL_BYTES:
                    return self.keep_small(item, body, "this machine")
                self.resume(item)
                if offset == item.have:
                    self.take_block(item, body)
            except TroubleError as trouble:
                self.fail(str(trouble))
            except OSError as error:
                self.fail(f"{self.folder} cannot be written to: {error.strerror or error}.")
        return None

    def take_block(self, item: Item, body: bytes) -> None:
        handle = os.open(item.part, os.O_WRONLY)
        try:
            os.lseek(handle, item.have, os.SEEK_SET)
            self.append(item, self.digests[item.number], handle, memoryview(body))
            if item.have == item.size:
                self.settle(item, self.digests[item.number], handle, "this machine")
        finally:
            os.close(handle)


def units(items: List[Item]) -> List[List[Item]]:
    """Small files packed together, first; then the large ones, in the same order on every node."""
    packs: List[List[Item]] = []
    size = 0
    for item in (item for item in items if item.size < SMALL_BYTES):
        if not packs or size + item.size > PACK_BYTES or len(packs[-1]) >= PACK_FILES:
            packs.append([])
            size = 0
        packs[-1].append(item)
        size += item.size
    return packs + [[item] for item in items if item.size >= SMALL_BYTES]


def read_exactly(stream: Any, length: int) -> bytes:
    body = bytearray()
    while len(body) < length:
        block = stream.read(length - len(body))
        if not block:
            raise ConnectionError("stopped in the middle of a file")
        body += block
    return bytes(body)


def free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def sync_file_system(folder: str) -> None:
    """One call for thousands of small files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(handle)
    except (OSError, AttributeError):
        os.sync()
    finally:
        os.close(handle)


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


# ------------------------------------------------------------------------------------------------ single answers
def manifest(order: Json, _: IO[bytes]) -> None:
    folder = os.path.expanduser(order["folder"])
    rows = listing(folder, order.get("leave_out", ()), order.get("links_out", "follow"))
    hash_files(folder, rows, order.get("hash", "all"), Hashes(folder, own=False))
    tell("manifest", files=rows)


def verify(order: Json, _: IO[bytes]) -> None:
    work = Fetch(order)
    work.compare(order["files"], order.get("check", "again"))


def hub(order: Json, _: IO[bytes]) -> None:
    """The files of a repository at its newest commit; large ones with their sha256, small ones with git's sha1."""
    base, repo = str(order["url"]).rstrip("/"), order["repo"]
    try:
        with open_url(f"{base}/api/models/{repo}", order.get("token")) as reply:
            commit = json.load(reply)["sha"]
        rows: List[Json] = []
        url: Optional[str] = f"{base}/api/models/{repo}/tree/{commit}?recursive=true"
        while url:
            with open_url(url, order.get("token")) as reply:
                rows += [hub_row(entry) for entry in json.load(reply) if entry["type"] == "file"]
                more = re.search(r'<([^>]+)>;\s*rel="next"', reply.headers.get("Link", ""))
                url = more.group(1) if more else None
    except urllib.error.HTTPError as error:
        said = error.headers.get("X-Error-Code") or error.reason
        tell("failed", text=f"the hub answered {error.code} for {repo} ({said}).", status=error.code)
        return
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        reason = getattr(error, "reason", error)
        tell("failed", text=f"the hub did not answer for {repo} ({reason}).", status=0)
        return
    leave_out = order.get("leave_out", ())
    rows = [row for row in rows if not any(fnmatch.fnmatch(row["path"], pattern) for pattern in leave_out)]
    tell("manifest", files=rows, commit=commit, url=f"{base}/{repo}/resolve/{commit}")


def hub_row(entry: Json) -> Json:
    large = entry.get("lfs")
    hashes = {"sha256": large["oid"]} if large else {"git_sha1": entry["oid"]}
    return {"path": entry["path"], "kind": "file", "size": entry["size"], "mode": 0o644, **hashes}


def read_speed(order: Json, _: IO[bytes]) -> None:
    """Reads the largest files, past the page cache where the system lets us, for a few seconds."""
    folder, limit_s = os.path.expanduser(order["folder"]), float(order.get("seconds", 2))
    rows = [row for row in listing(folder, order.get("leave_out", ()), "follow") if row["kind"] == "file"]
    largest = sorted(rows, key=lambda row: -row["size"])[:4]
    began_s = time.monotonic()

    def read(row: Json) -> int:
        count, buffer = 0, bytearray(4 << 20)
        with open(os.path.join(folder, row["path"]), "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while time.monotonic() - began_s < limit_s:
                got = file.readinto(buffer)
                if not got:
                    break
                count += got
        return count

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        total = sum(pool.map(read, largest))
    took_s = max(1e-6, time.monotonic() - began_s)
    tell("read-speed", bytes=total, seconds=took_s, bytes_per_s=total / took_s)


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
    except (BrokenPipeError, ConnectionError):  # whoever wanted this is gone
        return 1
    except OSError as error:
        tell("failed", text=f"{error.strerror or error}: {error.filename or order.get('folder', '')}.")
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)  # threads that serve or wait do not hold it up

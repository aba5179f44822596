"""Copies the files of a manifest into a folder: which of them are missing, and which source sends them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import threading
import time
from typing import IO, Any, Iterator, List, Optional

from .file_writer import FileWriter, lock, remove_abandoned_parts, remove_stale_parts, try_lock
from .files import CourierFiles, Item
from .folder import Tree, free_bytes, open_folder, sync_file_system, visible_nonces
from .hashes import HASHES_FILE, HashCache, git_sha1_of, sha256_of
from .manifest import checked
from .protocol import CourierError, Json, Progress, messages, send_event
from .sources import Source, as_connection_errors

SMALL_BYTES = 1 << 20  # smaller files are sent many to a request, and only when complete
BLOCK_BYTES = 256 << 10
PACK_BYTES = 8 << 20
PACK_FILES = 500
CONNECTIONS = 4
REST_S = 1.0  # before a source that failed is asked again


class Fetch:
    """Copies the items of a manifest into a folder, from whichever source delivers."""

    def __init__(self, request: Json) -> None:
        self.folder = os.path.expanduser(request["folder"])
        self.files = CourierFiles([], request.get("uplink_bytes_per_s", 0))
        self.stall_s = float(request.get("stall_s", 120))
        self.sources: List[Source] = []
        self.units: "queue.Queue[List[Item]]" = queue.Queue()
        self.delivered_s = time.monotonic()  # when a source last delivered or promised anything
        self.starved = False
        self.began_s = 0.0
        self.failed = threading.Event()
        self.lock_handle = -1
        self.missing: List[Item] = []
        self.tree = Tree(self.folder)
        self.links_out = request.get("links_out") == "keep"
        self.own = bool(request.get("own", True))
        self.beside = bool(request.get("beside"))  # the folders beside this one are Corral's, too
        self.hashes = HashCache(self.folder, own=self.own)
        self.writer = FileWriter(self.tree, self.files, self.hashes, self.on_data)

    # -------------------------------------------------------------------------------------------------- messages
    def handle_messages(self, stdin: IO[bytes]) -> None:
        """Messages until the end: look, compare, go, sources, drop, held, data (followed by bytes)."""
        for message in messages(stdin):
            self.files.active_s = time.monotonic()
            if message["do"] == "look":
                send_event("seen", names=visible_nonces(self.folder, message["names"]))
            elif message["do"] == "compare":
                self.compare(message["files"], message["check"])
            elif message["do"] == "go":
                self.go(message)
            elif message["do"] == "sources":
                self.set_sources(message["sources"])
            elif message["do"] == "drop":
                self.drop(message["files"])
            elif message["do"] == "held":
                send_event("held", held=self.held())
            elif message["do"] == "data":
                self.receive_block(self.files.items[message["file"]], message["offset"], stdin, message["length"])

    def compare(self, rows: List[Json], check: str) -> None:
        """Report which files are missing or damaged; a part that is here counts."""
        items = [Item(number, row, self.tree) for number, row in enumerate(checked(rows, self.links_out))]
        for item in items:
            self.tree.check(item.path)
        self.files.items[:] = items
        progress = Progress("checking", sum(item.size for item in items))
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            good = list(pool.map(lambda item: self.is_here(item, check, progress), items))
        ours = os.path.exists(os.path.join(self.folder, HASHES_FILE))
        damaged = [item.path for item, here in zip(items, good) if here is None]  # noqa: B905
        for item, here in zip(items, good):  # noqa: B905
            if here:
                self.files.grow(item, item.size, done=True)
        self.missing = [item for item in items if not item.done]
        for item in self.missing:
            self.find_part(item)
        foreign = "config.json" in damaged and not ours  # another model's folder: not ours to overwrite
        if check != "sizes" and not foreign:
            self.hashes.save()
        freed = self.make_room() if self.own and check != "sizes" and not foreign else 0
        needed = sum(item.size - item.have_bytes for item in self.missing)
        unknown = [item for item in self.missing if item.kind == "file" and not (item.sha256 or item.git_sha1)]
        send_event("need", bytes=needed, held=self.held(), damaged=damaged, foreign=foreign,
                   free_bytes=free_bytes(self.folder), freed_bytes=freed,
                   have_bytes=sum(item.have_bytes for item in items), files=len(self.missing),
                   unknown=[item.number for item in unknown])  # fmt: skip

    def make_room(self) -> int:
        """Delete stale parts before free space is counted, unless another pull is writing here; the bytes freed."""
        with open_folder(self.folder) as handle, lock(handle) as held:
            freed = remove_stale_parts(self.tree, self.files.items, held) if held is not False else 0
        return freed + (remove_abandoned_parts(self.folder) if self.beside else 0)

    def drop(self, numbers: List[int]) -> None:
        """Stop, and leave no part of these files, whose source has changed."""
        self.failed.set()
        self.files.close()
        for item in [self.files.items[number] for number in numbers]:
            if not item.done:
                with contextlib.suppress(OSError):  # its folder was not made yet
                    self.tree.unlink(item.path, item.part_name)

    def find_part(self, item: Item) -> None:
        if item.size >= SMALL_BYTES and not item.done and os.path.exists(item.part):
            self.files.grow(item, min(item.size, os.path.getsize(item.part)))

    def is_here(self, item: Item, check: str, progress: Progress) -> Optional[bool]:
        """True: complete and intact. False: missing. None: there, but damaged."""
        if item.kind == "link":
            return os.path.islink(item.final_path) and os.readlink(item.final_path) == item.target
        if item.kind == "folder":
            return os.path.isdir(item.final_path)
        if not os.path.isfile(item.final_path):
            return False
        if os.path.getsize(item.final_path) != item.size:
            return None
        if check == "sizes" or not (item.sha256 or item.git_sha1):
            return True
        if not item.sha256:
            return True if git_sha1_of(item.final_path) == item.git_sha1 else None
        sha256 = None if check == "again" else self.hashes.get(item.path, item.final_path)
        if sha256 is None and check == "known":
            return True
        if sha256 is None:
            sha256 = sha256_of(item.final_path, progress.add)
            self.hashes.put(item.path, item.final_path, sha256)
        return True if sha256 == item.sha256 else None

    def held(self) -> List[List[int]]:
        return [[item.number, item.have_bytes] for item in self.missing if not item.done]

    def set_sources(self, rows: List[Json]) -> None:
        with self.files.changed:
            before = {source.url: source for source in self.sources}
            self.sources = [before.get(source.url, source) for source in map(Source, rows)]
            self.delivered_s = time.monotonic()
            self.files.changed.notify_all()
        for source in before.values():
            if source not in self.sources:
                source.abandon()

    def go(self, message: Json) -> None:
        """Start fetching what is missing."""
        for number, sha256 in message.get("hashes", {}).items():
            item = self.files.items[int(number)]
            item.sha256 = sha256
            self.find_part(item)
        held = self.lock_folder()
        remove_stale_parts(self.tree, self.files.items, held)  # all hashes are known only now
        self.began_s = time.monotonic()
        self.set_sources(message["sources"])
        for item in self.missing:
            if item.size == 0:
                self.writer.make(item)
        for unit in units([item for item in self.missing if not item.done]):
            self.units.put(unit)
        for _ in range(CONNECTIONS):
            threading.Thread(target=self.work, daemon=True).start()
        threading.Thread(target=self.watch, daemon=True).start()

    def lock_folder(self) -> Optional[bool]:
        """Keep other couriers from writing into this folder until this process ends."""
        self.lock_handle = os.open(self.folder, os.O_RDONLY)
        held = try_lock(self.lock_handle)
        if held is False:
            raise CourierError(f"another pull is writing into {self.folder}.")
        return held

    # ------------------------------------------------------------------------------------------------------ work
    def watch(self) -> None:
        """Report progress until everything is here, or no source delivers any more."""
        progress = Progress("progress", sum(item.size for item in self.files.items))
        while not self.failed.is_set():
            with self.files.changed:
                finished = all(item.done for item in self.missing)
                if not finished:
                    self.files.changed.wait(0.25)
                done = sum(item.size if item.done else item.have_bytes for item in self.files.items)
            if finished:
                self.finish()
                return
            progress.add(done - progress.done)
            quiet_s = time.monotonic() - self.delivered_s
            if quiet_s > min(3.0, self.stall_s / 4) and not self.starved:
                self.starved = True
                send_event("starved")
            if quiet_s > self.stall_s:
                causes = "; ".join(f"{source.name}: {source.last_error or 'silent'}" for source in self.sources)
                self.fail(f"nothing was delivered for {self.stall_s:g} s ({causes or 'no source is left'}).")
            time.sleep(0.1)

    def finish(self) -> None:
        if any(item.size < SMALL_BYTES for item in self.missing):
            sync_file_system(self.folder)
        self.hashes.save()
        send_event("done", bytes=self.writer.arrived_bytes, seconds=time.monotonic() - self.began_s)

    def fail(self, text: str, errno: Optional[int] = None) -> None:
        if not self.failed.is_set():
            self.failed.set()
            self.files.close()
            send_event("failed", text=text, errno=errno)

    def work(self) -> None:
        while not self.failed.is_set():
            try:
                unit = self.units.get_nowait()
            except queue.Empty:
                return
            with self.failing():
                self.fetch_unit(unit)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Errors in the block end this fetch."""
        try:
            yield
        except CourierError as error:
            self.fail(str(error))
        except OSError as error:
            self.fail(f"{self.folder} cannot be written to: {error.strerror or error}.", error.errno)

    def fetch_unit(self, unit: List[Item]) -> None:
        while not self.failed.is_set():
            rest = [item for item in unit if not item.done]
            if not rest:
                return
            source = self.choose_source(rest[0])
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
                    source.last_error = str(error)

    @contextlib.contextmanager
    def claim(self, items: List[Item]) -> Iterator[bool]:
        with self.files.changed:
            free = not any(item.claimed or item.done for item in items)
            for item in items if free else []:
                item.claimed = True
        try:
            yield free
        finally:
            with self.files.changed:
                for item in items if free else []:
                    item.claimed = False

    def choose_source(self, item: Item) -> Optional[Source]:
        """The best source that has not just failed; after a damaged copy, the next one. None after a short wait."""
        now_s = time.monotonic()
        with self.files.changed:
            ready = [source for source in self.sources if source.rest_until_s <= now_s]
            if ready:
                return ready[item.damaged % len(ready)]
            self.files.changed.wait(0.1)
        return None

    def receive(self, source: Source, items: List[Item]) -> None:
        single = items[0] if len(items) == 1 and items[0].size >= SMALL_BYTES else None
        if single is not None:
            self.writer.resume(single)
            if single.have_bytes == single.size:  # the part was complete, only not yet checked
                self.writer.write(single, [], "an earlier run")
                return
        with as_connection_errors():
            response, close = source.open(items, single.have_bytes if single is not None else 0)
        try:
            self.delivered_s = time.monotonic()
            for item in items:
                if single is not None:
                    self.writer.write(item, blocks_of(item, response), source.name)
                else:
                    with as_connection_errors():
                        body = read_exactly(response, item.size)
                    self.on_data()
                    self.writer.write_small(item, body, source.name)
        finally:
            close()

    def on_data(self) -> None:
        self.delivered_s, self.starved = time.monotonic(), False

    def receive_block(self, item: Item, offset: int, stdin: IO[bytes], length: int) -> None:
        """Bytes that come over ssh, after a message."""
        body = read_exactly(stdin, length)
        self.on_data()
        with self.claim([item]) as mine:
            if not mine or self.failed.is_set():
                return  # a source delivers it; what is missing in the end is asked for again
            with self.failing():
                if item.size < SMALL_BYTES:
                    self.writer.write_small(item, body, "this machine")
                    return
                self.writer.resume(item)
                if offset == item.have_bytes:
                    self.writer.write(item, [memoryview(body)], "this machine")


def units(items: List[Item]) -> List[List[Item]]:
    """Small files in packs, first; then the large ones, in the same order on every node."""
    packs: List[List[Item]] = []
    size = 0
    for item in (item for item in items if item.size < SMALL_BYTES):
        if not packs or size + item.size > PACK_BYTES or len(packs[-1]) >= PACK_FILES:
            packs.append([])
            size = 0
        packs[-1].append(item)
        size += item.size
    return packs + [[item] for item in items if item.size >= SMALL_BYTES]


def blocks_of(item: Item, response: Any) -> Iterator[memoryview]:
    """The missing bytes of an item, in one buffer that is filled again and again."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    while item.have_bytes < item.size:
        with as_connection_errors():
            count = response.readinto(buffer[: min(BLOCK_BYTES, item.size - item.have_bytes)])
        if not count:
            raise ConnectionError("stopped in the middle of a file")
        yield buffer[:count]


def read_exactly(stream: Any, length: int) -> bytes:
    body = bytearray()
    while len(body) < length:
        block = stream.read(length - len(body))
        if not block:
            raise ConnectionError("stopped in the middle of a file")
        body += block
    return bytes(body)

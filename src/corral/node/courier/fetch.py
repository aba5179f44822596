"""Bringing the files of a manifest into a folder: what is missing, and from whom it comes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import threading
import time
from typing import IO, Any, Iterator, List, Optional

from .file_writer import Landing, lock, opened, remove_given_up, remove_leftovers, take_lock
from .files import CourierFiles, Item
from .folder import Tree, free_bytes, seen, sync_file_system
from .hashes import HASHES_FILE, Hashes, git_sha1_of, sha256_of
from .manifest import checked
from .protocol import Json, Pace, TroubleError, read_line, tell
from .sources import Source, as_connection_errors

SMALL_BYTES = 1 << 20  # smaller files travel many to a request, and only when whole
PACK_BYTES = 8 << 20
PACK_FILES = 500
CONNECTIONS = 4
REST_S = 1.0  # before a source that failed is asked again


class Fetch:
    """Brings the items of a manifest into a folder, from whichever source delivers."""

    def __init__(self, order: Json) -> None:
        self.folder = os.path.expanduser(order["folder"])
        self.depot = CourierFiles([], order.get("uplink_bytes_per_s", 0))
        self.stall_s = float(order.get("stall_s", 120))
        self.sources: List[Source] = []
        self.units: "queue.Queue[List[Item]]" = queue.Queue()
        self.alive_s = time.monotonic()  # when anybody last delivered or promised anything
        self.starved = False
        self.began_s = 0.0
        self.failed = threading.Event()
        self.lock_handle = -1
        self.missing: List[Item] = []
        self.tree = Tree(self.folder)
        self.links_out = order.get("links_out") == "keep"
        self.own = bool(order.get("own", True))
        self.beside = bool(order.get("beside"))  # the folders beside this one are Corral's, too
        self.hashes = Hashes(self.folder, own=self.own)
        self.landing = Landing(self.tree, self.depot, self.hashes, self.heard)

    # -- what is asked of it
    def obey(self, stdin: IO[bytes]) -> None:
        """Lines until the end: look, compare, go, sources, drop, held, data (with bytes behind it), end."""
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
            elif message["do"] == "drop":
                self.drop(message["files"])
            elif message["do"] == "held":
                tell("held", held=self.held())
            elif message["do"] == "data":
                self.take(self.depot.items[message["file"]], message["offset"], stdin, message["length"])

    def compare(self, rows: List[Json], check: str) -> None:
        """Which files are not here, or not as they should be; a part that is here counts."""
        items = [Item(number, row, self.tree) for number, row in enumerate(checked(rows, self.links_out))]
        for item in items:
            self.tree.check(item.path)
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
        freed = self.tidy() if self.own and check != "sizes" and not foreign else 0
        needed = sum(item.size - item.have for item in self.missing)
        tell("need", bytes=needed, held=self.held(), damaged=damaged, foreign=foreign,
             free_bytes=free_bytes(self.folder), freed_bytes=freed,
             have_bytes=sum(item.have for item in items), files=len(self.missing),
             unknown=[item.number for item in self.missing
                      if item.kind == "file" and not (item.sha256 or item.git_sha1)])  # fmt: skip

    def tidy(self) -> int:
        """Delete parts that nobody will continue, before free space is counted; not while another pull is here."""
        with opened(self.folder) as handle, lock(handle) as held:
            freed = remove_leftovers(self.tree, self.depot.items, held) if held is not False else 0
        return freed + (remove_given_up(self.folder) if self.beside else 0)

    def drop(self, numbers: List[int]) -> None:
        """Stop, and leave no part of these files: they are not what they were to be."""
        self.failed.set()
        self.depot.close()
        for item in [self.depot.items[number] for number in numbers]:
            if not item.done:
                with contextlib.suppress(OSError):  # its folder was not made yet
                    self.tree.unlink(item.path, item.part_name)

    def find_part(self, item: Item) -> None:
        if item.size >= SMALL_BYTES and not item.done and os.path.exists(item.part):
            self.depot.grow(item, min(item.size, os.path.getsize(item.part)))

    def is_here(self, item: Item, check: str, pace: Pace) -> Optional[bool]:
        """True: as it should be. False: not there. None: there, but damaged."""
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
        found = None if check == "again" else self.hashes.get(item.path, item.final_path)
        if found is None and check == "known":
            return True
        if found is None:
            found = sha256_of(item.final_path, pace.add)
            self.hashes.put(item.path, item.final_path, found)
        return True if found == item.sha256 else None

    def held(self) -> List[List[int]]:
        return [[item.number, item.have] for item in self.missing if not item.done]

    def set_sources(self, rows: List[Json]) -> None:
        with self.depot.changed:
            before = {source.url: source for source in self.sources}
            self.sources = [before.get(source.url, source) for source in map(Source, rows)]
            self.alive_s = time.monotonic()
            self.depot.changed.notify_all()
        for source in before.values():
            if source not in self.sources:
                source.leave()

    def go(self, message: Json) -> None:
        for number, sha256 in message.get("hashes", {}).items():
            item = self.depot.items[int(number)]
            item.sha256 = sha256
            self.find_part(item)
        held = self.lock_folder()
        remove_leftovers(self.tree, self.depot.items, held)  # all hashes are known only now
        self.began_s = time.monotonic()
        self.set_sources(message["sources"])
        for item in self.missing:
            if item.size == 0:
                self.landing.make(item)
        for unit in units([item for item in self.missing if not item.done]):
            self.units.put(unit)
        for _ in range(CONNECTIONS):
            threading.Thread(target=self.work, daemon=True).start()
        threading.Thread(target=self.watch, daemon=True).start()

    def lock_folder(self) -> Optional[bool]:
        """Two couriers must not write into one folder; the lock goes when the process does."""
        self.lock_handle = os.open(self.folder, os.O_RDONLY)
        held = take_lock(self.lock_handle)
        if held is False:
            raise TroubleError(f"another pull is writing into {self.folder}.")
        return held

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
                self.fail(f"nothing was delivered for {self.stall_s:g} s ({said or 'no source is left'}).")
            time.sleep(0.1)

    def finish(self) -> None:
        if any(item.size < SMALL_BYTES for item in self.missing):
            sync_file_system(self.folder)
        self.hashes.save()
        tell("done", bytes=self.landing.arrived_bytes, seconds=time.monotonic() - self.began_s)

    def fail(self, text: str, errno: Optional[int] = None) -> None:
        if not self.failed.is_set():
            self.failed.set()
            self.depot.close()
            tell("failed", text=text, errno=errno)

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
                self.fail(f"{self.folder} cannot be written to: {error.strerror or error}.", error.errno)

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
            self.landing.resume(single)
            if single.have == single.size:  # the part was whole, only not yet judged
                return self.landing.stream(single, None, "an earlier run")
        with as_connection_errors():
            response, close = source.open(items, single.have if single is not None else 0)
        try:
            self.alive_s = time.monotonic()
            for item in items:
                if single is not None:
                    self.landing.stream(item, response, source.name)
                else:
                    with as_connection_errors():
                        body = read_exactly(response, item.size)
                    self.heard()
                    self.landing.keep_small(item, body, source.name)
        finally:
            close()
        return None

    def heard(self) -> None:
        self.alive_s, self.starved = time.monotonic(), False

    # -- bytes that come over ssh
    def take(self, item: Item, offset: int, stdin: IO[bytes], length: int) -> None:
        body = read_exactly(stdin, length)
        self.heard()
        with self.claim([item]) as mine:
            if not mine or self.failed.is_set():
                return None  # somebody else brings it; what is missing in the end is asked for again
            try:
                if item.size < SMALL_BYTES:
                    return self.landing.keep_small(item, body, "this machine")
                self.landing.resume(item)
                if offset == item.have:
                    self.landing.take_block(item, body)
            except TroubleError as trouble:
                self.fail(str(trouble))
            except OSError as error:
                self.fail(f"{self.folder} cannot be written to: {error.strerror or error}.", error.errno)
        return None


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

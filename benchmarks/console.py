"""What the console costs: 50 deployments at 1 Hz, 50 servers in Live, 10,000 events, the page's size, first paint.

    python benchmarks/console.py [--deployments 50] [--seconds 20] [--events 10000]

`corral console` runs as a process of its own over folders made by hand, with one listener at the Fleet view's stream,
and then with one at the Live view's, where one fake server stands behind all deployments.
CPU time and resident memory are the process's own, from /proc. First paint is Chromium's, without a cache, the median
of five loads; it needs the browser of the test tier. Prints one JSON document, load average included.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from corral.base.processes import processor_s

sys.path.insert(0, str(Path(__file__).parent.parent))


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Listener(threading.Thread):
    """Reads a view's stream as a page does, and counts what comes."""

    def __init__(self, url: str, headers: dict[str, str], view: str = "fleet") -> None:
        super().__init__(daemon=True)
        self._address, self._headers, self._view = urlsplit(url), headers, view
        self._connection = http.client.HTTPConnection("127.0.0.1", self._address.port)
        self.messages = self.bytes = 0

    def run(self) -> None:
        self._connection.request("GET", f"/api/{self._view}/stream", headers=self._headers)
        answer = self._connection.getresponse()
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # it was closed
            while line := answer.readline():
                self.messages += line.startswith(b"data:")
                self.bytes += len(line)

    def close(self) -> None:
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self.join()


def core_share(pid: int, seconds: float) -> float:
    """The share of a core that a process uses, once everything was read."""
    time.sleep(5)
    began, used = time.monotonic(), processor_s(pid)
    time.sleep(seconds)
    return (processor_s(pid) - used) / (time.monotonic() - began)


def enter(link: str) -> dict[str, str]:
    """The headers by which the console knows who has used the link."""
    address = urlsplit(link)
    connection = http.client.HTTPConnection("127.0.0.1", address.port)
    connection.request("GET", f"/?{address.query}")
    answer = connection.getresponse()
    answer.read()
    cookie = str(answer.headers["set-cookie"]).partition(";")[0]
    return {"cookie": cookie, "x-corral-secret": parse_qs(address.query)["once"][0]}


def first_paints(process: subprocess.Popen[str], link: str, loads: int = 5) -> list[float]:
    from playwright.sync_api import sync_playwright

    found: list[float] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for _ in range(loads):
            page = browser.new_page()
            page.goto(link)
            page.wait_for_selector(".deployment")
            found.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            page.close()
            assert process.stdout is not None
            link = json.loads(process.stdout.readline())["link"]
        browser.close()
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--deployments", type=int, default=50)
    options.add_argument("--seconds", type=float, default=20)
    options.add_argument("--events", type=int, default=10_000)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["CORRAL_HOME"] = home
        from tests.console_home import make

        from corral.console.server import static_files
        from corral.fake.server import FakeServer

        course = (("starting", 0.5), ("initialising", 7.0), ("loading", 12.0), ("compiling", 30.0), ("ready", 60.0))
        made = [make(f"deployment {n}", 100).agent().course(*course) for n in range(given.deployments)]
        command = [sys.executable, "-m", "corral", "console", "--port", "0", "--no-open", "--json"]
        with FakeServer() as server, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for one in made:
                one.serves(f"{server.url}/v1")
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            headers = enter(said["link"])
            link = json.loads(process.stdout.readline())["link"]
            listener = Listener(said["url"], headers)
            listener.start()
            share = core_share(process.pid, given.seconds)
            listener.close()
            watcher = Listener(said["url"], headers, "live")
            watcher.start()
            live_share = core_share(process.pid, given.seconds)
            watcher.close()
            paints = first_paints(process, link)
            listener = Listener(said["url"], headers)
            listener.start()
            memory = [resident_mib(process.pid)]
            for part in range(4):
                for number in range(given.events // 4):
                    made[number % len(made)].event("observed", 100 + part, kv_tokens=number)
                time.sleep(4)
                memory.append(resident_mib(process.pid))
            process.terminate()
        sizes = {name: len(data) for name, data in static_files().items() if not name.endswith("LICENSE")}
        print(json.dumps({
            "deployments": given.deployments, "core_percent": round(100 * share, 2),
            "core_percent_live": round(100 * live_share, 2), "live_messages": watcher.messages,
            "live_bytes": watcher.bytes, "events": given.events,
            "resident_mib": [round(one, 1) for one in memory], "messages": listener.messages,
            "first_paint_ms": round(statistics.median(paints)), "first_paints_ms": [round(one) for one in paints],
            "page_bytes": sum(sizes.values()), "load_average": os.getloadavg(),
        }))  # fmt: skip


if __name__ == "__main__":
    main()

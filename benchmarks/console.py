"""What the console costs: 50 deployments at 1 Hz, 10,000 events, the page's size and first paint.

    python benchmarks/console.py [--deployments 50] [--seconds 20] [--events 10000]

`corral console` runs as a process of its own over folders made by hand, with one listener at the Fleet view's stream.
CPU time and resident memory are the process's own, from /proc. First paint is Chromium's, without a cache, the median
of five loads; it needs the browser of the test tier. Prints one JSON document, load average included.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Listener(threading.Thread):
    """Reads the Fleet stream as a page does, and counts what comes."""

    def __init__(self, url: str, cookie: str) -> None:
        super().__init__(daemon=True)
        self._address, self._cookie = urlsplit(url), cookie
        self.messages = self.bytes = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._address.port)
        connection.request("GET", "/api/fleet/stream", headers={"cookie": self._cookie})
        answer = connection.getresponse()
        while line := answer.readline():
            self.messages += line.startswith(b"data:")
            self.bytes += len(line)


def enter(link: str) -> str:
    address = urlsplit(link)
    connection = http.client.HTTPConnection("127.0.0.1", address.port)
    connection.request("GET", f"/?{address.query}")
    answer = connection.getresponse()
    answer.read()
    return str(answer.headers["set-cookie"]).partition(";")[0]


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

        from corral.console.app import static_files

        course = (("starting", 0.5), ("initialising", 7.0), ("loading", 12.0), ("compiling", 30.0), ("ready", 60.0))
        made = [make(f"deployment {n}", 100).agent().course(*course) for n in range(given.deployments)]
        command = [sys.executable, "-m", "corral", "console", "--port", "0", "--no-open", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            listener = Listener(said["url"], enter(said["link"]))
            link = json.loads(process.stdout.readline())["link"]
            listener.start()
            time.sleep(5)  # everything was read once
            began, used = time.monotonic(), cpu_s(process.pid)
            time.sleep(given.seconds)
            share = (cpu_s(process.pid) - used) / (time.monotonic() - began)
            paints = first_paints(process, link)
            memory = [resident_mib(process.pid)]
            for part in range(4):
                for number in range(given.events // 4):
                    made[number % len(made)].event("observed", 100 + part, kv_tokens=number)
                time.sleep(4)
                memory.append(resident_mib(process.pid))
            process.terminate()
        sizes = {name: len(data) for name, data in static_files().items() if not name.endswith("LICENSE")}
        print(json.dumps({
            "deployments": given.deployments, "core_percent": round(100 * share, 2), "events": given.events,
            "resident_mib": [round(one, 1) for one in memory], "messages": listener.messages,
            "first_paint_ms": round(statistics.median(paints)), "first_paints_ms": [round(one) for one in paints],
            "page_bytes": sum(sizes.values()), "load_average": os.getloadavg(),
        }))  # fmt: skip


if __name__ == "__main__":
    main()

"""The console over a real controller: a job from its queue to ready, its reason, phases, nodes and time."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.test_slurm import Login, on_two_nodes, request
from tests.testbed import missing
from tests.until import until

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))


@pytest.fixture
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    with on_two_nodes(tmp_path_factory.mktemp("slurm-console")) as found:
        yield found


class ConsolePage:
    """What a page of `corral console` on the login node gets: a cookie for its link, then every row as it changes."""

    def __init__(self, link: str) -> None:
        address = urlsplit(link)
        assert address.hostname is not None
        self._where = (address.hostname, address.port)
        self._held: list[http.client.HTTPConnection | http.client.HTTPResponse] = []
        self._headers: dict[str, str] = {}
        entered = self._get(f"/?{address.query}")
        cookie = str(entered.headers["set-cookie"]).partition(";")[0]
        self._headers = {"cookie": cookie, "x-corral-secret": address.query.partition("once=")[2]}
        entered.read()
        self._stream = self._get("/api/fleet/stream")
        self.rows: dict[str, Any] = {}

    def _get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self._where, timeout=60)
        connection.request("GET", path, headers=self._headers)
        answer = connection.getresponse()
        self._held += [answer, connection]
        assert answer.status == 200
        return answer

    def close(self) -> None:
        for one in self._held:
            one.close()

    def until(self, name: str, good: Callable[[Any], bool]) -> Any:
        """The row of a deployment once it is as it should be; a stream without news still says so every 15 s."""
        for _ in range(2000):
            line = self._stream.readline()
            assert line, "the console ended its stream"
            if line.startswith(b"data: "):
                self.rows |= {row["name"]: row for row in json.loads(line[6:])["rows"]}
            if name in self.rows and good(self.rows[name]):
                return self.rows[name]
        raise AssertionError(f"{name} stands at {self.rows.get(name)}")


@pytest.fixture
def console(login: Login) -> Iterator[ConsolePage]:
    address = login.hosts.address("login")
    started = login.start("console", "--port", "0", "--no-open", "--json", "--bind", address, "--host", address)
    assert started.stdout is not None
    page = ConsolePage(json.loads(started.stdout.readline())["link"])
    yield page
    page.close()
    for pid, line in login.hosts.processes("login"):  # what was started is only the way into the host
        if "corral console" in line:
            os.kill(pid, signal.SIGTERM)
    started.communicate(timeout=120)


def test_the_console_follows_a_job_from_its_queue_to_ready(login: Login, console: ConsolePage) -> None:
    whole = ("--nodelist=n1,n2", "--exclusive", "-N2", "-o", "/dev/null", "--wrap", "sleep 600")
    blocker = login.slurm.run("sbatch", "--parsable", *whole).stdout.strip()
    until(lambda: "R" in login.slurm.run("squeue", "-h", "-j", blocker, "-o", "%t").stdout, "the blocker")
    login.up("seen", "--nodes", "2", "--no-wait")
    row = console.until("seen", lambda row: row["state"] == "queued" and "(Resources)" in row["text"])
    assert "the nodes it asks for are in use" in row["text"]
    assert row["job"]["id"] == login.job("seen")
    assert row["phases"][-1]["phase"] == "ready"  # and all that comes before it is to be seen
    assert [one["phase"] for one in row["phases"] if one["since_s"] and not one["until_s"]] == ["queued"]
    assert row["ready_at_s"] is None  # nobody knows how long a queue is
    login.slurm.run("scancel", blocker)
    row = console.until("seen", lambda row: row["state"] == "ready")
    passed = [one["phase"] for one in row["phases"]]
    assert passed.index("queued") < passed.index("starting") < passed.index("loading") < passed.index("ready")
    assert sorted(one["node"] for one in row["nodes"]) == ["n1", "n2"]
    assert all(one["joined"] for one in row["nodes"])
    assert row["job"]["drains_s"] > row["since_s"]
    assert request(row["url"], (login.folder("seen") / "key").read_text().strip()) == 200
    assert login.corral("down", "seen").returncode == 0
    row = console.until("seen", lambda row: row["ended"])
    assert (row["state"], row["reason"]) == ("stopped", "requested")

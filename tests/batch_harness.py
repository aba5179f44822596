"""Kill a batch at random moments, tear its files, and see that nothing is lost or doubled.

Runners are forked from a nursery that has everything imported, so that a life of some milliseconds is spent in the
runner's own work and not in starting Python.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NURSERY = """
import json, os, sys
import corral.cli.batch, corral.use.batch.batch, corral.use.batch.output, corral.client.client, uvloop
from corral.cli import main
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            main(order["argv"])
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
        finally:
            os._exit(99)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Nursery:
    """Starts runners quickly, one at a time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, *argv: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"argv": argv, "log": str(self._log)}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> int:
        """The exit code of the runner; negative when it was killed."""
        assert self._process.stdout is not None
        return os.waitstatus_to_exitcode(int(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()


@contextmanager
def fake_server(*options: str) -> Iterator[str]:
    """A fake server in a process of its own; gives its address."""
    command = [sys.executable, "-m", "corral", "fake-server", "--until-eof", "--control", *options]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield json.loads(server.stdout.readline())["url"]
    finally:
        server.stdin.close()
        server.wait(120)
        server.stdout.close()


def control(url: str, what: str, body: dict[str, object]) -> None:
    request = urllib.request.Request(f"{url}/control/{what}", json.dumps(body).encode())
    urllib.request.urlopen(request, timeout=10).close()


def write_rows(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            body = {"prompt": f"Row {number}: tell me é", "max_tokens": 4 + number % 13, "temperature": 0}
            row = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def tear(output: Path, chance: random.Random) -> str:
    """Damage what a crash of the machine may damage; what was promised must be kept or done again."""
    ledger = Path(f"{output}.corral") / "ledger"
    if not output.exists() or not ledger.exists():
        return "nothing"
    kind = chance.choice(["cut line", "half line", "cut ledger", "garbage in ledger", "zeros", "none", "none"])
    target = ledger if "ledger" in kind else output
    size = target.stat().st_size
    with target.open("r+b") as file:
        if kind.startswith("cut"):
            file.truncate(max(0, size - chance.randrange(1, 200)))
        elif kind == "half line":
            file.seek(size)
            file.write(b'{"id":"batch_req_0","custom_id":"id-1","resp')
        elif kind == "garbage in ledger":
            file.seek(size)
            file.write(chance.randbytes(chance.randrange(1, 90)))
        elif kind == "zeros" and size:
            at = max(0, size - chance.randrange(1, 60))
            file.seek(at)
            file.write(bytes(size - at))
    return kind


@dataclass
class Torment:
    """What was done to a job, and how it ended."""

    kills: int
    torn: dict[str, int]
    fruitful: int  # lives in which something was committed before the kill
    before_last: int  # results that counted when the killing ended
    code: int


PACE_S, HELD_S = 0.02, 5.0  # until the first token: while there is time, and while a job is ahead of its killer


class Reins:
    """Keeps a job from ending before its last kill, on any machine: ahead of the kills, its server hardly answers."""

    def __init__(self, url: str, rows: int, kills: int) -> None:
        self._url, self._rows, self._kills, self._done = url, rows, kills, 0
        self._pace(PACE_S)

    def _pace(self, first_token_s: float) -> None:
        self.first_token_s = first_token_s
        control(self._url, "pace", {"ttft_s": first_token_s})

    @property
    def held(self) -> bool:
        return self.first_token_s == HELD_S

    def let_live(self, output: Path, counted: int, seconds: float) -> None:
        """Until the time is over, or the life has done its share."""
        share = 0.5 * self._rows / self._kills
        end = time.monotonic() + seconds
        while time.monotonic() < end and _counted(output) - counted < share:
            time.sleep(0.002)

    def killed(self, counted: int) -> None:
        self._done += 1
        ahead = counted > 0.8 * self._rows * self._done / self._kills
        if ahead != self.held:
            self._pace(HELD_S if ahead else PACE_S)

    def let_go(self) -> None:
        self._pace(0.0)


def torment(
    nursery: Nursery, argv: list[str], output: Path, kills: int, chance: random.Random, reins: Reins
) -> Torment:
    """Run a job in `kills` lives that end in SIGKILL, with torn files in between, and then to its end.

    Lives become longer while none of them gets anywhere, so that a slow machine does not make the test an empty one.
    """
    torn: dict[str, int] = {}
    longest_s, idle, counted, fruitful = 0.12, 0, 0, 0
    for _ in range(kills):
        pid = nursery.start(*argv)
        reins.let_live(output, counted, chance.uniform(0.002, longest_s))
        _kill(pid, nursery)
        if _counted(output) > counted:
            longest_s, idle, fruitful = max(0.12, longest_s * 0.93), 0, fruitful + 1
        elif not reins.held:
            idle += 1
            longest_s = longest_s * 1.25 if idle % 3 == 0 else longest_s
        kind = tear(output, chance)
        torn[kind] = torn.get(kind, 0) + 1
        counted = _counted(output)
        reins.killed(counted)
    reins.let_go()
    nursery.start(*argv)
    return Torment(kills, torn, fruitful, counted, nursery.wait())


def torment_several(
    nurseries: list[Nursery], argv: list[str], output: Path, kills: int, chance: random.Random, reins: Reins
) -> tuple[Torment, list[int]]:
    """Let several runners work on one job, kill one of them at a time at random moments, and let it come back.

    Also tears what killed runners wrote. Gives the exit codes of those that lived to the end.
    """
    torn: dict[str, int] = {}
    pids = [nursery.start(*argv) for nursery in nurseries]
    longest_s, counted, fruitful = 0.12, 0, 0
    for _ in range(kills):
        reins.let_live(output, counted, chance.uniform(0.002, longest_s))
        victim = chance.randrange(len(nurseries))
        _kill(pids[victim], nurseries[victim])
        now = _counted(output)
        fruitful += now > counted
        if now > counted:
            longest_s = max(0.12, longest_s * 0.95)
        elif not reins.held:
            longest_s *= 1.25
        counted = now
        reins.killed(counted)
        kind = _tear_part(output, pids[victim], chance)
        torn[kind] = torn.get(kind, 0) + 1
        pids[victim] = nurseries[victim].start(*argv)
    before_last = _counted(output)
    reins.let_go()
    codes = [nursery.wait() for nursery in nurseries]
    return Torment(kills, torn, fruitful, before_last, max(codes)), codes


def _kill(pid: int, nursery: Nursery) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    code = nursery.wait()
    if code != -signal.SIGKILL:
        raise AssertionError(f"a runner ended with {code} before it could be killed")


def _tear_part(output: Path, pid: int, chance: random.Random) -> str:
    """Damage the end of what one dead runner wrote."""
    for part in Path(f"{output}.corral").glob(f"shared/parts/*.{pid}.*"):
        kind, name = chance.choice(
            [("cut", "results.jsonl"), ("cut", "ledger"), ("zeros", "results.jsonl"), ("none", "")]
        )
        target = part / name
        if name and target.exists() and (size := target.stat().st_size):
            at = max(0, size - chance.randrange(1, 90))
            with target.open("r+b") as file:
                file.truncate(at)
                if kind == "zeros":
                    file.write(bytes(size - at))
            return f"{kind} {name}"
    return "none"


def _counted(output: Path) -> int:
    job = Path(f"{output}.corral")
    ledgers = [job / "ledger", *job.glob("shared/parts/*/ledger")]
    return sum(ledger.stat().st_size // 40 for ledger in ledgers if ledger.exists())

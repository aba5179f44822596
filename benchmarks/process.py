"""Processes of the benchmarks: `corral` commands, and servers that print their address and end with their input."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.processes import processor_s

CORRAL = (sys.executable, "-m", "corral")
FAKE_SERVER = ("-m", "corral", "fake-server", "--until-eof")


def corral(*arguments: str, codes: Sequence[int] = (0,), timeout_s: float | None = None) -> str:
    """What a command prints on stdout; another exit code than those of `codes` ends the benchmark."""
    done = subprocess.run([*CORRAL, *arguments], stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=False)
    if done.returncode not in codes:
        sys.exit(f"corral {arguments[0]} ended with code {done.returncode}")
    return done.stdout


def corral_json(*arguments: str, codes: Sequence[int] = (0, 1)) -> Any:
    """The same as data; code 1 is a measurement that is not valid and says why."""
    return json.loads(corral(*arguments, codes=codes))


def stop(*names: str) -> None:
    """Stop deployments, whatever state they are in."""
    for name in names:
        subprocess.run([*CORRAL, "down", name], check=False, stdout=subprocess.DEVNULL)


@dataclass
class Process:
    """A server that was started here."""

    url: str
    popen: subprocess.Popen[str]
    log: Path | None = None

    def cpu_s(self) -> float:
        return processor_s(self.popen.pid)

    def memory_mib(self) -> float:
        lines = Path(f"/proc/{self.popen.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def start(
    stack: contextlib.ExitStack, *argv: str, log: Path | None = None, prefix: Sequence[str] = ()
) -> Callable[[], Process]:
    """Start a Python program; the result waits until it prints its address, so that several start side by side."""
    pipe = subprocess.PIPE
    popen = subprocess.Popen([*prefix, sys.executable, *argv], stdin=pipe, stdout=pipe, text=True)
    stack.callback(_end, popen)

    def ready() -> Process:
        assert popen.stdout
        return Process(json.loads(popen.stdout.readline())["url"], popen, log)

    return ready


def _end(popen: subprocess.Popen[str]) -> None:
    assert popen.stdin
    assert popen.stdout
    with contextlib.suppress(OSError):
        popen.stdin.close()
    popen.send_signal(signal.SIGCONT)
    try:
        popen.wait(10)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    popen.stdout.close()


@contextlib.contextmanager
def running(*argv: str, prefix: Sequence[str] = ()) -> Iterator[Process]:
    """A server while it is needed."""
    with contextlib.ExitStack() as stack:
        yield start(stack, *argv, prefix=prefix)()


def fake_server(*options: str, prefix: Sequence[str] = ()) -> contextlib.AbstractContextManager[Process]:
    return running(*FAKE_SERVER, *options, prefix=prefix)

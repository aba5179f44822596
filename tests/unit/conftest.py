"""`corral` as a user has it, with a stand-in engine; a start that nobody watches."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from corral.cli import main
from corral.engines import environments as engines
from corral.node.processes import marked
from tests.skips import NO_SHELLCHECK
from tests.stand_in import install_stand_in
from tests.tiny_llama import make_tiny_llama
from tests.until import LIMIT_S, until

# how long an example takes is the machine's affair
settings.register_profile("corral", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("corral")

STUB = Path(__file__).parent.parent / "stub_engine.py"
ENGINE = Path(__file__).parent.parent / "fake_engine.py"


@dataclass
class Done:
    """How a `corral` command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Corral:
    """Runs `corral` as a user does, in a home of its own, with the stand-in engine installed."""

    home: Path
    model: Path
    env: dict[str, str]

    def __call__(self, *arguments: str, **options: str) -> Done:
        """In this process: one of its own costs several times the processor time of most commands."""
        beside = threading.current_thread() is not threading.main_thread()  # standard streams are the process's
        if beside or any(name.startswith("HF_") for name in options):  # the hub's library reads them once
            return self.apart(*arguments, **options)
        with pytest.MonkeyPatch.context() as patch:
            for name in set(os.environ) - set(self.env):
                patch.delenv(name)
            for name, value in {**self.env, **options}.items():
                patch.setenv(name, value)
            return in_this_process(*arguments)

    def apart(self, *arguments: str, **options: str) -> Done:
        """In a process of its own, as a shell would run it."""
        env = {**self.env, **options}
        done = subprocess.run(
            [sys.executable, "-m", "corral", *arguments], capture_output=True, text=True, env=env, timeout=LIMIT_S
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str, **options: str) -> subprocess.Popen[str]:
        env = {**self.env, **options}
        command = [sys.executable, "-m", "corral", *arguments]
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait_state(self, name: str, state: str) -> Any:
        def look() -> Any:
            found = in_this_process("status", name, "--json")  # a process for every look would take a core
            return found.json() if found.code in (0, 8) and found.json()["state"] == state else None

        return until(look, f"{name} {state}")


def in_this_process(*words: str, given: str = "") -> Done:
    """`corral` as its own process would run it: words, standard streams, exit code."""
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (given.encode(), b"", b"")]
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as ended:
            main(list(words))
    for stream in streams[1:]:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode() for stream in streams[1:])
    return Done(int(ended.value.code or 0), out, err)


class Silent:
    """Watches a start and shows nothing of it."""

    def phase(self, name: str, expected: object = None) -> None: ...

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None: ...

    def note(self, text: str) -> None: ...


Shellcheck = Callable[..., None]


def in_process(capsys: pytest.CaptureFixture[str], *verb: str) -> Callable[..., tuple[int, str, str]]:
    """`corral` without a process of its own: its exit code, stdout and stderr for words (behind a verb)."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([*verb, *words])
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def shellcheck(tmp_path: Path) -> Shellcheck:
    """Fails with shellcheck's words about a script; further words are options for it."""
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip(NO_SHELLCHECK)

    def check(script: str, *options: str) -> None:
        path = tmp_path / "checked.sh"
        path.write_text(script)
        done = subprocess.run([program, *options, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    return check


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def corral(clean_home: Path, tiny_model: Path) -> Iterator[Corral]:
    install_stand_in(clean_home / "corral", STUB)
    command = Corral(clean_home, tiny_model, dict(os.environ))
    yield command
    if may_run(clean_home / "corral"):
        command("down", "--all")


def may_run(home: Path) -> bool:
    """Whether something that was started in a home may still be there."""
    if (home / "fleets").exists():
        return True
    for record in (home / "deployments").glob("*/deployment.json"):
        try:
            launch_id = json.loads(record.read_bytes())["launch_id"]
        except (OSError, ValueError, LookupError, TypeError):
            return True
        if marked(launch_id):
            return True
    return False


@pytest.fixture
def answering(corral: Corral) -> Corral:
    """`corral` with an engine that really answers."""
    python = Path(engines.expected("cpu").path) / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ENGINE}" "$@"\n')
    return corral

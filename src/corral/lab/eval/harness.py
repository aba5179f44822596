"""lm-evaluation-harness: its environment, and the process that runs tasks in it and asks for answers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, DataError, EngineError, NotFoundError, UsageError
from corral.engines import environments as engines
from corral.engines.locks import HARNESS, VERSIONS

VERSION = VERSIONS[HARNESS]
OWN_TASKS = resources.files("corral") / "data" / "tasks"
SCRIPT = resources.files("corral") / "engines" / "engine_side" / "harness.py"
_HUB = "Its data comes from the Hugging Face hub. Run it once where the hub is reached, with HF_HOME on storage that "
_HUB += "this machine sees too; or give the task data files of its own (docs/eval.md)."


@dataclass(frozen=True)
class HarnessDone:
    """The results of a run, as files in its folder."""

    samples: dict[str, str]  # by task
    ignored: tuple[str, ...]  # parameters of generation that vLLM does not have


def find() -> str | None:
    """The Python of the harness's environment, if it is installed."""
    engine = engines.find(HARNESS, VERSION)
    return engine.python if engine else None


def install(progress: Callable[[str], None], on_wait: Callable[[str], None]) -> str:
    """The Python of the harness's environment, installed first if need be."""
    return engines.install(HARNESS, VERSION, progress, on_wait).python


class Harness:
    """The harness at work; it ends with this process, whatever ends that."""

    def __init__(self, python: str, settings: dict[str, Any], log: Path) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI_"))}
        env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
        self._log, self.tasks = log, settings["tasks"]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, "-P", "-s", str(SCRIPT)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=env, text=True,
                start_new_session=True,  # Ctrl-C is this process's affair
            )  # fmt: skip
        self._tell(settings)

    def run(self, answer: Callable[[], Path]) -> HarnessDone:
        """Answer its requests until it has results."""
        while True:
            message = self._read()
            if "error" in message:
                raise _refusal(message, self._log)
            if "done" in message:
                return HarnessDone(message["done"], tuple(message["ignored"]))
            self._tell({"answers": str(answer())})

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        message: dict[str, Any] = json.loads(line)
        return message

    def _ended(self) -> EngineError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1][:300]}" if lines else ""
        return EngineError(f"lm-eval ended with code {self._process.wait()}{last}.", f"{self._log} has its output.")


def _refusal(message: dict[str, Any], log: Path) -> CorralError:
    text = message["text"]
    match message["error"]:
        case "task":
            near = message["nearest"]
            hint = f"Did you mean {', '.join(near)}? " if near else ""
            return NotFoundError(
                f"there is no task {text!r}.",
                f"{hint}Tasks are those of lm-eval {VERSION}, YAML files, and names in --include-path folders.",
            )
        case "file":
            return NotFoundError(f"there is no task file {text!r}.", "Check the path.")
        case "data":
            return DataError(f"the data of {message['task']} could not be loaded: {text}.", _HUB)
        case "task file":
            return DataError(f"{message['task']} cannot be used: {text}.", f"{log} has lm-eval's traceback.")
        case "prefix":
            return UsageError(
                f"{text}, and the server does not say which token comes first.",
                "Start it with vLLM's --enable-tokenizer-info-endpoint, as Corral does.",
            )
    return EngineError(f"lm-eval failed: {text}.", f"{log} has its traceback.")

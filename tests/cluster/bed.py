"""`corral` as a user runs it, with the engine in somebody's container."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.until import free_port, until

# what an image needs besides python3 to pass for vLLM's
FILES: dict[str, str | bytes | Path] = {
    "/stub_engine.py": ROOT / "tests" / "stub_engine.py",
    "/usr/bin/vllm": '#!/bin/sh\nexec python3 /stub_engine.py -m "$@"\n',
}
SECRET = "hf_" + "s3cret" * 5


def commands_of_everybody() -> list[bytes]:
    """The command lines of all processes of the machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


@dataclass
class Bed:
    """`corral` in a home of its own, with these words for its runtime."""

    home: Path
    model: Path
    env: dict[str, str]
    runtime: tuple[str, ...]
    image: str

    def corral(self, *words: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *words]
        done = subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def up(self, name: str, *words: str, code: int = 0, image: str = "", options: str = "") -> dict[str, Any]:
        done = self.corral(
            "up", str(self.model), "--name", name, *self.runtime, "--runtime-option", f"image={image or self.image}",
            "--port", str(free_port()), "--env", f"STUB_OPTIONS={options}", "--json", *words, code=code,
        )  # fmt: skip
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def status(self, name: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "corral", "status", name, "--json"]
        told: dict[str, Any] = json.loads(subprocess.run(command, env=self.env, capture_output=True).stdout)
        return told

    def ended(self, name: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            told = self.status(name)
            return told if told["state"] in ("failed", "stopped") else None

        found: dict[str, Any] = until(look)
        return found

    def folder(self, name: str) -> Path:
        return self.home / "corral" / "deployments" / name

    def pid_of_agent(self, name: str) -> int:
        return int(json.loads((self.folder(name) / "rank0" / "agent.json").read_text())["pid"])

    def close(self) -> None:
        subprocess.run([sys.executable, "-m", "corral", "down", "--all"], env=self.env, capture_output=True)

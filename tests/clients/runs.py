"""What runs in the clients' environments: calls of a library, and the lines of `corral env --for CLIENT`."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from corral.cli.client_lines import EndpointFacts, client_called, file_text, typed_line, variables_for
from tests.clients.environments import GROUP_OF, Environment, environment
from tests.conftest import ROOT
from tests.until import free_port, until

CALLS = ROOT / "tests" / "clients" / "calls"
QUIET = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Calls:
    """A file of calls, with the variables of a client; `behind` is a command that serves them, started first."""

    file: str
    row: str
    where: str = "gateway"  # server | gateway | fake
    client: str = ""  # as in pins.toml; the row's name unless it is said
    behind: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}-{self.behind or self.where}"

    def found(self) -> list[str]:
        return re.findall(r"^def (call_\w+)", (CALLS / f"{self.file}.py").read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """A client's own line, with some words replaced so that it is short, more options, and what it must print."""

    row: str
    shows: str
    more: str = ""
    words: tuple[tuple[str, str], ...] = ()
    client: str = ""

    @property
    def name(self) -> str:
        return self.row


CALLED = (
    Calls("openai_sdk", "openai", "server"),
    Calls("openai_sdk", "openai"),
    Calls("anthropic_sdk", "anthropic", "server"),
    Calls("anthropic_sdk", "anthropic"),
    Calls("langchain_chat", "langchain", client="langchain-openai"),
    Calls("litellm_sdk", "litellm"),
    Calls("llama_index_like", "llama-index", client="llama-index-llms-openai-like"),
    Calls("prometheus_scrape", "prometheus", "server", "prometheus-client"),
    Calls("prometheus_scrape", "prometheus", "gateway", "prometheus-client"),
    Calls("through", "openai", behind="litellm"),
    Calls("through", "openai", "server", behind="vllm-router"),
    Calls("batches", "openai", behind="batch serve"),
    Calls("agent_loops", "openai", "fake", "openai-agents"),
)
TYPED = (
    Line("llm", "Paris", "-o max_tokens 8 -o temperature 0", (("QUESTION", "'What is the capital of France?'"),)),
    Line("lm-eval", r"acc\D+1\b", f"--include_path {CALLS}", (("TASK", "capitals"),)),
    Line("inspect", r"accuracy:? +1\.0", "--max-tokens 8 --temperature 0 --display plain",
         (("TASK", "capitals.py"),), "inspect-ai"),
    Line("guidellm", r"generated 1 benchmark", "--disable-console-interactive",
         (("kind=sweep", "kind=synchronous"), ("kind=max_duration,seconds=60", "kind=max_requests,count=2"),
          ("prompt_tokens=256,output_tokens=128", "prompt_tokens=32,output_tokens=4"))),
    Line("aiperf", r"Request Count \(requests\) *│ *2\.", "--request-count 2 --concurrency 1 --isl 32 --osl 4"
         " --ui none --no-gpu-telemetry",
         (("aiperf profile", "env -u HF_HUB_OFFLINE aiperf profile"),)),  # offline it takes a folder for a repository
    Line("vllm-bench", r"Successful requests: +2\b", "--num-prompts 2 --random-input-len 32 --random-output-len 4",
         client="vllm"),
)  # fmt: skip


@dataclass
class Place:
    """What serves: for each of its names an endpoint; the engine's environment; a folder for what clients write."""

    facts: dict[str, EndpointFacts]
    keys: dict[str, str]
    engine: Path
    folder: Path
    commands: dict[str, str]  # of Corral's own servers
    env: dict[str, str]

    def environment_of(self, run: Calls | Line) -> Environment | None:
        """Where the client is installed; None for the engine's own."""
        client = run.client or run.row
        return environment(GROUP_OF[client][0], self.engine) if client in GROUP_OF else None

    def missing(self, run: Calls | Line) -> str:
        """Why the client, or what it goes through, cannot be installed here; empty where it is."""
        for client in (run.client or run.row, getattr(run, "behind", "")):
            if client in GROUP_OF:
                group, pinned = GROUP_OF[client]
                if why := environment(group, self.engine).missing.get(pinned):
                    return f"{pinned} for this platform: {why}"
        return ""

    def carried_out(self, run: Calls | Line) -> subprocess.CompletedProcess[str]:
        folder = self.folder / re.sub(r"\W", "-", run.name)
        folder.mkdir()
        return self._called(run, folder) if isinstance(run, Calls) else self._typed(run, folder)

    def _env(self, run: Calls | Line, where: str, folder: Path) -> dict[str, str]:
        told = variables_for(client_called(run.row), self.facts[where], self.keys[where])
        at = self.environment_of(run)
        path = f"{at.folder if at else self.engine}/bin:{os.environ['PATH']}"
        model = self.facts[where].model
        return {"HOME": str(folder), "HF_HOME": str(folder), "LLM_USER_PATH": str(folder), **QUIET, **told,
                "PATH": path, "MODEL": model}  # fmt: skip

    def _called(self, run: Calls, folder: Path) -> subprocess.CompletedProcess[str]:
        env = self._env(run, run.where, folder)
        env["SCRAPED"] = file_text(client_called("prometheus"), self.facts[run.where])
        server = None
        try:
            if run.behind:
                server, changed = self._served(run, folder)
                env |= changed
            command = ["python", str(CALLS / "run.py"), run.file]
            return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=500)
        finally:
            if server is not None:
                server.terminate()
                server.wait(60)

    def _served(self, run: Calls, folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
        """What stands between the client and the model, once it answers; the variables of the client that change."""
        port = free_port()
        if run.behind in self.commands:
            line, env, key = self.commands[run.behind], self.env, self.keys[run.behind]
        else:
            behind = Calls("", run.behind)
            line = typed_line(client_called(run.behind), self.facts[run.where])
            env, key = self._env(behind, run.where, folder), self.keys[run.where]
        line = f"exec {re.sub(r' --port [0-9]+', '', line)} --port {port}"
        with (folder / "server.log").open("wb") as log:
            server = subprocess.Popen(["bash", "-c", line], env=env, cwd=folder, stdout=log, stderr=log)

        def answers() -> bool:
            assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
            return answers_at(port)

        until(answers, f"an answer of {run.behind}", 240)
        model = "openai/" + self.facts[run.where].model if run.behind == "litellm" else self.facts[run.where].model
        return server, {"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": key, "MODEL": model}

    def _typed(self, run: Line, folder: Path) -> subprocess.CompletedProcess[str]:
        row, facts = client_called(run.row), self.facts["gateway"]
        if text := file_text(row, facts):
            (folder / text.split()[1].rstrip(",")).write_text(text)
        (folder / "capitals.jsonl").write_text(
            "".join(json.dumps({"country": name, "answer": n}) + "\n" for n, name in enumerate(("France", "Italy")))
        )
        shutil.copy(CALLS / "capitals.py", folder)
        line = typed_line(row, facts)
        for word, meant in run.words:
            assert word in line
            line = line.replace(word, meant)
        return subprocess.run(
            ["bash", "-c", f"{line} {run.more}"], env=self._env(run, "gateway", folder), cwd=folder,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500,
        )  # fmt: skip


def answers_at(port: int) -> bool:
    """Whether a server takes connections and says something."""
    to = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        to.request("GET", "/")
        return to.getresponse().status > 0
    except OSError:
        return False
    finally:
        to.close()

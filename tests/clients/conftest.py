"""One real vLLM with the default model, a gateway before it, and all clients, three at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from corral.cli.client_lines import EndpointFacts
from corral.fake.app import FakeOptions
from corral.fake.server import FakeServer
from tests.clients.runs import Calls, Line, Place
from tests.integration.conftest import BOUND, LAST_CORE, Corral, corral_of, free_port

Outcome = Callable[[Calls | Line], subprocess.CompletedProcess[str]]
SUMS = (("add", '{"a": 2, "b": 3}'), ("add", '{"a": 5, "b": 5}'))
AT_ONCE = 3  # the engine answers several in about the time of one


@pytest.fixture(scope="session")
def corral() -> Iterator[Corral]:
    command = corral_of()
    command.env[BOUND] = LAST_CORE  # two threads of the engine would wait for each other while clients are imported
    command.run("engine", "install", "cpu")
    yield command
    command.run("down", "--all", check=False)


@pytest.fixture(scope="session")
def place(corral: Corral, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    told = corral.json("up", "--store-responses", "--port", free_port())["endpoint"]
    root = told["base_url"].removesuffix("/v1")
    server = EndpointFacts(root, told["model"], told["key_file"], str(corral.home / "models" / "smollm2"))
    key = Path(told["key_file"]).read_text().strip()
    folder = tmp_path_factory.mktemp("clients")
    (folder / "batch-key").write_text(batch_key := "b" * 40)
    (folder / "batch-key").chmod(0o600)
    with (
        FakeServer(FakeOptions(tool_calls=SUMS)) as fake,
        corral.start("gateway", "smollm2", "--port", free_port()) as gateway,
    ):
        assert gateway.stderr
        address = gateway.stderr.readline().split()[0].removesuffix("/v1")
        assert urlsplit(address).port, address
        facts = {"server": server, "gateway": replace(server, root=address)}
        facts["fake"] = EndpointFacts(fake.url, "fake", None, "")
        batch = (f"{sys.executable} -m corral batch serve --url {address} --key-file {told['key_file']}"
                 f" --serve-key-file {folder}/batch-key --folder {folder}/batches")  # fmt: skip
        keys = {"server": key, "gateway": key, "fake": "", "batch serve": batch_key}
        yield Place(facts, keys, corral.engine, folder, {"batch serve": batch}, corral.env)
        gateway.terminate()


@pytest.fixture(scope="session")
def outcome(place: Place, request: pytest.FixtureRequest) -> Iterator[Outcome]:
    """How a run ended; those of all selected tests are begun at once, in their order."""
    wanted = [item.callspec.params["run"] for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun: dict[Calls | Line, Future[subprocess.CompletedProcess[str]]] = {}
        for run in dict.fromkeys(wanted):
            if not place.missing(run):
                begun[run] = pool.submit(place.carried_out, run)

        def ended(run: Calls | Line) -> subprocess.CompletedProcess[str]:
            return begun[run].result()

        yield ended
        pool.shutdown(cancel_futures=True)

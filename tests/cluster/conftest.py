"""Real sshd, SLURM and containers, with stand-in engines."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.cluster.ssh_bench import Bench, open_bench
from tests.tiny_llama import make_tiny_llama
from tests.until import until

# Begun first, so that no worker is alone with a long one at the end (`--no-loadscope-reorder` keeps this order); they
# wait for time limits of jobs, for nodes that SLURM gives up, for TCP. What is not named here is short.
LONG_FIRST = (
    "slurm_batch", "slurm", "upgrade", "slurm_handover", "storage", "ssh_lost", "slurm_hand", "pull", "ssh",
    "ssh_storage", "ssh_fleet", "slurm_fleet", "documents", "containers", "ssh_refused", "testbed",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fixtures ask whether their test failed: what it left behind is taken away, so that no other fails for it."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_bench(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_of_a_failure_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Its second try, and the tests after it, find the nodes as it found them."""
    made = request.getfixturevalue("bench") if "bench" in request.fixturenames else None
    yield
    if made is not None and request.node.stash.get(FAILED, False):
        made.mend()
        made.run("down", "--all")


@pytest.fixture
def ready(bench: Bench, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a deployment on both nodes that is ready; with the options that a test gives."""
    name = request.node.name[:60]
    done = bench.up(name, *getattr(request, "param", ()))
    assert done.returncode == 0, done.stderr
    yield name
    bench.mend()
    until(lambda: bench.run("down", name).returncode == 0, "its end")  # a node needs a moment to be back
    bench.nothing_left()

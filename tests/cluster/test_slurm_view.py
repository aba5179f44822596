"""A real SLURM job seen from the login node: its nodes by name, its number and end; and one that was pasted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_slurm import SMALL, Login, on_two_nodes, request
from tests.testbed import missing
from tests.until import until

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    with on_two_nodes(tmp_path_factory.mktemp("slurm-view")) as found:
        yield found


def test_status_names_nodes_job_and_end(login: Login) -> None:
    login.up("pair", "--nodes", "2")
    found = login.status("pair")
    assert sorted(found["nodes"]) == ["n1", "n2"]
    assert all(member["joined"] for member in found["members"])
    assert found["job"]["id"] == login.job("pair")
    assert found["job"]["drains_s"] > 0
    lines = login.corral("status", "pair").stdout
    assert "2 of 2 joined" in lines
    assert f"rank 0 {found['nodes'][0]} (head)" in lines
    assert f"{login.job('pair')}, " in lines
    assert "until it drains" in lines
    assert login.corral("down", "pair").returncode == 0


def test_what_is_printed_is_pasted_and_serves(login: Login) -> None:
    words = ["up", str(login.model), "--name", "by hand", *SMALL, "--nodes", "2", "--time", "10:00"]
    printed = login.corral(*words, "--dry-run", "--shell")
    assert printed.returncode == 0, printed.stderr
    assert f"{login.model} --served-model-name" in printed.stdout  # the engine's command is to be seen
    done = login.hosts.exec("login", ["bash"], env=login.env, input=printed.stdout, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    job = done.stdout.rsplit(None, 1)[-1]
    try:
        (folder,) = (login.home / "pasted").glob("by*")
        place: Path = folder / "endpoint.json"
        until(place.is_file, "the endpoint")
        endpoint = json.loads(place.read_text())
        key = Path(endpoint["key_file"]).read_text().strip()

        def answers() -> bool:
            try:
                return request(endpoint["base_url"], key) == 200
            except OSError:
                return False

        until(answers, "an answer")
        assert request(endpoint["base_url"]) == 401
    finally:
        login.slurm.run("scancel", job)

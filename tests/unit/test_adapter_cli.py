"""`corral up --adapters` and `corral adapter`: a fleet and a deployment whose servers read the folder."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from corral.client.client import Client, run
from corral.client.endpoint import Endpoint
from corral.deploy.targets.ssh import SshOptions, SshTarget
from corral.serve.resolve import resolve
from tests.adapters import make_adapter
from tests.tiny_llama import HEAD_DIM, HEADS, HIDDEN
from tests.unit.conftest import Corral
from tests.until import until

QUERY = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN)}
PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """32 adapters."""
    make_adapter(tmp_path / "mine" / "adapter-0", rank=2, shapes=QUERY)
    for number in range(1, 32):
        shutil.copytree(tmp_path / "mine" / "adapter-0", tmp_path / "mine" / f"adapter-{number}")
    return tmp_path / "mine"


def listed(endpoint: Endpoint) -> set[str]:
    with_key = Client(endpoint)
    try:
        return {card["id"] for card in with_key.page_sync("/v1/models", timeout_s=30).json()["data"]}
    finally:
        with_key.close_sync()


async def asked(endpoint: Endpoint, path: str, bodies: list[dict[str, Any]]) -> Counter[int]:
    """The status of each answer; 16 requests at once."""
    found: Counter[int] = Counter()
    rest = list(bodies)
    async with Client(endpoint) as client:

        async def work() -> None:
            while rest:
                found[(await client.page(path, rest.pop(), timeout_s=60)).status] += 1

        await asyncio.gather(*(work() for _ in range(16)))
    return found


def completions(endpoint: Endpoint, *names: str) -> Counter[int]:
    bodies = [{"model": name, "prompt": f"for {name}", "max_tokens": 4} for name in names]
    return run(asked(endpoint, "/v1/completions", bodies))


def test_32_adapters_on_a_fleet_of_two(answering: Corral, folder: Path, tmp_path: Path) -> None:
    up = ("up", str(answering.model), "--name", "herd", "--replicas", "2", "--context", "128")
    done = answering(*up, "--adapters", str(folder))
    assert done.code == 0, done.err
    endpoint, names = resolve("herd"), {one.name for one in folder.iterdir()}
    assert endpoint.model == answering.model.name  # the model itself, not an adapter
    until(lambda: listed(endpoint) == {endpoint.model, *names}, "all adapters in the gateway's list")
    assert completions(endpoint, *(10 * [endpoint.model, *sorted(names)])) == {200: 330}
    for path in PATHS:
        assert run(asked(endpoint, path, [{"lora_name": "x", "lora_path": str(tmp_path)}])) == {403: 1}

    make_adapter(tmp_path / "poet", rank=4, shapes=QUERY)
    added = answering("adapter", "add", "poet", str(tmp_path / "poet"), "--json").json()
    assert added == {"name": "poet", "rank": 4, "modules": ["q_proj"], "deployment": "herd", "servers": 2}
    until(lambda: "poet" in listed(endpoint), "the new adapter in the gateway's list")
    assert completions(endpoint, "poet") == {200: 1}
    rows = {row["name"]: row for row in answering("adapter", "list", "-d", "herd", "--json").json()}
    assert set(rows) == {"poet", *names}
    assert {row["servers"] for row in rows.values()} == {2}
    assert answering("adapter", "remove", "poet", "-d", "herd").out == "poet: listed by 0 of 2 servers\n"
    until(lambda: completions(endpoint, "poet") == {404: 1}, "the adapter to be gone")
    assert completions(endpoint, "adapter-3") == {200: 1}


def test_what_cannot_be_added_leaves_nothing_and_what_is_removed_no_copy(
    answering: Corral, folder: Path, tmp_path: Path
) -> None:
    assert answering("up", str(answering.model), "--name", "one", "--adapters", str(folder)).code == 0
    make_adapter(tmp_path / "high", rank=64, shapes=QUERY)
    make_adapter(tmp_path / "wide", shapes={"self_attn.q_proj": (HIDDEN, HIDDEN)})
    make_adapter(tmp_path / "pickled")
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    before = sorted(folder.rglob("*"))
    for words, says in (
        (("add", "high", str(tmp_path / "high")), "its rank is 64, and max_lora_rank is 8"),
        (("add", "wide", str(tmp_path / "wide")), "does not fit"),
        (("add", "pickled", str(tmp_path / "pickled")), "has adapter_model.bin"),
        (("add", "../up", str(tmp_path / "high")), "cannot be the name"),
        (("add", "adapter-0", str(tmp_path / "high")), "already"),
        (("add", answering.model.name, str(tmp_path / "high")), "already"),
        (("add", "x", str(tmp_path / "nothing")), "there is no folder"),
        (("remove", "adapter-99"), "has no adapter 'adapter-99'"),
        (("remove", "../mine"), "has no adapter"),
    ):
        done = answering("adapter", *words)
        assert done.code
        assert says in done.err, done.err
    assert sorted(folder.rglob("*")) == before

    shutil.copytree(folder, tmp_path / "copy")
    launch = next((answering.home / "corral" / "deployments" / "one").glob("launch*.json"))
    spec = json.loads(launch.read_text())
    spec["ranks"][0]["env"]["CORRAL_ADAPTERS"] = str(tmp_path / "copy")  # as on a node that does not see this disk
    launch.write_text(json.dumps(spec))
    assert answering("adapter", "remove", "adapter-7").code == 0
    assert not (folder / "adapter-7").exists()
    assert not (tmp_path / "copy" / "adapter-7").exists()
    assert (tmp_path / "copy" / "adapter-8").exists()


def test_a_deployment_without_adapters_says_so(answering: Corral) -> None:
    assert answering("up", str(answering.model), "--name", "plain").code == 0
    done = answering("adapter", "list", "-d", "plain")
    assert done.code
    assert "'plain' was started without adapters" in done.err
    assert "--adapters DIR" in done.err


def test_folders_of_one_name_do_not_meet_on_a_node(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "elsewhere" / "mine")
    target = SshTarget(SshOptions(hosts=("n1",), home="/srv/corral"))
    places = {target.placed(folder), target.placed(Path(other))}
    assert len(places) == 2
    assert all(place.startswith("/srv/corral/adapters/") for place in places)
    (tmp_path / "model").mkdir()
    assert target.placed(tmp_path / "model") == "/srv/corral/models/model"

"""The examples of docs/extending.md, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from corral.base.errors import DataError, UsageError
from corral.base.record import load_json
from corral.cli.options import chosen_target
from corral.deploy.deployment.folder import all_folders, open_folder
from corral.deploy.lifecycle import bringup, deployments, rendering
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.lifecycle.deployments import Record
from corral.deploy.profile.folders import user_folder
from corral.deploy.profile.merging import merged
from corral.deploy.profile.profile import load_profile
from corral.deploy.targets.keys import TARGETS
from corral.engines.runtimes.base import RUNTIMES
from tests.conftest import ROOT
from tests.unit.conftest import Corral, Silent
from tests.until import free_port

PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the page as modules, and its rows in the tables."""
    for block in BLOCKS:
        if named := re.match(r"# src/corral/(\S+)\.py\n", block):
            name = "corral." + named[1].replace("/", ".")
            module = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(block, name, "exec"), module.__dict__)
        else:
            row = re.match(r'(\w+)\["(\w+)"\] = "(\S+)"', block)
            assert row, block
            monkeypatch.setitem({"RUNTIMES": RUNTIMES, "TARGETS": TARGETS}[row[1]], row[2], row[3])


@pytest.mark.usefixtures("extended")
def test_a_new_runtime_is_one_file_and_one_row(corral: Corral) -> None:
    request = DeployRequest(
        model=str(corral.model), name="polite", runtime="polite", runtime_options={"niceness": 7}, port=None
    )
    found = bringup.bring_up(request, Silent())
    try:
        assert found.state == "ready"
        assert found.endpoint
        engine = json.loads(open_folder("polite").rank(0).engine.read_text())
        lower = os.getpriority(os.PRIO_PROCESS, engine["pid"]) - os.getpriority(os.PRIO_PROCESS, 0)
        assert lower == 7
    finally:
        deployments.stop(open_folder("polite"))
    with pytest.raises(UsageError, match="nicenes"):
        rendering.dry_run(DeployRequest(model=str(corral.model), runtime="polite", runtime_options={"nicenes": 1}))


@pytest.mark.usefixtures("extended")
def test_a_new_target_is_one_file_and_one_row(corral: Corral) -> None:
    options = {"first_port": 19000, "last_port": 19400}
    found = bringup.bring_up(
        DeployRequest(model=str(corral.model), name="desk", target="desk", target_options=options), Silent()
    )
    try:
        assert found.state == "ready"
        assert found.endpoint
        assert 19000 <= int(found.endpoint.root.rpartition(":")[2]) <= 19400
        assert deployments.status(open_folder("desk")).target == "desk"
    finally:
        assert deployments.stop(open_folder("desk")).state == "stopped"


@pytest.mark.usefixtures("extended")
def test_a_new_target_has_a_table_in_profiles_and_flags(corral: Corral) -> None:
    path = user_folder() / "mine.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('target = "desk"\n[desk]\nfirst_port = 19000\nlast_port = 19400\n')
    profile = load_profile("mine")
    request = merged(profile, {"model": str(corral.model), "target_options": {"first_port": 19100}})
    assert (request["target"], request["target_options"]) == ("desk", {"first_port": 19100, "last_port": 19400})
    assert chosen_target({"target_option_first_port": 19001}, None) == ("desk", {"first_port": 19001})
    path.write_text('target = "desk"\n[desk]\nfirst_prot = 1\n')
    with pytest.raises(DataError, match="first_prot"):
        load_profile("mine")


@pytest.fixture
def with_desk(answering: Corral, tmp_path: Path) -> Corral:
    """`corral` from a copy of its sources with the page's file and its row; nothing else is touched."""
    sources = tmp_path / "sources"
    shutil.copytree(ROOT / "src" / "corral", sources / "corral", ignore=shutil.ignore_patterns("__pycache__"))
    for block in BLOCKS:
        if named := re.match(r"# src/(corral/deploy/targets/\S+)\n", block):
            (sources / named[1]).write_text(block)
        elif block.startswith("TARGETS"):
            with (sources / "corral" / "deploy" / "targets" / "keys.py").open("a") as file:
                file.write(f"\n{block}")
    return replace(answering, env={**answering.env, "PYTHONPATH": str(sources)})


def test_a_new_target_serves_and_runs_batches_through_a_profile(with_desk: Corral, tmp_path: Path) -> None:
    port = free_port()
    path = user_folder() / "mine.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'target = "desk"\n[desk]\nfirst_port = {port}\nlast_port = {port + 20}\n')
    assert "--first-port" in with_desk.apart("up", "--help").out
    up = with_desk.apart("up", str(with_desk.model), "--on", "mine", "--name", "served", "--json")
    assert up.code == 0, up.err
    assert port <= int(urlsplit(up.json()["endpoint"]["base_url"]).port or 0) <= port + 20
    assert with_desk.apart("status", "served", "--json").json()["target"] == "desk"
    assert with_desk.apart("down", "served").code == 0
    given, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"id": n, "prompt": f"Row {n}"}) + "\n" for n in range(20)))
    batch = with_desk.apart("batch", str(given), "-o", str(output), "--start", str(with_desk.model), "--on", "mine")
    assert batch.code == 0, batch.err
    assert len(output.read_text().splitlines()) == 20
    started = [folder for folder in all_folders() if folder.name.startswith("batch-")]
    assert [load_json(Record, folder.record).target for folder in started] == ["desk"]

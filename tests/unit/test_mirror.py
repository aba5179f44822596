"""Logs and journals of nodes elsewhere, brought here piece by piece: as `node/remote.py` sends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corral.base.bundle import bundle
from corral.deploy.deployment.events import last_state
from corral.deploy.deployment.folder import RankFolder
from corral.deploy.targets.ssh_reports import NodeReport, mirror, mirrored_sizes, read_report
from corral.node.processes import identity

REMOTE = bundle("node/remote.py")


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, RankFolder]:
    (tmp_path / "there" / "rank0").mkdir(parents=True)
    return tmp_path / "there" / "rank0", RankFolder(tmp_path / "here" / "rank0")


def bring(there: Path, here: RankFolder) -> NodeReport:
    sizes = mirrored_sizes(here)
    order = json.dumps({"folder": str(there.parent), "rank": 0, "files": sizes})
    command = [sys.executable, "-I", "-c", REMOTE, "report", order]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    found = read_report(done.stdout, "a", sizes)
    mirror(here, found)
    return found


def test_pieces_make_the_whole_and_only_what_is_new_travels(sides: tuple[Path, RankFolder]) -> None:
    there, here = sides
    (there / "events.jsonl").write_text('{"t": 1, "kind": "state", "rank": 0, "elapsed_s": 0, "state": "starting"}\n')
    (there / "engine.log").write_text("one\n")
    bring(there, here)
    with (there / "engine.log").open("a") as log:
        log.write("two\n")
    found = bring(there, here)
    assert found.pieces is not None
    assert found.pieces["engine.log"].offset == 4
    assert here.log.read_text() == "one\ntwo\n"
    assert here.log.stat().st_mode & 0o077 == 0
    last = last_state(here.events)
    assert last
    assert last.get("state") == "starting"


def test_a_log_that_is_far_ahead_is_brought_from_its_end_and_offsets_agree(sides: tuple[Path, RankFolder]) -> None:
    there, here = sides
    lines = "".join(f"line {number}\n" for number in range(900_000))
    (there / "engine.log").write_text(lines)
    for _ in range(3):
        bring(there, here)
    assert here.log.stat().st_size == len(lines)
    brought = here.log.read_bytes().lstrip(b"\0")
    assert len(brought) == 4 << 20
    assert lines.encode().endswith(brought)


def test_a_log_that_was_cut_short_begins_anew(sides: tuple[Path, RankFolder]) -> None:
    there, here = sides
    (there / "engine.log").write_text("a long first life\n")
    bring(there, here)
    (there / "engine.log").write_text("short\n")
    bring(there, here)
    assert here.log.read_text() == "short\n"


@pytest.mark.parametrize("lives", [True, False])
def test_the_secrets_of_an_agent_that_was_killed_go(sides: tuple[Path, RankFolder], lives: bool) -> None:
    there, here = sides
    secrets = [there.parent / name for name in ("key", "token")]
    for path in secrets:
        path.write_text("secret")
    agent = identity(os.getpid())
    (there / "agent.json").write_text(json.dumps(agent if lives else {**agent, "start_ticks": 1}))
    assert bring(there, here).alive is lives
    assert [path.exists() for path in secrets] == [lives, lives]
    (there / "agent.json").unlink()  # before it has begun
    for path in secrets:
        path.write_text("secret")
    bring(there, here)
    assert all(path.exists() for path in secrets)


def test_a_node_that_has_forgotten_it_changes_nothing(sides: tuple[Path, RankFolder], tmp_path: Path) -> None:
    there, here = sides
    (there / "engine.log").write_text("kept\n")
    bring(there, here)
    there.rename(tmp_path / "gone")
    assert bring(there, here).missing
    assert here.log.read_text() == "kept\n"

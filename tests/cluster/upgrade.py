"""Another version of Corral takes over a fleet under 64 streams: `python -m tests.cluster.upgrade [COMMIT]`, as root.

The keeper, the gateway and the agents of four members, on four hosts with sshd, are of the earlier version: a commit,
as `git archive` has it, or a copy of this version with a lower number. The keeper is killed, and the later version's
takes its place: it leaves engines and agents alone, replaces the gateway by handing over its socket, and starts one
more member, whose agent is its own. Then a copy with a higher number, which writes a key that this version does not
know, takes over from this one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from corral import __version__
from tests.cluster.fleet_faults import NODES, Herd, Streams, during, open_herd
from tests.conftest import ROOT
from tests.until import polled, until

SOURCE = ROOT / "src"
PATIENCE_S = 240.0
NEW_KEY = '    novelty: str = "a key of a later version"\n'


def copied(folder: Path, version: str, later: bool = False) -> Path:
    """This version's modules with another number; `later`: with a key that this one does not know, in two records."""
    made = folder / version
    shutil.copytree(SOURCE, made, ignore=shutil.ignore_patterns("__pycache__", "data"))
    (made / "corral" / "data").symlink_to(SOURCE / "corral" / "data")
    _edit(made / "corral" / "__init__.py", f'__version__ = "{__version__}"', f'__version__ = "{version}"')
    if later:
        record = made / "corral" / "serve" / "fleet" / "record.py"
        _edit(record, "    never_ready: bool = False", NEW_KEY + "    never_ready: bool = False")
        _edit(record, "    closed: str = ", NEW_KEY + "    closed: str = ")
        merged = "if key is not None or one != _default(field):\n"
        _edit(made / "corral" / "base" / "record.py", merged, merged.replace(":", ' or field.name == "novelty":'))
    return made


def _edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1, f"{path}: {before!r}"
    path.write_text(text.replace(before, after))


STAND_IN = """
import contextlib, sys
from pathlib import Path
from tests.stand_in import install_stand_in
with contextlib.suppress(FileExistsError):
    install_stand_in(Path(sys.argv[1]), Path("tests/streaming_engine.py").resolve(), python="/usr/bin/python3")
"""


def archived(folder: Path, commit: str, home: Path) -> Path:
    """The modules of a commit; its engine, which has a name of its own where its pins differ, is a stand-in too."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder / commit, filter="data")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{folder}/{commit}/src", f"{folder}/{commit}"])}
    subprocess.run([sys.executable, "-c", STAND_IN, str(home)], cwd=folder / commit, env=env, check=True)
    return folder / commit / "src"


def use(herd: Herd, source: Path) -> None:
    """From now on commands are those of another version."""
    herd.env["PYTHONPATH"] = str(source)


@dataclass
class Upgraded:
    """What one change of versions did."""

    takeover_s: (
        float | None
    )  # from the end of the keeper until the other version's gateway served; None: it never did
    answers: int
    failed: list[str]
    cut: int
    refused: dict[str, str]  # commands of the earlier version that failed afterwards


def upgrade(herd: Herd, endpoint: Any, before: Path, after: Path, members: int) -> Upgraded:
    """Let one version take over a fleet with that many members from another one, and start one more."""
    agents, seen = launches(herd), Upgraded(None, 0, [], 0, {})

    def change(streams: Streams) -> None:
        ((_, gateway),) = herd.gateways().items()
        os.kill(keeper(herd), signal.SIGKILL)
        began = time.monotonic()
        use(herd, after)
        herd.scale(members + 1)
        if polled(lambda: gateway not in herd.gateways().values() and herd.gateways(), PATIENCE_S / 4):
            seen.takeover_s = time.monotonic() - began
        streams.go_on()
        until(lambda: herd.is_whole(members + 1), "one more member", PATIENCE_S)
        use(herd, before)
        for words in (("ps",), ("status", "herd"), ("scale", "herd", str(members + 1))):
            done = herd.corral(*words)
            if done.returncode:
                seen.refused[" ".join(words)] = done.stderr.strip()
        use(herd, after)

    streams = during(endpoint, change)
    assert {name: launch for name, launch in launches(herd).items() if name in agents} == agents
    seen.answers, seen.failed, seen.cut = streams.whole, streams.failed, streams.cut
    return seen


def keeper(herd: Herd) -> int:
    return int(json.loads((herd.folder / "fleets" / "herd" / "keeper.lock").read_text())["pid"])


def launches(herd: Herd) -> dict[str, str]:
    """The members' launches: a member that was started again has another one."""
    found = {}
    for path in (herd.folder / "deployments").glob("herd-*/deployment.json"):
        with contextlib.suppress(OSError, ValueError):
            found[path.parent.name] = str(json.loads(path.read_text()).get("launch_id"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    commit, bad = parser.parse_args().commit, False
    with TemporaryDirectory() as name, open_herd(Path(name)) as herd:
        first = archived(Path(name), commit, herd.folder) if commit else copied(Path(name), "0.0.9")
        steps = [(first, SOURCE), (SOURCE, copied(Path(name), "9.0.0", later=True))]
        use(herd, first)
        endpoint, members = herd.up(), len(NODES)
        for before, after in steps:
            seen = upgrade(herd, endpoint, before, after, members)
            members += 1
            bad = bad or bool(seen.failed)
            took = f"gateway after {seen.takeover_s:.1f} s" if seen.takeover_s else "the gateway stays"
            lost = f"{len(seen.failed)} failed before the first byte, {seen.cut} cut after it"
            print(f"{before} → {after}: {took}; {seen.answers:,} answers, {lost}", flush=True)
            for text in (*seen.failed[:3], *(f"{words}: {why}" for words, why in seen.refused.items())):
                print(f"    {text}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()

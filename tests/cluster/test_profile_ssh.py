"""A profile's hosts, over real sshd: one name brings up two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_ssh import NODES, Bench, bench
from tests.testbed import missing

__all__ = ["bench"]
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def test_two_nodes_by_the_name_of_a_profile(bench: Bench) -> None:
    file = Path(bench.env["HOME"]) / ".config" / "corral" / "profiles" / "pair.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    hosts = ", ".join(f'"{name}"' for name in NODES)
    file.write_text(f'target = "ssh"\n[ssh]\nhosts = [{hosts}]\n[defaults]\nmodel = "{bench.model}"\ncontext = 128\n')
    assert bench.run("profile", "check", "pair").stdout == "pair: ok\n"
    done = bench.run("up", "--on", "pair", "--name", "pair")
    assert done.returncode == 0, done.stderr
    assert bench.status("pair")["state"] == "ready"
    assert all(bench.engines(host) for host in NODES)
    assert bench.run("down", "pair").returncode == 0
    bench.nothing_left()

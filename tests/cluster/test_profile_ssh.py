"""A profile's hosts, over real sshd: one name brings up two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.ssh_bench import NODES, Bench
from tests.testbed import missing
from tests.until import until

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


def test_a_key_and_a_configuration_of_the_profiles_own_are_kept(bench: Bench) -> None:
    """`ssh -i KEY -F CONFIG`: nothing but the deployment says how its nodes are reached."""
    file = Path(bench.env["HOME"]) / ".config" / "corral" / "profiles" / "keyed.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    config = Path(bench.env["HOME"]) / "cluster-config"
    lines = bench.hosts.ssh_config.read_text().splitlines(keepends=True)
    key = next(line.split()[1] for line in lines if line.split()[:1] == ["IdentityFile"])
    config.write_text("".join(line for line in lines if "IdentityFile" not in line))
    hosts = ", ".join(f'"{name}"' for name in NODES)
    text = f'target = "ssh"\n[ssh]\nhosts = [{hosts}]\nidentity = "{key}"\nconfig = "{config}"\n'
    file.write_text(text + f'[defaults]\nmodel = "{bench.model}"\n')
    plain = {"CORRAL_SSH": "ssh"}
    assert bench.run("up", "--hosts", ",".join(NODES), str(bench.model), "--name", "no", **plain).returncode != 0
    done = bench.run("up", "--on", "keyed", "--name", "keyed", **plain)
    assert done.returncode == 0, done.stderr
    file.unlink()  # the deployment itself knows
    until(lambda: '"state": "ready"' in bench.run("status", "keyed", "--json", **plain).stdout, "its nodes' answer")
    done = bench.run("down", "keyed", **plain)
    assert done.returncode == 0, done.stderr
    bench.nothing_left()

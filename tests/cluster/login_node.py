"""How long a fleet has no gateway when its login node is lost: `python -m tests.cluster.login_node`. As root.

The fleet's jobs run in SLURM. Its keeper and its gateway run on one host; on the login host a second keeper stands by
(`corral fleet keep --stand-by`, which is what `corral service` starts). The first host loses its power.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster.test_slurm_handover import SMALL, Cluster
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm
from tests.until import until

FIRST = "n3"
ANYWHERE = "0.0.0.0"


def answers(cluster: Cluster, host: str) -> bool:
    """Whether a gateway of the fleet answers on a host."""
    folder = cluster.home / "fleets" / "herd"
    key = (folder / "key").read_text().strip()
    for path in folder.glob("gateways/*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            url = f"http://{cluster.hosts.address(host)}:{json.loads(path.read_text())['port']}/v1/models"
            asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(asked, timeout=2) as answer:
                return bool(answer.status == 200)
    return False


def on(cluster: Cluster, host: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "corral", *words]
    return cluster.hosts.exec(host, command, env=cluster.env, check=False, timeout=240)


def measure(cluster: Cluster) -> dict[str, float]:
    up = on(cluster, FIRST, "up", str(cluster.model), "--name", "herd", "--replicas", "1", *SMALL, "--time", "30:00",
            "--slurm", f"exclude={FIRST}", "--bind", ANYWHERE, "--json")  # fmt: skip
    assert up.returncode == 0, up.stderr
    standby = cluster.start("fleet", "keep", "--stand-by", "herd")
    until(lambda: answers(cluster, FIRST), "the first gateway")
    time.sleep(10)  # the second keeper has seen a living one
    load, began = os.getloadavg()[0], time.monotonic()
    cluster.hosts.power_off(FIRST)
    until(lambda: answers(cluster, "login"), "a gateway on the login host", 240)
    seen = {"load": round(load, 1), "gateway_s": round(time.monotonic() - began, 1)}
    told = json.loads(on(cluster, "login", "status", "herd", "--json").stdout)
    assert "on login" in told["keeper"], told["keeper"]
    cluster.interrupt("fleet keep")
    standby.communicate(timeout=120)
    return seen


def main() -> None:
    with TemporaryDirectory(prefix="login-") as name:
        folder = Path(name)
        with Hosts(folder / "hosts", ("login", "n1", "n2", FIRST), shared=[folder]) as hosts, Slurm(hosts) as slurm:
            cluster = Cluster(hosts, slurm, folder)
            try:
                print(json.dumps(measure(cluster)))
            finally:
                cluster.corral("down", "--all")


if __name__ == "__main__":
    main()

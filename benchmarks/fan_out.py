"""A 200 MB file onto 8 simulated hosts, one of them killed in the middle, against one copy to one host.

    python benchmarks/fan_out.py [--hosts 8] [--mb 200] [--uplink-mb 20]

Hosts are folders behind a fake ssh; couriers, HTTP and hashes are real. All share this machine's cores, so each
courier's uplink is held to a rate at which the network, not the processor, is what limits: that is the case the chain
is made for. With `--uplink-mb 0` nothing is held back and the cores decide. Fails when a copy is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fake_ssh import make_fake_ssh

from corral.base.ssh import Ssh
from corral.deploy.transfer.courier_group import Origin, Outcome, Progress
from corral.deploy.transfer.spread import spread


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(
    root: Path, hosts: list[str], folder: str, uplink: float, victim: str = ""
) -> tuple[float, dict[str, Outcome]]:
    killed: list[str] = []

    def report(step: Progress) -> None:
        if step.host == victim and step.what == "receiving" and step.done_bytes > step.total_bytes / 2 and not killed:
            killed.append(victim)
            os.kill(int((root / victim / "pids").read_text().split()[-1]), signal.SIGKILL)

    began = time.monotonic()
    source = Origin("~/model", host="source")
    outcomes = spread(Ssh(), hosts, source, folder, {}, report, uplink_bytes_per_s=uplink)
    took = time.monotonic() - began
    assert bool(killed) == bool(victim)
    return took, outcomes


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--hosts", type=int, default=8)
    options.add_argument("--mb", type=int, default=200)
    options.add_argument("--uplink-mb", type=float, default=20)
    options.add_argument("--limit", type=float, default=2.5, help="largest ratio that passes")
    given = options.parse_args()
    root = Path(tempfile.mkdtemp(prefix="fan-out-"))
    hosts = [f"n{number}" for number in range(given.hosts)]
    os.environ["CORRAL_SSH"] = make_fake_ssh(root, ["source", *hosts])
    os.environ["HOME"] = str(root / "source")
    try:
        (root / "source" / "model").mkdir()
        original = root / "source" / "model" / "model.safetensors"
        with original.open("wb") as file:
            for _ in range(given.mb):
                file.write(os.urandom(1_000_000))
        wanted = sha256(original)
        run(root, ["n0"], "~/warm", given.uplink_mb * 1e6)  # the source's hash is known from here on
        one, _ = run(root, ["n0"], "~/one", given.uplink_mb * 1e6)
        whole, outcomes = run(root, hosts, "~/whole", given.uplink_mb * 1e6)
        assert all(outcome.ok for outcome in outcomes.values())
        victim = hosts[len(hosts) // 2]
        broken, outcomes = run(root, hosts, "~/broken", given.uplink_mb * 1e6, victim)
        failed = [host for host, outcome in outcomes.items() if not outcome.ok]
        assert failed == [victim], failed
        for host in hosts:
            assert sha256(root / host / "whole" / "model.safetensors") == wanted
            assert (sha256(root / host / "broken" / "model.safetensors") == wanted) if host != victim else True
        assert not (root / victim / "broken" / "model.safetensors").exists()
        again, outcomes = run(root, hosts, "~/broken", given.uplink_mb * 1e6)
        assert sha256(root / victim / "broken" / "model.safetensors") == wanted
        moved = outcomes[victim].moved_bytes
    finally:
        shutil.rmtree(root)
    print(
        f"{given.mb} MB, uplinks of {given.uplink_mb:g} MB/s (0: unlimited): one host {one:.1f} s, "
        f"{given.hosts} hosts {whole:.1f} s (x{whole / one:.2f}), with one killed half-way {broken:.1f} s "
        f"(x{broken / one:.2f}), nothing corrupted; the rerun moved {moved / 1e6:.0f} MB in {again:.1f} s"
    )
    if max(whole, broken) > given.limit * one:
        sys.exit(f"more than {given.limit:g} times one copy")


if __name__ == "__main__":
    main()

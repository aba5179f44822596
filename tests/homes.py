"""Homes that earlier versions of Corral wrote, kept under `tests/data/homes/`.

`python -m tests.homes COMMIT` writes one: in a checkout of that commit its own commands run with its own stand-ins,
and what they left is packed, with placeholders for the home and the host. A new format of a file gets a home of the
last commit before it.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from corral.node.processes import boot_id

ROOT = Path(__file__).parent.parent
KEPT = Path(__file__).parent / "data" / "homes"
HOME, HOST = "@HOME@", "@HOST@"
LEFT_OUT = ("engines", "cache", "node", "rows-0.sock")  # programs, sockets
WRITER = r"""
import json, os, shutil, time
from pathlib import Path
from tests.fake_slurm import NODES, PARTITIONS, print_text
from tests.until import until

SLURM = {
    "sbatch": "cat >/dev/null; echo 77",
    "squeue": "echo '77|PENDING|Priority|N/A|N/A|4:00:00||0|0:0|'",
    "sacct": "exit 1",
    "scancel": "exit 0",
    "sinfo": "exit 1",
    "scontrol": f'case "$*" in\n*partition*) {print_text(PARTITIONS)}\n;;\n'
                f'*node*) {print_text(NODES)}\n;;\n*) exit 1;; esac',
}

def test_write_a_home(answering, tmp_path, monkeypatch):
    for name, body in SLURM.items():
        (tmp_path / name).write_text("#!/bin/sh\n" + body + "\n")
        (tmp_path / name).chmod(0o755)
    for python in Path(os.environ["CORRAL_HOME"]).glob("engines/*/bin/python"):
        shell, _, rest = python.read_text().partition("\n")
        python.write_text(f"{shell}\nexport PYTHONPATH='{os.environ['PYTHONPATH']}'\n{rest}")
    answering.env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    model = str(answering.model)
    for words in (
        ["up", model, "--name", "alone", "--served-name", "served", "--context", "128", "--json"],
        ["up", model, "--name", "over", "--context", "128", "--json"],
        ["down", "over", "--json"],
        ["gateway", "key", "add", "alice", "--tpm", "7", "--json"],
        ["up", model, "--name", "herd", "--replicas", "1..3", "--context", "128", "--json"],
        ["up", model, "--name", "night", "--slurm", "partition=cpu", "--time", "4:00:00", "--renew",
         "--context", "128", "--no-wait", "--json"],
    ):
        done = answering.apart(*words)
        assert done.code == 0, (words, done)
    home = Path(os.environ["CORRAL_HOME"])
    until(lambda: list((home / "fleets/herd/gateways").glob("*.load.json")), "the load of a gateway")
    shutil.copytree(home, os.environ["WRITTEN_HOME"], ignore=shutil.ignore_patterns("*.sock"))
    Path(os.environ["WRITTEN_HOME"], ".home").write_text(str(home))
"""


def write(commit: str) -> Path:
    """Pack the home that a commit's commands write."""
    with tempfile.TemporaryDirectory() as folder:
        checkout, written = Path(folder) / "checkout", Path(folder) / "home"
        checkout.mkdir()
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(checkout, filter="data")
        test = checkout / "tests" / "unit" / "test_write_home.py"
        test.write_text(WRITER)
        path = os.pathsep.join([str(checkout / "src"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "WRITTEN_HOME": str(written)}
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "-p", "no:cacheprovider", str(test)],
            cwd=checkout, env=env, check=True,
        )  # fmt: skip
        return _pack(written, commit)


def _pack(written: Path, commit: str) -> Path:
    home = (written / ".home").read_text()
    KEPT.mkdir(exist_ok=True)
    target = KEPT / f"{commit}.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(written.rglob("*")):
            parts = path.relative_to(written).parts
            if path.is_file() and not set(parts) & set(LEFT_OUT) and path.name != ".home":
                text = path.read_bytes().replace(home.encode(), HOME.encode())
                text = text.replace(socket.gethostname().encode(), HOST.encode())
                text = text.replace(boot_id().encode(), b"earlier-boot")
                entry = tarfile.TarInfo("/".join(parts))
                entry.size, entry.mode, entry.mtime = (
                    len(text),
                    path.stat().st_mode & 0o777,
                    int(path.stat().st_mtime),
                )
                archive.addfile(entry, io.BytesIO(text))
    return target


def commits() -> list[str]:
    """The commits whose homes are kept."""
    return sorted(path.name.removesuffix(".tar.gz") for path in KEPT.glob("*.tar.gz"))


def unpack(commit: str, home: Path) -> None:
    """Put a kept home in place, as if it had been written on this machine before its last boot."""
    with tarfile.open(KEPT / f"{commit}.tar.gz") as archive:
        archive.extractall(home, filter="data")
    for path in home.rglob("*"):
        if path.is_file():
            mode = path.stat().st_mode
            text = path.read_bytes().replace(HOME.encode(), str(home).encode())
            path.write_bytes(text.replace(HOST.encode(), socket.gethostname().encode()))
            path.chmod(mode)
        else:
            path.chmod(0o700)


if __name__ == "__main__":
    print(write(sys.argv[1]))

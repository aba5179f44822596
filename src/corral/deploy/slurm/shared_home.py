"""Whether the nodes see Corral's home: jobs find their files there, and everything they say comes back through it.

A network file system is believed. Of any other kind a node is asked, once, whether it sees a file written here; where
no node is free to answer, the job's first line looks for its files, and its end tells.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from corral.base.errors import UsageError
from corral.deploy.slurm.early import on_a_node

NODE_SEES_HOME_WAIT_S = 5  # for a node to become free
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "glusterfs", "orangefs", "afs", "cifs", "smb",
          "9p", "virtiofs", "fuse")  # fmt: skip
MARK = ".seen-by-the-nodes"
REMEDY = "Set CORRAL_HOME to a folder that login and compute nodes share, usually a home, project or scratch folder."


def refuse_unseen(home: Path, where: Sequence[str]) -> None:
    """Raise when a node says that it does not see the home; `where` are the options that lead to the partition."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (home / MARK).exists() or _kind(home).startswith(SHARED):
        return
    probe = home / f".probe-{secrets.token_hex(4)}"
    probe.touch(mode=0o600)
    try:
        said = on_a_node(["test", "-e", str(probe)], where, NODE_SEES_HOME_WAIT_S)
    finally:
        probe.unlink(missing_ok=True)
    if said is None:
        return
    if said.code:
        raise UsageError(f"the nodes do not see Corral's home {home}: a file written here is not there.", REMEDY)
    (home / MARK).touch(mode=0o600)


def _kind(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that a path lies on; empty when nobody says."""
    found, longest = "", -1
    real = Path(os.path.realpath(path))
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines() if mounts.is_file() else ():
        point, kind = [*line.split(), "", "", ""][1:3]
        where = Path(point.replace("\\040", " "))
        if (where == real or where in real.parents) and len(where.parts) >= longest:
            found, longest = kind, len(where.parts)
    return found

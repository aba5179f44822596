"""Why an engine under Ray died: Ray's own error seldom knows, but the log of the engine's worker does.

Only the logs of this node can be read; an engine that died on another node is explained by Ray's words alone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from corral.deploy.deployment.diagnosis import Diagnosis, diagnose, last_lines
from corral.deploy.deployment.state import Reason

_LINES = 200


def logs_folder(ray: Any) -> Path | None:
    """Where the workers of this node write, as far as Ray tells."""
    with contextlib.suppress(AttributeError, TypeError):
        return Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    return None


def why_died(logs: Path | None, since_s: float) -> Diagnosis | None:
    """The cause that a worker's log written after a moment names, the newest first; None where none does."""
    if logs is None:
        return None
    found = []
    for path in [*logs.glob("worker-*.err"), *logs.glob("worker-*.out")]:
        with contextlib.suppress(OSError):
            if (written_s := path.stat().st_mtime) >= since_s:
                found.append((written_s, path))
    causes = [diagnose(last_lines(path, _LINES)) for _, path in sorted(found, reverse=True)]
    causes = [why for why in causes if why.evidence]
    known = [why for why in causes if why.reason is not Reason.ENGINE_EXITED]
    return next(iter([*known, *causes]), None)

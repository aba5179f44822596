"""Corral's home: the one folder where Corral keeps everything; `CORRAL_HOME` moves it.

<home>/engines/       installed engines, one environment per flavour and version
<home>/models/        models Corral fetched or converted itself (hub models stay in the hub's own cache)
<home>/recipes.json   newer recipes of models' families
<home>/deployments/   one folder per deployment
<home>/fleets/        one folder per fleet
<home>/gateway/       the keys of the gateways' clients
<home>/service/       what lets keepers come back after a boot
<home>/batches/       where batches write, one small file each
<home>/cache/         compiled artefacts of the engines, safe to delete
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from corral.base.errors import AccessError
from corral.base.owners import TRUST_USERS, foreign_owner, user_name, writable_by_others

HANGS_S = 3.0


def home_dir() -> Path:
    """`CORRAL_HOME`, or `corral` in the user's data folder."""
    if chosen := os.environ.get("CORRAL_HOME"):
        return Path(chosen).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "corral"


def watch_home(say: Callable[[str], None], hangs_s: float = HANGS_S) -> threading.Thread:
    """Say so when the file system of the home does not answer: a command that reads it then hangs without a word.

    It runs beside the command and only warns: some file systems answer this question later than all others.
    """
    answered = threading.Event()

    def query() -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it does not exist yet, or its place is unknown
            os.statvfs(home_dir())  # asks the server of a network file system, where `stat` may be cached
        answered.set()

    def wait() -> None:
        if not answered.wait(hangs_s):
            say(f"waiting for the file system of {home_dir()}: it has not answered for {hangs_s:g} s")

    threading.Thread(target=query, daemon=True).start()
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    return waiting


def refuse_foreign_home() -> None:
    """Raise where somebody else may have put something into the home: keys, engines and deployments are trusted."""
    home = home_dir()
    try:
        if problem := writable_by_others(home):
            raise AccessError(
                f"Corral's home is not private: {problem}.",
                f"Look for what is not yours (find {home} ! -user {user_name(os.geteuid())}), then: chmod 700 {home}",
            )
        problems = [foreign_owner(path) for path in home.iterdir()]
    except OSError:  # it does not exist yet, or using it says what is wrong
        return
    if problem := next(filter(None, problems), ""):
        raise AccessError(
            f"{problem}, and so could hold another user's keys or programs.",
            f"Remove it, or set {TRUST_USERS} if you trust that user with your account.",
        )


def engines_dir() -> Path:
    return home_dir() / "engines"


def models_dir() -> Path:
    return home_dir() / "models"


def deployments_dir() -> Path:
    return home_dir() / "deployments"


def fleets_dir() -> Path:
    return home_dir() / "fleets"


def gateway_dir() -> Path:
    return home_dir() / "gateway"


def batches_dir() -> Path:
    return home_dir() / "batches"


def cache_dir() -> Path:
    return home_dir() / "cache"

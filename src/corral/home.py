"""Where Corral keeps things: one folder, moved as a whole by `CORRAL_HOME`.

<home>/engines/       installed engines, one environment per flavour and version
<home>/models/        models Corral fetched or converted itself (hub models stay in the hub's own cache)
<home>/deployments/   one folder per deployment
<home>/fleets/        one folder per fleet
<home>/cache/         compiled artefacts of the engines, safe to delete
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir", "deployments_dir", "engines_dir", "fleets_dir", "home_dir", "models_dir"]


def home_dir() -> Path:
    """`CORRAL_HOME`, or `corral` in the user's data folder."""
    if chosen := os.environ.get("CORRAL_HOME"):
        return Path(chosen).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "corral"


def engines_dir() -> Path:
    return home_dir() / "engines"


def models_dir() -> Path:
    return home_dir() / "models"


def deployments_dir() -> Path:
    return home_dir() / "deployments"


def fleets_dir() -> Path:
    return home_dir() / "fleets"


def cache_dir() -> Path:
    return home_dir() / "cache"

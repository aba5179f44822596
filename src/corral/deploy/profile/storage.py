"""What a profile's storage means where the command runs: models that lie there already are not fetched again.

Where this machine does not see that storage (a laptop before a cluster), nothing changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from corral.deploy.profile.profile import Profile


def with_storage(
    profile: Profile, options: Mapping[str, Any], environ: MutableMapping[str, str] | None = None
) -> dict[str, Any]:
    """The options of a wish, with a model that the profile's storage holds named by its folder there."""
    storage, environ = profile.settings.storage, os.environ if environ is None else environ
    hub = Path(storage.hf_home).expanduser() if storage.hf_home else None
    if hub and hub.is_dir():
        environ.setdefault("HF_HOME", str(hub))
    model = options.get("model")
    if not storage.models or not model or model.startswith(("/", ".", "~")) or ".." in model:
        return dict(options)
    folder = Path(storage.models).expanduser()
    for copy in (folder / model, folder / model.rpartition("/")[2]):  # by its whole name, or without its owner
        if (copy / "config.json").is_file():
            return {**options, "model": str(copy)}
    return dict(options)

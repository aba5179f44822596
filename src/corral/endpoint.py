"""Where a model answers: address, model name, and the file that holds the key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Endpoint"]


@dataclass(frozen=True)
class Endpoint:
    """Everything that uses a model knows only this, so it also works on servers Corral did not start."""

    base_url: str
    model: str
    key_file: str | None = None

    def key(self) -> str:
        """The key, read at the moment of use; empty where the server wants none."""
        return Path(self.key_file).read_text(encoding="utf-8").strip() if self.key_file else ""

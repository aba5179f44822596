"""A folder of LoRA adapters, as vLLM's directory resolver reads it: one folder for each, by its name."""

from __future__ import annotations

import re
from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as `peft` saves one
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")  # as in node/guard.py
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that `--max-lora-rank` may be (`MaxLoRARanks`, vLLM 0.32)


def adapter_names(folder: str | Path) -> tuple[str, ...]:
    """The adapters in a folder; none where it cannot be read."""
    found = (one.parent.name for one in Path(folder).glob(f"*/{CONFIG}"))
    return tuple(sorted(name for name in found if PLAIN_NAME.fullmatch(name)))

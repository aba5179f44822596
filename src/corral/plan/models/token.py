"""The hub's token: where one comes from, and where a new one is kept.

Corral looks where every tool of the hub looks, and keeps a new one there too: in the file that `hf auth login`
writes, readable by its owner only. A token is never an argument, and is in no log, event or script.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from corral.base.errors import DataError, UsageError
from corral.base.files import write_atomic

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # in the library's own order


def token_origin() -> str:
    """Which variable or file the token in use comes from; empty where there is none."""
    from huggingface_hub import constants, get_token

    named = next((name for name in VARIABLES if os.environ.get(name, "").strip()), "")
    return named or (str(constants.HF_TOKEN_PATH) if get_token() else "")


def checked_token(text: str) -> str:
    """What was typed as a token, without the spaces around it; refused where it cannot be one."""
    token = text.strip()
    if not re.fullmatch(r"[!-~]{1,1000}", token):
        raise UsageError(
            "that is not a token of the hub." if token else "no token was given.",
            "Copy it from https://huggingface.co/settings/tokens: one word of letters and digits.",
        )
    return token


def keep_token(token: str) -> Path:
    """Write the token where the hub's library reads it, for the owner only."""
    from huggingface_hub import constants

    file = Path(constants.HF_TOKEN_PATH)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, token, 0o600)
    except OSError as error:
        raise DataError(
            f"the token cannot be kept in {file}: {error.strerror}.",
            "Set HF_TOKEN_PATH to a file that you may write, or set HF_TOKEN for this command.",
        ) from None
    return file

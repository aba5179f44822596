"""A Hugging Face repository's config and tensor headers, by a few small requests, never its weights.

Each request waits at most ten seconds. The library is imported only here, and only when a repository is asked for.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.errors import AccessError, CorralError, DataError, NotFoundError, UnreachableError
from corral.models.weights import Tensor, header_tensors

__all__ = ["hub_error", "read_repository"]

_TIMEOUT_S = 10.0


def read_repository(repo: str, token: str | None) -> tuple[Mapping[str, Any], list[Tensor] | None, bool]:
    """The config, the tensors (None when the headers cannot be read), and whether the repository is gated."""
    from huggingface_hub import HfApi

    try:
        config = json.loads(_config_text(repo, token))
    except ValueError as error:
        raise DataError(f"The config.json of {repo} is not valid JSON.", "Report it to its owner.") from error
    api = HfApi(token=token)
    try:
        gated = bool(api.model_info(repo, timeout=_TIMEOUT_S, expand=["gated"]).gated)
        files = api.get_safetensors_metadata(repo, timeout=_TIMEOUT_S).files_metadata
    except Exception:
        return config, None, False  # a repository without safetensors, or one only its config could be read from
    rows = {n: {"dtype": t.dtype, "shape": t.shape} for f in files.values() for n, t in f.tensors.items()}
    return config, header_tensors(rows, repo), gated


def _config_text(repo: str, token: str | None) -> str:
    """The config as the hub has it now, or as this machine downloaded it before; asked once, without retries."""
    from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    try:
        cached = try_to_load_from_cache(repo, "config.json")
        url, headers = hf_hub_url(repo, "config.json"), build_hf_headers(token=token)
        reply = get_session().get(url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True)
        hf_raise_for_status(reply)
        return str(reply.text)
    except HFValidationError:
        raise NotFoundError(f"{repo!r} is not a repository name.", "Write it as owner/name.") from None
    except Exception as error:  # the library raises its own tree and its HTTP client's
        told = hub_error(repo, error)
        if isinstance(told, UnreachableError) and isinstance(cached, str):
            return Path(cached).read_text(encoding="utf-8")
        raise told from error


def hub_error(repo: str, error: Exception) -> CorralError:
    """The hub library's error in one sentence with a remedy."""
    from huggingface_hub import errors, get_token

    if isinstance(error, errors.GatedRepoError):
        why = "the token in use may not read it" if get_token() else "no token was given"
        return AccessError(
            f"{repo} is gated, and {why}.",
            f"Request access at https://huggingface.co/{repo}, then put a token of that account into HF_TOKEN "
            "or run `hf auth login`.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"the hub has no repository {repo}, or it is private.", "Check the name; set HF_TOKEN if it is private."
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return DataError(f"{repo} has no config.json.", "Choose a repository in the Hugging Face format.")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DataError("the disk became full while downloading.", "Free space or set HF_HOME, then run it again.")
    return UnreachableError(
        f"the hub did not answer for {repo} ({type(error).__name__}).",
        "Check the network; a model that is already on disk can be named by its folder.",
    )

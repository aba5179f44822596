"""A Hugging Face repository's config and tensor headers, by a few small requests, never its weights.

Each request waits at most ten seconds. The library is imported only here, and only when a repository is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.errors import AccessError, CorralError, DataError, NotFoundError, UnreachableError
from corral.weights import Tensor, header_tensors

__all__ = ["read_repository"]

_TIMEOUT_S = 10.0


def read_repository(repo: str, token: str | None) -> tuple[Mapping[str, Any], list[Tensor] | None, bool]:
    """The config, the tensors (None when the headers cannot be read), and whether the repository is gated."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        path = hf_hub_download(repo, "config.json", token=token, etag_timeout=_TIMEOUT_S)
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except HFValidationError:
        raise NotFoundError(f"{repo!r} is not a repository name.", "Write it as owner/name.") from None
    except ValueError as error:
        raise DataError(f"The config.json of {repo} is not valid JSON.", "Report it to its owner.") from error
    except Exception as error:  # the library raises its own tree and its HTTP client's
        raise _told(repo, error) from error
    try:
        files = HfApi(token=token).get_safetensors_metadata(repo, timeout=_TIMEOUT_S).files_metadata
    except Exception:
        return config, None, False  # a repository without safetensors, or one only its config could be read from
    rows = {n: {"dtype": t.dtype, "shape": t.shape} for f in files.values() for n, t in f.tensors.items()}
    return config, header_tensors(rows, repo), False


def _told(repo: str, error: Exception) -> CorralError:
    """The library's error in one sentence with a remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return AccessError(
            f"{repo} is gated and this token may not read it.",
            f"Accept its licence at https://huggingface.co/{repo} and set HF_TOKEN to a token of that account.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"There is no repository {repo} that this token may see.",
            "Check the name; set HF_TOKEN if it is private.",
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return DataError(f"{repo} has no config.json.", "Choose a repository in the Hugging Face format.")
    return UnreachableError(
        f"{repo} could not be read ({type(error).__name__}).",
        "Check the network, or name a model of the catalogue or a local folder.",
    )

"""A Hugging Face repository's config and tensor headers, by a few small requests, never its weights.

Each request waits at most ten seconds. The library is imported only here, and only when a repository is asked for.

The hub's token is looked for where every tool of the hub looks, and a new one is kept there too: in the file that
`hf auth login` writes, readable by its owner only. A token is never an argument, and is in no log, event or script.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import AccessError, CorralError, DataError, NotFoundError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.plan.models.fields import parse_config
from corral.plan.models.quantisation import MODELOPT_FILE, of_modelopt_file
from corral.plan.models.weights import Tensor, header_tensors

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


_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Repository:
    """What a repository says of itself without its weights."""

    config: Mapping[str, Any]
    tensors: list[Tensor] | None = None  # None: it has no safetensors, or their headers could not be read
    gated: bool | None = None  # None: the hub did not say
    notes: tuple[str, ...] = ()  # what could not be learnt, and why


def hub_is_off() -> bool:
    """Whether the environment says that the hub is not to be asked, in the words that its own library knows."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def read_repository(repo: str) -> Repository:
    """The config, and what else the hub tells; only a config that cannot be read is an error."""
    config = parse_config(_config_text(repo), f"The config.json of {repo}")
    gated, unsaid = _is_gated(repo)
    tensors, unread = _tensors(repo)
    notes = [note for note in (unsaid, unread) if note]
    if "quantization_config" not in config and (tensors is None or any(one.dtype in _NARROW for one in tensors)):
        quant, unknown = _modelopt(repo)
        config = {**config, "quantization_config": quant} if quant else config
        notes += [unknown] if unknown else []
    return Repository(config, tensors, gated, tuple(notes))


_NARROW = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")  # types of quantised matrices


def _modelopt(repo: str) -> tuple[dict[str, Any], str]:
    """What NVIDIA's own file says of the quantisation; nothing where there is none, and why where it is not known."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return of_modelopt_file(parse_config(_file_text(repo, MODELOPT_FILE), f"{MODELOPT_FILE} of {repo}")), ""
    except CorralError as error:
        missing = isinstance(error.__cause__, EntryNotFoundError)
        if missing and not isinstance(error.__cause__, LocalEntryNotFoundError):
            return {}, ""
        return {}, f"whether {MODELOPT_FILE} says how it is quantised is not known: {error.message}"


def check_repository(repo: str, token: str | None = None) -> None:
    """Refuse a repository that the token, or the one in use, may not read."""
    from huggingface_hub import HfApi

    try:
        HfApi(token=token).auth_check(repo)
    except Exception as error:  # the library raises its own tree and its HTTP client's
        raise hub_error(repo, error, token) from error


def _is_gated(repo: str) -> tuple[bool | None, str]:
    """Whether the repository is gated; where the hub does not say, None and why."""
    from huggingface_hub import HfApi

    try:
        return bool(HfApi().model_info(repo, timeout=_TIMEOUT_S, expand=["gated"]).gated), ""
    except Exception as error:  # the library raises its own tree and its HTTP client's
        return None, f"whether it is gated is not known: {hub_error(repo, error).message}"


def _tensors(repo: str) -> tuple[list[Tensor] | None, str]:
    """The tensors of the headers; where there are none, or they cannot be read, None and why."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        files = HfApi().get_safetensors_metadata(repo, timeout=_TIMEOUT_S).files_metadata
    except NotASafetensorsRepoError:
        return None, f"{repo} holds no safetensors: sizes are computed from its config"
    except Exception as error:
        why = hub_error(repo, error).message
        return None, f"the tensor headers could not be read ({why}): sizes are computed from its config"
    rows = {n: {"dtype": t.dtype, "shape": t.shape} for f in files.values() for n, t in f.tensors.items()}
    return header_tensors(rows, repo), ""


def _config_text(repo: str) -> str:
    return _file_text(repo, "config.json")


def _file_text(repo: str, name: str) -> str:
    """A small file as the hub has it now, or as this machine downloaded it before; asked once, without retries."""
    from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    try:
        cached = try_to_load_from_cache(repo, name)
        url, headers = hf_hub_url(repo, name), build_hf_headers()
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


def gated_error(repo: str, refused: str = "") -> AccessError:
    """A gated repository, and what to do: for want of a token, or because the one from `refused` may not read it."""
    page = f"https://huggingface.co/{repo}"
    if refused:
        return AccessError(
            f"{repo} is gated, and the token ({refused}) may not read it.",
            f"Request access at {page} with the account of that token, or set HF_TOKEN to one of another account.",
        )
    return AccessError(
        f"{repo} is gated, and there is no token.",
        f"Request access at {page}, then run `corral pull {repo}` at a terminal, which asks for a token and keeps "
        "it; or set HF_TOKEN. Tokens are made at https://huggingface.co/settings/tokens.",
        needs_token=repo,
    )


def hub_error(repo: str, error: Exception, typed: str | None = None) -> CorralError:
    """The hub library's error in one sentence with a remedy; `typed` is a token that is not kept anywhere yet."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return gated_error(repo, "as typed" if typed else token_origin())
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"the hub has no repository {repo}, or it is private.", "Check the name; set HF_TOKEN if it is private."
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return AccessError(
            f"the hub rejected the token ({'as typed' if typed else token_origin()}).",
            "It may have been revoked. Make one at https://huggingface.co/settings/tokens and set HF_TOKEN, or "
            f"take the old one away and run `corral pull {repo}` at a terminal.",
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return DataError(f"{repo} has no config.json.", "Choose a repository in the Hugging Face format.")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DataError("the disk became full while downloading.", "Free space or set HF_HOME, then run it again.")
    return UnreachableError(
        f"the hub did not answer for {repo} ({type(error).__name__}).",
        "Check the network; a model that is already on disk can be named by its folder.",
    )

"""Which draft the arguments of vLLM name, read from where its files are: a folder, or the hub's cache on this disk.

No network: a draft that is not here is assumed to be of the usual shape, and that is said (see `plan.memory`). Sizes
come from safetensors headers where there are any, else from the config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError, UsageError
from corral.engines.flags import values_of
from corral.plan.memory import Draft, DraftMethod, assumed_draft, draft_of_config, draft_of_model
from corral.plan.models.architecture import parse_config
from corral.plan.models.facts import ModelFacts, facts_from_folder, read_facts
from corral.plan.models.weights import Tensor, folder_tensors

_FLAG = "--speculative-config"
_MOST_DRAFTED = 100
_NARROWEST = 2  # bytes of a number that is not quantised, as the model computes in bf16 or fp16


def read_draft(arguments: Sequence[str], model: ModelFacts) -> Draft | None:
    """What the arguments of vLLM name; None where they name no draft with weights of its own."""
    said = _said(arguments)
    name = said.get("model")
    if not isinstance(name, str) or not name:
        return None
    drafted, folder = _drafted(said), _folder(name)
    method = _method(said.get("method"), name, _config(folder))
    if method is None:
        return None
    if folder is None:
        return _known(name, method, drafted) or assumed_draft(name, method, drafted, model)
    return _measured(folder, name, method, drafted)


def tokens_from_text(arguments: Sequence[str]) -> int:
    """How many tokens vLLM drafts by looking them up in the text itself; 0: it does not."""
    said = _said(arguments)
    return _drafted(said) if said.get("method") == "ngram" else 0


def _drafted(said: Mapping[str, Any]) -> int:
    tokens = said.get("num_speculative_tokens")
    return tokens if isinstance(tokens, int) and 0 < tokens < _MOST_DRAFTED else 0


def _said(arguments: Sequence[str]) -> Mapping[str, Any]:
    """The last one counts, as in vLLM."""
    for text in reversed(values_of(_FLAG, arguments)):
        try:
            said = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{_FLAG} is not JSON: {error}.", 'For example: {"method": "ngram"}.') from None
        return said if isinstance(said, dict) else {}
    return {}


def _folder(name: str) -> Path | None:
    """Where its config is on this disk; a repository in the hub's cache need not be whole."""
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a repository's name
        return None
    return Path(found).parent if isinstance(found, str) else None


def _config(folder: Path | None) -> Mapping[str, Any]:
    try:
        return parse_config((folder / "config.json").read_bytes(), str(folder)) if folder else {}
    except (OSError, CorralError):
        return {}  # vLLM will say what is wrong with it


def _method(said: object, name: str, config: Mapping[str, Any]) -> DraftMethod | None:
    """As vLLM finds it out; None for those that draft without weights of their own, or are unknown."""
    if said:
        return DraftMethod(said) if isinstance(said, str) and said in list(DraftMethod) else None
    words = f"{Path(name).name} {config.get('model_type')} {config.get('architectures')}".lower()
    for method in (DraftMethod.EAGLE3, DraftMethod.EAGLE, DraftMethod.MEDUSA, DraftMethod.MLP):
        if method in words:
            return method
    return DraftMethod.MODEL


def _known(name: str, method: DraftMethod, drafted: int) -> Draft | None:
    """A whole model of the catalogue, where that drafts."""
    if method is not DraftMethod.MODEL:
        return None
    try:
        return draft_of_model(read_facts(name, offline=True), drafted)
    except CorralError:
        return None


def _measured(folder: Path, name: str, method: DraftMethod, drafted: int) -> Draft | None:
    label = name if name.count("/") == 1 and not name.startswith(("/", ".", "~")) else folder.name
    try:
        if method is DraftMethod.MODEL:
            return draft_of_model(facts_from_folder(folder, label), drafted)
        tensors = folder_tensors(folder)
        if not method.is_eagle:
            return Draft(label, method, drafted, 0, sum(map(_loaded, tensors))) if tensors else None
        by_config = draft_of_config(label, method, drafted, _config(folder))
        return _weighed(by_config, tensors) if tensors else by_config
    except (CorralError, OSError, ValueError, TypeError, KeyError, ZeroDivisionError):
        return None  # vLLM will say what is wrong with it


def _weighed(draft: Draft, tensors: Sequence[Tensor]) -> Draft:
    """An EAGLE draft with the sizes of its tensors, less what vLLM takes from the model."""
    shared = ("embed_tokens", "t2d") if draft.method is DraftMethod.EAGLE3 else ("embed_tokens", "lm_head", "t2d")
    own = [one for one in tensors if not any(word in one.name for word in shared)]
    joining = [one for one in own if one.name.removeprefix("model.").startswith("fc.")]
    return replace(draft, weights_bytes=sum(map(_loaded, own)), whole_bytes=sum(map(_loaded, joining)))


def _loaded(tensor: Tensor) -> int:
    """Bytes of a tensor when the engine has it: wider numbers are narrowed."""
    return min(tensor.size_bytes, _NARROWEST * tensor.elements)

"""What a model is served for, from its architecture, as vLLM 0.32 reads it (`_SUFFIX_TO_DEFAULTS`).

An architecture that ends in `Model` or `ForSequenceClassification` pools; one that ends in `ForCausalLM` writes,
unless its repository says that it embeds (`modules.json` of Sentence Transformers) or its name does. vLLM's own
`--runner` and `--convert` say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from corral.engines.flags import flag_name, values_of

TASKS = ("generate", "embed", "classify", "rerank", "transcribe")
_WRITES = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_CLASSIFIES = (
    "ForSequenceClassification", "ForTokenClassification", "ForAudioClassification", "ForImageClassification",
    "ForVideoClassification", "ClassificationModel",
)  # fmt: skip
_EMBEDS = ("ForTextEncoding", "ForRewardModeling", "ForMaskedLM", "Model")
_TRANSCRIBES = re.compile(r"whisper|speech2text|asr|transcrib|voxtral(?!.*forcausallm)", re.I)
_QWEN_RERANKER = (  # its answer is the weight of "yes" against "no"
    '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],'
    ' "is_original_qwen3_reranker": true}'
)


def task_of(config: Mapping[str, Any], architecture: str, name: str, pools: bool = False) -> str:
    """The task; `pools` where the model's repository has the files of Sentence Transformers."""
    if architecture.endswith(_CLASSIFIES) or "Ranking" in architecture:
        labels = config.get("id2label") or config.get("num_labels")
        count = len(labels) if isinstance(labels, Mapping) else labels
        return "rerank" if count == 1 or "Ranking" in architecture or "rerank" in name.lower() else "classify"
    if architecture.endswith(_WRITES):
        if _TRANSCRIBES.search(architecture):
            return "transcribe"
        spelled = re.split(r"[^a-z0-9]+", name.rpartition("/")[2].lower())
        if "reranker" in spelled:
            return "rerank"
        return "embed" if pools or {"embedding", "embeddings", "embed"} & set(spelled) else "generate"
    return "embed" if architecture.endswith(_EMBEDS) else "generate"


def requested_task(task: str, arguments: Sequence[str]) -> str:
    """The task after what vLLM's own `--runner` and `--convert` say."""
    runner, convert = ((values_of(flag, arguments) or ["auto"])[-1] for flag in ("--runner", "--convert"))
    if runner == "generate":
        return task if task == "transcribe" else "generate"
    if convert in ("embed", "classify"):
        return "rerank" if task == "rerank" and convert == "classify" else convert
    return "embed" if runner == "pooling" and task in ("generate", "transcribe") else task


def task_arguments(task: str, architecture: str, arguments: Sequence[str]) -> list[str]:
    """vLLM's flags for the task, where they are not given."""
    given = {flag_name(word) for word in arguments}
    if task in ("generate", "transcribe") or {"--runner", "--convert"} & given:
        return []
    overrides = []
    if task == "rerank" and architecture == "Qwen3ForCausalLM" and "--hf-overrides" not in given:
        overrides = ["--hf-overrides", _QWEN_RERANKER]
    if architecture.endswith(_WRITES):  # others are what their architecture says
        convert = [] if overrides else ["--convert", "embed" if task == "embed" else "classify"]
        return ["--runner", "pooling", *convert, *overrides]
    return ["--runner", "pooling"]

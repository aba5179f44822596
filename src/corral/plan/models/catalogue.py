"""Models Corral knows by a short name, offline.

An entry holds the fields of the model's own `config.json` that decide memory and speed, so a plan needs no
network. The counts that follow from it are checked in the tests against the published totals. What a repository
says today wins: `corral.plan.models.facts` reads it when it can, and uses the entry when it cannot.

Llama 3.1 and the default model are written here; the others are data (`data/models.json`, which
`tools/write_catalogue.py` writes), read when a name is none of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from corral.base.errors import NotFoundError
from corral.base.record import nearest
from corral.base.untrusted import parse_json


@dataclass(frozen=True)
class Entry:
    """One known model: where it is, what shape it has, and in which precision its weights are stored."""

    name: str
    repo: str
    config: Mapping[str, Any]
    parameters: int
    gated: bool = False
    weights: str = "bf16"
    note: str = ""
    family: str = field(default="")  # entries of one family and instruct-ness differ only in precision
    task: str = "generate"  # generate | embed | rerank
    aliases: tuple[str, ...] = ()  # older names of the repository, under which other tools may have downloaded it
    other_revisions: tuple[str, ...] = ()  # commits of the repository that have another shape than this entry


def _llama31(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int = 8) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


# Meta's own FP8 form leaves attention, the first and the last layer in bf16 (fbgemm, `modules_to_not_convert`).
_FBGEMM: dict[str, Any] = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head", "self_attn", "model.layers.0.", "model.layers.125."],
}
_COMPRESSED_FP8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
    "ignore": ["lm_head"],
}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}

_SHAPES = {
    "8b": (_llama31(4096, 14336, 32, 32), 8_030_261_248),
    "70b": (_llama31(8192, 28672, 80, 64), 70_553_706_496),
    "405b": (_llama31(16384, 53248, 126, 128), 405_853_388_800),
}


def _llama_entries() -> list[Entry]:
    made: list[Entry] = []
    for size, (config, parameters) in _SHAPES.items():
        big = size.upper()
        for tail, repo_tail in (("", ""), ("-instruct", "-Instruct")):
            base = f"llama-3.1-{size}{tail}"
            note = _KV_NOTE if size == "405b" else ""
            repo = f"meta-llama/Llama-3.1-{big}{repo_tail}"
            entry = Entry(base, repo, config, parameters, gated=True, note=note, family=base, aliases=_former(repo))
            if base == "llama-3.1-405b-instruct":
                entry = replace(entry, other_revisions=("7129260dd854a80eb10ace5f61c20324b472b31c",))  # July 2024
            made.append(entry)
            if size == "405b":
                repo, quant, gated = f"meta-llama/Llama-3.1-405B{repo_tail}-FP8", _FBGEMM, True
            else:
                repo, quant, gated = f"RedHatAI/Meta-Llama-3.1-{big}{repo_tail}-FP8", _COMPRESSED_FP8, False
            if size == "405b" or tail:  # nobody publishes an FP8 form of the small base models
                made.append(_quantised(entry, "fp8", repo, quant, gated))
            if tail:
                awq = f"hugging-quants/Meta-Llama-3.1-{big}-Instruct-AWQ-INT4"
                made.append(_quantised(entry, "int4", awq, _AWQ, False))
    return made


def _quantised(entry: Entry, weights: str, repo: str, quant: Mapping[str, Any], gated: bool) -> Entry:
    config = {**entry.config, "quantization_config": dict(quant)}
    return replace(
        entry, name=f"{entry.name}-{weights}", repo=repo, config=config, weights=weights, gated=gated,
        aliases=_former(repo), other_revisions=(),
    )  # fmt: skip


def _former(repo: str) -> tuple[str, ...]:
    """What a repository was called before the hub renamed it."""
    owner, _, name = repo.partition("/")
    if owner == "meta-llama":
        return (f"meta-llama/Meta-{name}",)
    return (f"neuralmagic/{name}",) if owner == "RedHatAI" else ()


_KV_NOTE = (
    "guides that give a 128,000-token request 123.05 GiB of KV, and vllm issue 6746 (79,392 tokens on 8 × H100),"
    " describe the first upload with 16 KV heads; the repository has had 8 since August 2024: 61.52 GiB, and on paper"
    " 11 H100 instead of 12 for bf16 with a full context"
)
_FIRST_UPLOAD = "the first upload of July 2024, with 16 KV heads; the repository has had 8 since August 2024"


def _first_uploads() -> list[Entry]:
    """The 405B as first published, which the documented figures (123.05 GiB of KV, 79,392 tokens) belong to."""
    config = _llama31(16384, 53248, 126, 128, kv_heads=16)
    base = "llama-3.1-405b-first-upload"
    plain = Entry(base, "meta-llama/Llama-3.1-405B", config, 410_081_247_232, True, "bf16", _FIRST_UPLOAD, base)
    return [plain, _quantised(plain, "fp8", "meta-llama/Llama-3.1-405B-FP8", _FBGEMM, True)]


_SMOLLM2 = Entry(
    name="smollm2",
    repo="HuggingFaceTB/SmolLM2-135M-Instruct",
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    parameters=134_515_008,
    note="small enough for a laptop CPU",
    family="smollm2",
)

OTHER_MODELS = "A folder, or owner/name of the Hugging Face hub, works too."
CATALOGUE: Mapping[str, Entry] = {e.name: e for e in [_SMOLLM2, *_llama_entries(), *_first_uploads()]}


_LONGEST_BYTES = 16 << 20
_PRECISION = re.compile(r"-(?:nvfp4|fp8|fp8-static-pertensor|bf16)$")


@cache
def entries() -> Mapping[str, Entry]:
    """All of them, by name."""
    text = (resources.files("corral") / "data" / "models.json").read_bytes()
    rows = parse_json(text, "the catalogue of models", _LONGEST_BYTES)
    return {**CATALOGUE, **{row["name"]: _entry(row) for row in rows}}


def _entry(row: Mapping[str, Any]) -> Entry:
    return Entry(
        name=row["name"], repo=row["repo"], config=row["config"], parameters=round(row["published_b"] * 1e9),
        gated=row["gated"], weights=row["weights"], note=row.get("note", ""),
        family=_PRECISION.sub("", row["name"]), task=row.get("task", "generate"),
    )  # fmt: skip


def built_in(name: str) -> Entry | None:
    """The entry that is written here, of that short name or repository, also an older name of it, in any case."""
    return _named(name.strip().lower(), CATALOGUE)


def find(name: str) -> Entry | None:
    """The entry of that short name or repository, also an older name of it, in any case."""
    return built_in(name) or _named(name.strip().lower(), entries())


def _named(wanted: str, among: Mapping[str, Entry]) -> Entry | None:
    if wanted in among:
        return among[wanted]
    return next((e for e in among.values() if wanted in (repo.lower() for repo in (e.repo, *e.aliases))), None)


def repositories(repo: str) -> tuple[str, ...]:
    """The repository under the name that it has, and under those that it had."""
    entry = find(repo)
    return (entry.repo, *entry.aliases) if entry else (repo,)


def near(name: str, count: int = 3) -> list[str]:
    """Known names most like `name`."""
    return nearest(name.lower().rsplit("/", 1)[-1], list(entries()), count)


def unknown(name: str, offline: bool = False) -> NotFoundError:
    """What is said about a name that is none of these, no folder and no repository."""
    guess = f"Did you mean {', '.join(near(name))}?" if near(name) else "`corral models` lists the names."
    if offline:
        remedy = f"{guess} A folder works too. To ask the hub, leave out --offline and unset HF_HUB_OFFLINE."
        return NotFoundError(f"no model is called {name!r}, and the network is not to be used.", remedy)
    return NotFoundError(f"no model is called {name!r}.", f"{guess} {OTHER_MODELS}")


def twin(name: str, weights: str) -> Entry | None:
    """The entry of the same model stored in another precision, where one is published."""
    entry = find(name)
    if entry is None:
        return None
    if own := next((e for e in CATALOGUE.values() if e.family == entry.family and e.weights == weights), None):
        return own
    return next((e for e in entries().values() if e.family == entry.family and e.weights == weights), None)

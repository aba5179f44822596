"""Write the catalogue of models from configs: `write_catalogue.py CONFIGS PUBLISHED`.

CONFIGS is a folder of `OWNER--NAME.json`, PUBLISHED a list of what publishers say (`id`, `parameters_b`, `active_b`).
Kept are the fields that decide sizes: those that the reader reads, and lists of layers in short. Models whose
quantisation is said in another file than the config, and those that `plan/models/catalogue.py` has by itself, go to
the tests' data alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from corral.base.errors import CorralError
from corral.plan.models import catalogue
from corral.plan.models.facts import ModelFacts, facts_from_config
from corral.plan.models.fields import Fields

ROOT = Path(__file__).parent.parent
CATALOGUE = ROOT / "src/corral/data/models.json"
OTHERS = ROOT / "tests/data/model_configs.json"
_NUMBER = re.compile(r"layers\.(\d+)\.")
_QUANTISATION = {
    "quant_method", "quant_algo", "weight_block_size", "modules_to_not_convert", "ignore", "config_groups",
    "quantized_layers", "bits", "group_size", "load_in_4bit", "format",
}  # fmt: skip
_TEXT = ("text_config", "llm_config", "language_config")
_TOWERS = ("vision_config", "audio_config")
_NOT_SIZES = re.compile(r"_eps$|_std|dropout|id2label|label2id|token|initializer|_name_or_path|transformers_version")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def shortened(names: list[str]) -> list[str]:
    """Names of modules with each that stands for several layers written once."""
    return list(dict.fromkeys(_NUMBER.sub("layers.*.", name) for name in names))


def short_quantisation(quant: dict[str, Any]) -> dict[str, Any]:
    kept = {name: quant[name] for name in sorted(_QUANTISATION) if quant.get(name) not in (None, [], {})}
    for name in ("modules_to_not_convert", "ignore"):
        if name in kept:
            kept[name] = shortened(kept[name])
    if "quantized_layers" in kept:
        rows = kept["quantized_layers"]
        kept["quantized_layers"] = {_NUMBER.sub("layers.*.", name): row for name, row in rows.items()}
    if "config_groups" in kept:
        groups = kept["config_groups"]
        kept["config_groups"] = {name: {"weights": group["weights"]} for name, group in list(groups.items())[:1]}
    return kept


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that decide sizes."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        if name == "quantization_config":
            kept[name] = short_quantisation(value)
        elif name in (*_TEXT, *_TOWERS) and isinstance(value, dict):
            kept[name] = reduced(value)
        elif value is not None and not _NOT_SIZES.search(name) and _decides(name, value):
            kept[name] = value
    return kept


# names that say nothing of structure to `Fields.unread` and decide sizes all the same
_NAMED = {
    "architectures", "attention_bias", "attention_k_eq_v", "attn_output_gate", "d_model", "deepstack_visual_indexes",
    "dtype", "embed_dim", "expert_dtype", "hidden_act", "hidden_activation", "hybrid_override_pattern", "image_size",
    "in_channels", "init_pos_emb_height", "init_pos_emb_width", "mamba_ssm_cache_dtype", "mamba_ssm_dtype",
    "max_position_embeddings", "merge_kernel_size", "mlp_hidden_act", "mlp_ratio", "model_type",
    "mtp_hybrid_override_pattern", "num_position_embeddings", "out_hidden_size", "patch_size",
    "position_embedding_size", "qk_norm_type", "qk_rope_head_dim", "rope_scaling", "sliding_window",
    "spatial_merge_size", "temporal_patch_size", "tie_word_embeddings", "torch_dtype", "use_qk_norm",
    "use_sliding_window",
}  # fmt: skip


def _decides(name: str, value: Any) -> bool:
    return name in _NAMED or bool(Fields({name: value}, "").unread())


def facts(config: dict[str, Any], repo: str) -> ModelFacts:
    return facts_from_config(config, repo, repo, "hub")


def short(config: dict[str, Any], repo: str) -> dict[str, Any]:
    """The reduced config, which must give the very same facts; else the whole one."""
    made = reduced(config)
    try:
        same = facts(made, repo) == facts(config, repo)
    except CorralError:
        same = False
    if not same:
        _say(f"{repo}: kept whole")
    return made if same else config


def _finite(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if "Infinity" not in json.dumps(value)}


def main(configs: str, published: str) -> None:
    rows = {row["id"]: row for row in json.loads(Path(published).read_text())}
    listed, others = [], []
    for file in sorted(Path(configs).glob("*.json")):
        repo = file.stem.replace("--", "/", 1)
        config, row = json.loads(file.read_text()), rows[repo]
        name = repo.rpartition("/")[2].lower()
        entry = {
            "name": name, "repo": repo, "published_b": row["parameters_b"], "published_active_b": row["active_b"],
            "gated": repo.startswith(("meta-llama/", "google/")), "weights": facts(config, repo).weights,
            "config": short(_finite(config), repo),
        }  # fmt: skip
        narrow = "nvfp4" in name or "-fp8" in name
        inner = next((config[one] for one in _TEXT if one in config), {})
        said = "quantization_config" in {**config, **inner}
        own = catalogue.built_in(name.removeprefix("meta-")) is not None
        (others if own or (narrow and not said) else listed).append(entry)
    extra = json.loads((ROOT / "tools/more_models.json").read_text())
    for entry in extra:
        entry["weights"] = facts(entry["config"], entry["repo"]).weights
    for path, found in ((CATALOGUE, [*listed, *extra]), (OTHERS, others)):
        path.parent.mkdir(exist_ok=True)
        lines = ",\n".join(
            json.dumps(one, separators=(",", ":")) for one in sorted(found, key=lambda one: one["name"])
        )
        path.write_text(f"[\n{lines}\n]\n")
        _say(f"{path}: {len(found)} models, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])

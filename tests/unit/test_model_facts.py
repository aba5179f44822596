"""Facts of models against totals that are published, and bad input against one clear sentence."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, NotASafetensorsRepoError

from corral.base.errors import AccessError, CorralError, DataError, NotFoundError, UncountedError, UnreachableError
from corral.base.record import from_json, to_json
from corral.plan.models import catalogue
from corral.plan.models.facts import ModelFacts, facts_from_config, facts_from_entry, facts_from_folder, read_facts
from corral.plan.models.hub import Repository, read_repository
from corral.plan.models.weights import Tensor


def _config(
    model_type: str, hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int, **more: object
) -> dict[str, Any]:
    return {
        "model_type": model_type, "architectures": [f"{model_type}ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


# config.json of each repository as published, and the total its safetensors index or model card gives
PUBLISHED = {
    "Qwen/Qwen2.5-7B": (_config("qwen2", 3584, 18944, 28, 28, 4, 152064, tie_word_embeddings=False), 7_615_616_512),
    "Qwen/Qwen2.5-0.5B": (_config("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True), 494_032_768),
    "Qwen/Qwen3-8B": (_config("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=False),
                      8_190_735_360),
    "Qwen/Qwen3-0.6B": (_config("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
                        596_049_920),
    "mistralai/Mistral-7B-v0.1": (_config("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096,
                                          tie_word_embeddings=False), 7_241_732_096),
    "mistralai/Mistral-7B-v0.3": (_config("mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None,
                                          tie_word_embeddings=False), 7_248_023_552),
    "mistralai/Mixtral-8x7B-v0.1": (_config("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8,
                                            num_experts_per_tok=2, tie_word_embeddings=False), 46_702_792_704),
    "Qwen/Qwen3-30B-A3B": (_config("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128,
                                   num_experts_per_tok=8, moe_intermediate_size=768, tie_word_embeddings=False),
                           30_532_122_624),
    "google/gemma-7b": (_config("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256), 8_537_680_896),
    "google/gemma-2b": (_config("gemma", 2048, 16384, 18, 8, 1, 256000, head_dim=256), 2_506_172_416),
    "google/gemma-2-9b": (_config("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256, sliding_window=4096),
                          9_241_705_984),
    "google/gemma-3-1b-it": (_config("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512,
                                     sliding_window_pattern=6), 999_885_952),
    "microsoft/Phi-3-mini-4k-instruct": (_config("phi3", 3072, 8192, 32, 32, 32, 32064, sliding_window=2047,
                                                 tie_word_embeddings=False), 3_821_079_552),
    "microsoft/phi-2": (_config("phi", 2560, 10240, 32, 32, 32, 51200, tie_word_embeddings=False), 2_779_683_840),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_total(name):
    config, total = PUBLISHED[name]
    facts = facts_from_config(config, name, name, "hub")
    assert facts.parameters == total
    assert facts.known
    assert facts.counted.total == total


@pytest.mark.parametrize("name", catalogue.CATALOGUE)
def test_catalogue_counts(name):
    entry = catalogue.CATALOGUE[name]
    facts = facts_from_entry(entry)
    assert facts.parameters == entry.parameters
    assert facts.weights == entry.weights
    assert from_json(ModelFacts, json.loads(json.dumps(to_json(facts)))) == facts


def test_active_parameters_of_mixtures():
    mixtral = facts_from_config(PUBLISHED["mistralai/Mixtral-8x7B-v0.1"][0], "m", "m", "hub")
    assert mixtral.active_parameters == 12_879_925_248  # "12.9B active"
    qwen = facts_from_config(PUBLISHED["Qwen/Qwen3-30B-A3B"][0], "q", "q", "hub")
    assert 3.3e9 < qwen.active_parameters < 3.4e9  # "3.3B activated"


def test_sliding_windows():
    gemma2 = facts_from_config(PUBLISHED["google/gemma-2-9b"][0], "g", "g", "hub")
    assert (gemma2.sliding_window, gemma2.sliding_layers) == (4096, 21)
    gemma3 = facts_from_config(PUBLISHED["google/gemma-3-1b-it"][0], "g", "g", "hub")
    assert (gemma3.sliding_window, gemma3.sliding_layers) == (512, 22)
    mistral = facts_from_config(PUBLISHED["mistralai/Mistral-7B-v0.1"][0], "m", "m", "hub")
    assert (mistral.sliding_window, mistral.sliding_layers) == (4096, 32)
    qwen = facts_from_config({**PUBLISHED["Qwen/Qwen2.5-7B"][0], "sliding_window": 131072}, "q", "q", "hub")
    assert qwen.sliding_window is None  # the config names one but use_sliding_window is off


def test_first_upload_weighs_what_issue_6746_logged():
    """vllm issue 6746 logged "Loading model weights took 57.7520 GB" per GPU at TP8 for the 16-head FP8 upload."""
    facts = read_facts("llama-3.1-405b-first-upload-fp8")
    assert facts.weights_bytes / 8 / 2**30 == pytest.approx(57.752, rel=0.002)


QUANTISED = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", 9.1e9),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 9.1e9),
    "compressed-tensors fp8": (catalogue.CATALOGUE["llama-3.1-8b-instruct-fp8"].config["quantization_config"],
                               "fp8", 9.1e9),
    "compressed-tensors w4a16": ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}}}, "ignore": ["lm_head"]},
        "int4", 5.7e9),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 5.7e9),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 5.7e9),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", 5.8e9),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_checkpoints(name):
    quant, weights, size = QUANTISED[name]
    config = {**catalogue.CATALOGUE["llama-3.1-8b"].config, "quantization_config": quant}
    facts = facts_from_config(config, name, name, "hub")
    assert (facts.weights, facts.quantisation) == (weights, quant["quant_method"])
    assert facts.weights_bytes == pytest.approx(size, rel=0.02)
    assert facts.parameters == 8_030_261_248


def test_a_config_that_is_not_understood_is_refused():
    """A field that decides sizes and that nobody reads: refused, unless headers or the user say how large it is."""
    config = _config("mamba9", 1024, 4096, 8, 16, 16, 32000, hidden_act="silu", spiral_state_size=64)
    with pytest.raises(UncountedError, match=r"new cannot be counted from its config: .*spiral_state_size"):
        facts_from_config(config, "new", "new", "hub")
    given = facts_from_config(config, "new", "new", "hub", weights_bytes=10**10)
    read = facts_from_config(config, "new", "new", "hub", [Tensor("lm_head.weight", "BF16", 10**6)])
    assert (given.weights_bytes, read.weights_bytes) == (10**10, 2 * 10**6)
    for facts in (given, read):
        assert not facts.known
        assert "spiral_state_size" in facts.notes[0]
        assert facts.kv_bytes_per_token() == 2 * 8 * 16 * 64 * 2
    assert facts_from_config({**config, "spiral_state_size": None}, "new", "new", "hub").known


def safetensors_file(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    header = {n: {"dtype": d, "shape": s, "data_offsets": [0, 0]} for n, (d, s) in tensors.items()}
    body = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body)


def _tiny(folder: Path, dtype: str = "BF16") -> dict[str, Any]:
    config = _config("llama", 64, 128, 2, 4, 2, 100, tie_word_embeddings=False)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": (dtype, [100, 64]), "lm_head.weight": (dtype, [100, 64]),
               "model.norm.weight": (dtype, [64])}  # fmt: skip
    for i in range(2):
        at = f"model.layers.{i}."
        for name, shape in {"self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64],
                            "self_attn.o_proj": [64, 64], "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64],
                            "mlp.down_proj": [64, 128]}.items():  # fmt: skip
            tensors[f"{at}{name}.weight"] = (dtype, shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = (dtype, [64])
    names = sorted(tensors)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    safetensors_file(folder / "model-00001-of-00002.safetensors", {n: tensors[n] for n in first})
    safetensors_file(folder / "model-00002-of-00002.safetensors", {n: tensors[n] for n in second})
    shards = dict.fromkeys(first, "model-00001-of-00002.safetensors") | dict.fromkeys(
        second, "model-00002-of-00002.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return config


def test_folder_headers_agree_with_arithmetic(tmp_path):
    config = _tiny(tmp_path)
    facts = facts_from_folder(tmp_path)
    computed = facts_from_config(config, "tiny", "tiny", "hub")
    assert facts.parameters == computed.parameters
    assert facts.stored == computed.stored  # part by part, in bytes
    assert facts.bytes_by_dtype == {"BF16": facts.weights_bytes}
    assert facts.source == "folder"


def test_folder_in_another_type_counts_its_true_bytes(tmp_path):
    _tiny(tmp_path, dtype="F32")
    assert facts_from_folder(tmp_path).bytes_by_dtype == {"F32": facts_from_folder(tmp_path).parameters * 4}


def test_folder_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_config("llama", 64, 128, 2, 4, 2, 100)))
    assert "no safetensors" in facts_from_folder(tmp_path).notes[-1]


def test_missing_shard_is_named(tmp_path):
    _tiny(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of 2 weight files, first model-00002"):
        facts_from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, struct.pack("<Q", 10**15), struct.pack("<Q", 100) + b"{}",
                                     struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"])  # fmt: skip
def test_cut_safetensors(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(_config("llama", 64, 128, 2, 4, 2, 100)))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match="cut off or is not a safetensors file"):
        facts_from_folder(tmp_path)


BAD_CONFIGS = [
    ({"hidden_size": None}, "lacks 'hidden_size'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ({"num_hidden_layers": -3}, "num_hidden_layers = -3"),
    ({"num_hidden_layers": "many"}, "num_hidden_layers = 'many'"),
    ({"num_attention_heads": True}, "num_attention_heads = True"),
    ({"vocab_size": 10**12}, "vocab_size = 1000000000000"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ({"num_attention_heads": 5}, "not a multiple"),
    ({"hidden_size": 1.5}, "hidden_size = 1.5"),
]


@pytest.mark.parametrize(("change", "words"), BAD_CONFIGS)
def test_absurd_configs_get_one_sentence(change, words):
    with pytest.raises(DataError) as caught:
        facts_from_config({**_config("llama", 64, 128, 2, 4, 2, 100), **change}, "odd", "odd", "folder")
    assert words in caught.value.message
    assert caught.value.message.count("\n") == 0
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["[]", "{", "\xff", "null"])
def test_config_that_is_no_object(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError):
        facts_from_folder(tmp_path)


def test_folder_without_config(tmp_path):
    with pytest.raises(DataError, match=r"has no config\.json"):
        read_facts(str(tmp_path))


@pytest.mark.parametrize("ref", ["", "  ", "llama-9", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_names_that_are_nothing(ref):
    with pytest.raises(NotFoundError):
        read_facts(ref)


def test_near_names_are_offered():
    with pytest.raises(NotFoundError) as caught:
        read_facts("lama-3.1-8b")
    assert "llama-3.1-8b" in caught.value.remedy


def test_catalogue_finds_by_name_and_repository_in_any_case():
    assert catalogue.find("Llama-3.1-8B") is catalogue.CATALOGUE["llama-3.1-8b"]
    assert catalogue.find("META-LLAMA/llama-3.1-8b-instruct") is catalogue.CATALOGUE["llama-3.1-8b-instruct"]
    assert catalogue.find("nothing") is None
    assert catalogue.twin("llama-3.1-405b", "fp8") is catalogue.CATALOGUE["llama-3.1-405b-fp8"]
    assert catalogue.twin("llama-3.1-8b", "fp8") is None


def _hub(monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
    def read_repository(repo):
        if isinstance(outcome, CorralError):
            raise outcome
        return outcome

    monkeypatch.setattr("corral.plan.models.hub.read_repository", read_repository)


def test_hub_facts(monkeypatch):
    _hub(monkeypatch, Repository(PUBLISHED["Qwen/Qwen2.5-7B"][0], None, True, ("a word",)))
    facts = read_facts("Qwen/Qwen2.5-7B")
    assert (facts.gated, facts.notes) == (True, ("a word",))
    assert (facts.source, facts.parameters, facts.location) == ("hub", 7_615_616_512, "Qwen/Qwen2.5-7B")


@pytest.mark.parametrize(
    ("info", "headers", "gated", "notes"),
    [
        (None, None, True, []),
        (None, NotASafetensorsRepoError("none"), True, ["holds no safetensors"]),
        (ConnectionError("cut"), None, None, ["whether it is gated is not known", "ConnectionError"]),
        (None, TimeoutError("slow"), True, ["headers could not be read", "TimeoutError"]),
        (TimeoutError("a"), TimeoutError("b"), None, ["whether it is gated", "headers could not be read"]),
    ],
)
def test_what_the_hub_does_not_say_is_not_known(monkeypatch, info, headers, gated, notes):
    """An error is neither 'not gated' nor 'no tensors': it is told, and each question is asked for itself."""

    def answer(error, value):
        if error is not None:
            raise error
        return value

    tensor = SimpleNamespace(dtype="BF16", shape=[2, 3])
    files = {"a.safetensors": SimpleNamespace(tensors={"model.embed_tokens.weight": tensor})}
    monkeypatch.setattr("corral.plan.models.hub._config_text", lambda *_: json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: answer(info, SimpleNamespace(gated="manual")))
    monkeypatch.setattr(
        HfApi, "get_safetensors_metadata", lambda *_, **__: answer(headers, SimpleNamespace(files_metadata=files))
    )
    found = read_repository("a/b")
    assert found.gated is gated
    assert (found.tensors is None) == (headers is not None)
    assert all(word in " ".join(found.notes) for word in notes)
    assert bool(found.notes) == bool(notes)


def test_gated_repository_falls_back_to_the_catalogue_with_a_word(monkeypatch):
    _hub(monkeypatch, AccessError("it is gated", "accept"))
    facts = read_facts("meta-llama/Llama-3.1-8B-Instruct")
    assert facts.source == "catalogue"
    assert "it is gated" in facts.notes[-1]
    with pytest.raises(AccessError):
        read_facts("someone/gated-model")


def test_unreachable_hub(monkeypatch):
    _hub(monkeypatch, UnreachableError("no network", "check"))
    with pytest.raises(UnreachableError):
        read_facts("someone/model")
    assert read_facts("HuggingFaceTB/SmolLM2-135M-Instruct").parameters == 134_515_008


def test_offline_never_asks_the_hub(monkeypatch):
    _hub(monkeypatch, AssertionError)
    assert read_facts("meta-llama/Llama-3.1-70B", offline=True).parameters == 70_553_706_496
    with pytest.raises(NotFoundError):
        read_facts("someone/model", offline=True)


def test_hub_errors_are_told_in_sentences():
    from corral.plan.models.hub import hub_error

    told = hub_error("a/b", OSError("x"))
    assert isinstance(told, UnreachableError)
    assert "a/b" in told.message


def test_facts_are_frozen():
    facts = read_facts("smollm2")
    with pytest.raises(AttributeError):
        facts.layers = 3  # type: ignore[misc]
    assert replace(facts, layers=3).layers == 3


@pytest.mark.parametrize(
    ("dtype", "answer", "method", "note"),
    [
        ("U8", '{"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}', "modelopt", ""),
        ("U8", DataError("there is no such file", "Check."), None, "is not known: there is no such file"),
        ("U8", EntryNotFoundError("404"), None, ""),  # it is certain that there is none
        ("BF16", AssertionError("nobody needs it"), None, ""),
    ],
)
def test_the_hub_is_asked_for_the_quantisation_where_tensors_are_narrow(monkeypatch, dtype, answer, method, note):
    def text(repo, name):
        if name == "config.json":
            return json.dumps({"model_type": "llama"})
        if isinstance(answer, EntryNotFoundError):
            raise DataError("there is none", "Check.") from answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    files = {"a.safetensors": SimpleNamespace(tensors={"x.weight": SimpleNamespace(dtype=dtype, shape=[2, 3])})}
    monkeypatch.setattr("corral.plan.models.hub._file_text", text)
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: SimpleNamespace(gated=False))
    monkeypatch.setattr(HfApi, "get_safetensors_metadata", lambda *_, **__: SimpleNamespace(files_metadata=files))
    found = read_repository("a/b")
    assert found.config.get("quantization_config", {}).get("quant_method") == method
    assert note in " ".join(found.notes)
    assert bool(found.notes) == bool(note)

"""What is published about Llama 3.1 on known hardware, reproduced, and corrected where it was wrong.

Sources: Hugging Face's Llama 3.1 post (weights, KV of a 128k request), the Kempner/FASRC guide (speeds), the Lambda
and DigitalOcean guides (layouts, 99% utilisation), vllm issue 6746 (79,392 tokens on 8 × H100).
"""

import pytest

from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import GIB, parse_gpus
from corral.plan.models.facts import read_facts
from corral.plan.need import by_arithmetic, needs


def plan(model: str, gpus: str, nodes: int = 1, goal: Goal | None = None, **fixed: object) -> Plan:
    return make_plan(read_facts(model), parse_gpus(gpus, nodes), goal, fixed)


@pytest.mark.parametrize(
    ("model", "bf16", "fp8", "int4"),
    [("llama-3.1-8b", 16, 8, 4), ("llama-3.1-70b", 140, 70, 35), ("llama-3.1-405b", 810, 405, 203)],
)
def test_weights_as_documents_count_them(model, bf16, fp8, int4):
    """Hugging Face: 16/140/810 GB, 8/70/405 GB, 4/35/203 GB."""
    facts = read_facts(model)
    for size, width in ((bf16, 2), (fp8, 1), (int4, 0.5)):
        assert facts.parameters * width / 1e9 == pytest.approx(size, rel=0.015)
    assert facts.weights_bytes / 1e9 == pytest.approx(bf16, rel=0.015)


def test_quantised_checkpoints_are_larger_than_documents_say():
    """Embedding and head stay in 16 bits; Meta's own FP8 form of the 405B leaves attention in bf16 too."""
    made = plan("llama-3.1-405b", "8xH100", weights="fp8")
    assert made.memory.nominal_weights_bytes / 1e9 == pytest.approx(405, rel=0.01)
    assert made.memory.weights_bytes / 1e9 == pytest.approx(487, rel=0.01)
    assert made.checkpoint == "meta-llama/Llama-3.1-405B-FP8"
    assert any("guides count 406 GB" in r.because for r in made.reasons)


@pytest.mark.parametrize(
    ("model", "gib"),
    [
        ("llama-3.1-8b", 15.62),
        ("llama-3.1-70b", 39.06),
        ("llama-3.1-405b", 61.52),
        ("llama-3.1-405b-first-upload", 123.05),
    ],
)
def test_kv_of_128000_tokens(model, gib):
    """Hugging Face prints 15.62, 39.06 and 123.05 "GB": they are GiB at 128,000 tokens, the last for 16 KV heads."""
    facts = read_facts(model)
    assert facts.kv_bytes_per_token() * 128_000 / GIB == pytest.approx(gib, abs=0.01)
    if model.startswith("llama-3.1-405b"):
        assert any("16 KV heads" in note for note in facts.notes)


def test_h100_counts_on_paper():
    """80 GB each: 70B 2, with a full context 3 (2.24); 405B 11, with it 11, or 12 (11.66) for the first upload."""
    assert by_arithmetic(read_facts("llama-3.1-70b"), 80) == 2
    assert by_arithmetic(read_facts("llama-3.1-70b"), 80, 128_000) == 3
    assert by_arithmetic(read_facts("llama-3.1-405b"), 80) == 11
    assert by_arithmetic(read_facts("llama-3.1-405b"), 80, 128_000) == 11
    first = read_facts("llama-3.1-405b-first-upload")
    assert by_arithmetic(read_facts("llama-3.1-405b"), 80) == 11
    assert (810 + first.kv_bytes_per_token() * 128_000 / GIB) / 80 == pytest.approx(11.66, abs=0.01)


def test_h100_counts_that_really_run():
    rows = {row.weights: row for row in needs(read_facts("llama-3.1-405b"), Goal(), ("H100-SXM",))}
    assert (rows["bf16"].gpus, rows["bf16"].layout) == (16, "TP8 × PP2")
    assert rows["bf16"].by_arithmetic == 11
    assert rows["fp8"].gpus == 8
    assert plan("llama-3.1-405b", "4xH100", 4).parallel.pipeline == 4  # 4 × 4 runs too
    seventy = {row.weights: row for row in needs(read_facts("llama-3.1-70b"), Goal(), ("H100-SXM",))}
    assert (seventy["bf16"].gpus, seventy["bf16"].by_arithmetic) == (3, 3)  # as a pipeline: TP3 does not divide 64


def test_405b_fp8_on_8_h100_as_vllm_issue_6746():
    """vLLM 0.5.3 refused 131,072 tokens because 79,392 fit. That was the upload with 16 KV heads."""
    refused = plan("llama-3.1-405b-first-upload-fp8", "8xH100", goal=Goal(context=131072))
    assert not refused.fits
    assert refused.memory.kv_cache_tokens == pytest.approx(79_392, rel=0.05)
    assert f"{refused.memory.kv_cache_tokens:,} tokens" in refused.reason
    shorter = refused.nearest[0]
    assert "a context of" in shorter.what
    length = int(shorter.change.split()[-1])
    assert length > 65_536
    assert plan("llama-3.1-405b-first-upload-fp8", "8xH100", goal=Goal(context=length)).fits


def test_405b_fp8_on_8_h100_today():
    """The repository has had 8 KV heads since August 2024: twice the tokens, so it fits, with a note."""
    today = plan("llama-3.1-405b-fp8", "8xH100", goal=Goal(context=131072))
    assert today.fits
    assert any("79,392" in note for note in today.notes)
    assert "--allow-deprecated-quantization" in today.engine_args


def test_405b_bf16_on_8_h100_is_refused():
    """The DigitalOcean and Lambda guides use 16 or 32; on 8 × 80 GB it cannot run in bf16."""
    refused = plan("llama-3.1-405b", "8xH100", tensor=4, pipeline=2)
    assert not refused.fits
    assert "94.5 of weights" in refused.reason
    assert any("weights=fp8" in near.change for near in refused.nearest)
    assert any("--nodes 2" in near.change for near in refused.nearest)
    assert not plan("llama-3.1-405b", "8xH100", weights="bf16").fits


def test_405b_steps_down_to_fp8_only_with_a_word():
    made = plan("llama-3.1-405b", "8xH100")
    assert made.fits
    assert made.precision.weights == "fp8"
    because = next(r.because for r in made.reasons if r.field == "precision.weights")
    assert "does not fit" in because
    assert "Llama-3.1-405B-FP8" in because


def test_405b_at_99_percent_on_16_h100():
    """DigitalOcean: TP8 × PP2, float16, utilisation 0.99, context 8192."""
    made = plan("llama-3.1-405b", "8xH100", 2, max_model_len=8192, gpu_memory_utilization=0.99, weights="fp16")
    assert made.fits
    assert (made.parallel.tensor, made.parallel.pipeline) == (8, 2)
    assert "float16" in made.engine_args


def test_70b_one_stream_on_4_h100():
    """Kempner: about 50 tokens/s."""
    made = plan("llama-3.1-70b", "4xH100")
    assert made.parallel.tensor == 4
    assert made.speed.decode_tokens_per_s == pytest.approx(50, rel=0.25)


def test_405b_one_stream_on_16_h100():
    """Kempner: 18 to 20 tokens/s with TP16 over 4 nodes of 4, eager."""
    made = plan("llama-3.1-405b", "4xH100", 4, tensor=16, eager=True)
    assert made.fits
    assert 18 * 0.75 <= (made.speed.decode_tokens_per_s or 0) <= 20 * 1.25
    across = plan("llama-3.1-405b", "8xH100", 2)
    assert 18 * 0.75 <= (across.speed.decode_tokens_per_s or 0) <= 20 * 1.25


def test_8b_on_8_gpus_is_replicas():
    """Lambda measured 2383 tokens/s on one H100 and 2518 with TP8: 6% for seven more GPUs."""
    made = plan("llama-3.1-8b", "8xH100")
    assert (made.parallel.tensor, made.parallel.data) == (1, 8)
    assert "--data-parallel-size" in made.engine_args
    assert any(row.what == "TP8" for row in made.rejected)


def test_tensor_must_divide_heads():
    """vllm issue 5003."""
    made = plan("llama-3.1-8b", "8xH100", tensor=5)
    assert not made.fits
    assert "TP5 does not divide the 32 attention heads" in made.reason
    assert any("attention heads" in row.because for row in plan("llama-3.1-8b", "8xH100").rejected)

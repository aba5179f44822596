"""Using a model that real vLLM serves: probabilities against transformers' logits, tokens of many scripts, Python."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corral as library
from corral.client.endpoint import HeldKeyEndpoint
from corral.client.errors import BadRequestError, KeyRefusedError, PromptTooLongError
from corral.llm.llm import LLM
from tests.conftest import ROOT
from tests.integration.conftest import Corral, free_port
from tests.tiny_llama import make_tiny_llama

REFERENCE = ROOT / "tests" / "reference_scores.py"
PAIRS = [
    ("The capital of France is", " Paris, a city on the Seine."),
    ("The capital of France is ", "Paris"),
    ("Once upon a time\n\n", "there was a fox."),
    ("I love 🎉 in 東", "京都 and 鰻 🎊!"),
    ("Par", "is is big"),
    ("", "No context at all, but some words."),
    ("def f(x):\n    return", " x + 1  # one more\n"),
]


def reference(corral: Corral, model: Path, dtype: str, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    python = corral.engine / "bin" / "python"
    given = "".join(json.dumps(row) + "\n" for row in rows)
    done = subprocess.run(
        [python, REFERENCE, model, dtype], input=given, capture_output=True, text=True, timeout=300,
        env={**corral.env, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def worst_difference(llm: LLM, theirs: list[dict[str, Any]], rows: list[dict[str, str]]) -> float:
    """The largest difference of a token's log-probability; tokens and their number must be the same."""
    scores = llm.score(rows, per_token=True, prefix="none")
    assert not scores.bad
    worst = 0.0
    for ours, other in zip(scores, theirs, strict=True):
        assert [score.id for score in ours.token_scores] == other["tokens"]
        for score, value in zip(ours.token_scores, other["logprobs"], strict=True):
            worst = max(worst, abs(score.logprob - value))
        assert ours.sum_logprob == pytest.approx(sum(score.logprob for score in ours.token_scores), abs=1e-9)
    return worst


def quieten(model: Path, halvings: int = 6) -> Path:
    """Divide the last layer by a power of two, so that logits stay small.

    A bfloat16 has 8 bits: near 16 its steps are 0.06, and no two programs agree to less, whatever they compute.
    """
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    begin, end = json.loads(data[8 : 8 + length])["lm_head.weight"]["data_offsets"]
    part = memoryview(data)[8 + length + begin : 8 + length + end].cast("H")
    for at, value in enumerate(part):
        part[at] = value - (halvings << 7) if (value >> 7 & 0xFF) > halvings else 0
    del part
    path.write_bytes(data)
    return model


def rows() -> list[dict[str, str]]:
    return [{"id": str(n), "context": c, "continuation": t} for n, (c, t) in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def served(corral: Corral) -> Iterator[LLM]:
    """The embedded default, with its key in a file."""
    document = corral.json("up", "smollm2", "--name", "use-smollm2", "--port", free_port())
    endpoint = library.Endpoint(document["endpoint"]["base_url"], "smollm2", document["endpoint"]["key_file"])
    with LLM(endpoint) as llm:
        yield llm
    corral.run("down", "use-smollm2")


def planned_dtype(corral: Corral, name: str) -> str:
    """What a deployment computes in: the format that this machine's CPU is quick in, unless it was fixed."""
    plan = json.loads((corral.home / "deployments" / name / "plan.json").read_text())
    return {"bf16": "bfloat16", "fp32": "float32"}[plan["precision"]["compute"]]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_scores_are_those_of_transformers(corral: Corral, tmp_path: Path, stored: str) -> None:
    model = make_tiny_llama(tmp_path / "tiny", dtype=stored)
    if stored == "bfloat16":
        quieten(model)
    name = f"use-{stored}"
    document = corral.json("up", str(model), "--name", name, "--port", free_port(), "--set", "eager=true")
    dtype = planned_dtype(corral, name)
    try:
        with LLM(library.Endpoint(document["endpoint"]["base_url"], document["endpoint"]["model"],
                                  document["endpoint"]["key_file"])) as llm:  # fmt: skip
            worst = worst_difference(llm, reference(corral, model, dtype, rows()), rows())
        print(f"stored in {stored}, served in {dtype}: largest difference {worst:.2e}")
        assert worst < (1e-4 if dtype == "float32" else 1e-2)
    finally:
        corral.run("down", name)


def test_the_default_models_scores(corral: Corral, served: LLM) -> None:
    """Real logits are near 16, where bfloat16 has steps of 0.06 to 0.12: single tokens differ by a few steps
    (unlikely ones, deep in the tail, by more), and the differences cancel out in sums."""
    dtype = planned_dtype(corral, "use-smollm2")
    theirs = reference(corral, corral.home / "models" / "smollm2", dtype, rows())
    scores = served.score(rows(), per_token=True, prefix="none")
    differences = [
        score.logprob - value
        for ours, other in zip(scores, theirs, strict=True)
        for score, value in zip(ours.token_scores, other["logprobs"], strict=True)
    ]
    sizes = sorted(map(abs, differences))
    mean, median, most = abs(sum(differences)) / len(sizes), sizes[len(sizes) // 2], sizes[len(sizes) * 9 // 10]
    print(
        f"smollm2, {dtype}: mean {mean:.2e}, median {median:.2e}, 9 of 10 under {most:.2e}, largest {sizes[-1]:.2e}"
    )
    assert mean < 2e-2
    assert median < 0.06
    assert most < 0.25
    assert dtype == "bfloat16" or sizes[-1] < 1e-3


def test_pieces_of_signs_are_right(served: LLM) -> None:
    prompt = "I love 🎉 parties in 東京都, Ünïcödé, नमस्ते"
    view = served.explain(prompt, max_tokens=12, temperature=0)
    ids = served.tokenize(prompt)
    assert [token.id for token in view.prompt_tokens] == ids
    assert b"".join(bytes(token.bytes or b"?") for token in view.prompt_tokens).decode() == prompt
    reply = served.complete(prompt, max_tokens=12, temperature=0)
    assert b"".join(bytes(token.bytes or b"?") for token in view.tokens).decode("utf-8", "replace") == reply.text
    alternatives = [other for token in (*view.prompt_tokens, *view.tokens) for other in token.top]
    assert all(other.bytes for other in alternatives)
    for token in view.tokens:
        assert token.rank == 1
        assert len({other.id for other in token.top}) == len(token.top)


def test_structured_answers(served: LLM) -> None:
    assert served.complete("Is water wet?", choice=["yes", "no"]).text in ("yes", "no")
    number = served.complete("My number is ", regex=r"\d{3}-\d{4}").text
    assert len(number) == 8
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    answer = served.chat("How old?", json_schema=schema, max_tokens=60, temperature=0).text
    assert "age" in json.loads(answer)


def test_every_parameter_is_taken_by_the_server(served: LLM) -> None:
    reply = served.complete(
        "San Francisco is a", max_tokens=6, min_tokens=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01,
        frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1, seed=3, stop=["\n\n"], n=2, logprobs=2,
        prompt_logprobs=1, ignore_eos=True, stop_token_ids=[0], bad_words=["banana"], skip_special_tokens=False,
        include_stop_str_in_output=True, truncate_prompt_tokens=3, extra={"length_penalty": 1.0},
    )  # fmt: skip
    assert len(reply.choices) == 2
    assert len(reply.prompt_tokens) == 3


def test_python_and_the_sdk(served: LLM) -> None:
    assert "Paris" in served.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0).text
    texts = served.map([f"{n} plus one is" for n in range(40)], max_tokens=4, temperature=0)
    assert len(texts) == 40
    pieces = [piece.text for piece in served.stream("San", max_tokens=6)]
    assert "".join(pieces)
    with served.openai() as client:
        assert client.completions.create(model="smollm2", prompt="San", max_tokens=3).choices[0].text
    row = {"context": "The capital of France is", "choices": [" Paris", " Rome", " a banana"], "answer": 0}
    (score,) = served.score([row])
    assert (score.chosen_text, score.correct) == (" Paris", True)
    assert served.metrics().kv_tokens


def test_errors_of_the_real_server(served: LLM) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        served.complete("word " * 20000)
    assert caught.value.remedy
    with pytest.raises(BadRequestError):
        served.complete("a", logprobs=21)
    stranger = LLM(HeldKeyEndpoint(served.endpoint.base_url, "smollm2", "wrong"))
    with pytest.raises(KeyRefusedError):
        stranger.complete("a")


def test_the_shell(corral: Corral, served: LLM, tmp_path: Path) -> None:
    done = corral.run("complete", "San Francisco is a", "--max-tokens", "7", "--temperature", "0")
    assert len(done.stdout.split()) > 3
    items = tmp_path / "items.jsonl"
    items.write_text('{"id": "1", "text": "The quick brown fox jumps over the lazy dog."}\n')
    report = corral.json("score", "--input", str(items), "-o", str(tmp_path / "scores.parquet"))
    assert report["summary"]["rows"] == 1
    assert report["summary"]["perplexity"] < 100
    (line,) = corral.json("top", "use-smollm2")
    assert line["reading"]["kv_tokens"] > 0


@pytest.mark.filterwarnings(  # the agent is meant to outlive the process that starts it
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:subprocess .* is still running:ResourceWarning"
)
def test_up_in_python(corral: Corral, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "CORRAL_HOME"):
        monkeypatch.setenv(name, corral.env[name])
    port = int(free_port())
    with library.up(str(tiny_model), name="use-tiny", fixed={"eager": True}, port=port, quiet=True) as llm:
        assert llm.complete("a", max_tokens=3).text is not None
        with library.up(str(tiny_model), name="use-tiny", reuse=True, quiet=True) as same:
            assert same.endpoint == llm.endpoint
        assert llm.complete("b", max_tokens=3).usage  # leaving the reuser did not stop it
    assert corral.json("status", "use-tiny", check=False)["state"] == "stopped"

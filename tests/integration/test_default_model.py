"""`corral up` with nothing said: the embedded default, compiled, answers a question of fact.

The same server for every use of a real model: scores against transformers' logits, tokens of many scripts, structured
answers, Python, the shell, and at last the tutorial's notebook, which stops it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import openai
import pytest

import corral as library
from corral.client.endpoint import HeldKeyEndpoint
from corral.client.errors import BadRequestError, KeyRefusedError, PromptTooLongError
from corral.use.llm.llm import LLM
from tests.conftest import ROOT
from tests.integration.conftest import BOUND, Corral
from tests.integration.transformers_scores import planned_dtype, reference, rows


@pytest.fixture(scope="module")
def document(corral: Corral) -> Iterator[dict[str, Any]]:
    unbound = {name: value for name, value in corral.env.items() if name != BOUND}  # as for anybody: on all cores
    yield Corral(unbound, corral.home).json("up")
    corral.run("down", "smollm2", check=False)


@pytest.fixture(scope="module")
def served(document: dict[str, Any]) -> Iterator[LLM]:
    """The embedded default, with its key in a file."""
    endpoint = library.Endpoint(document["endpoint"]["base_url"], "smollm2", document["endpoint"]["key_file"])
    with LLM(endpoint) as llm:
        yield llm


def test_the_capital_of_france_is_paris(corral: Corral, document: dict[str, Any]) -> None:
    assert document["name"] == "smollm2"
    assert "Paris" in document["first_answer"]
    key = Path(document["endpoint"]["key_file"]).read_text().strip()
    with openai.OpenAI(base_url=document["endpoint"]["base_url"], api_key=key) as client:
        reply = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=16,
        )
    assert "Paris" in (reply.choices[0].message.content or "")
    status = corral.json("status", "smollm2")
    compared = {row["name"]: row for row in status["plan_against_engine"]["rows"]}
    assert abs(compared["kv_tokens"]["percent"]) < 1
    assert "engine runs in the forked process" in corral.run("logs", "smollm2").stdout  # the quick start was taken


def test_its_scores_are_near_those_of_transformers(corral: Corral, served: LLM) -> None:
    """Real logits are near 16, where bfloat16 has steps of 0.06 to 0.12: single tokens differ by a few steps
    (unlikely ones, deep in the tail, by more), and the differences cancel out in sums."""
    dtype = planned_dtype(corral.home, "smollm2")
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


def by_hf(corral: Corral, dtype: str, folder: Path, *tasks: str, **env: str) -> dict[str, Any]:
    """The results and the items of tasks as lm-eval's own `hf` backend has them."""
    harness = next(corral.home.glob("engines/lm-eval-*/lib/python3*/site-packages"))
    model = corral.home / "models" / "smollm2"
    command = [corral.engine / "bin" / "python", ROOT / "tests" / "lm_eval_hf.py", harness, model, dtype, "8190"]
    done = subprocess.run(
        [*map(str, command), str(folder), *tasks], capture_output=True, text=True, timeout=900,
        env={**corral.env, **env, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


TEXTS = {
    "task": "texts", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "texts.jsonl"}},
    "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}  # fmt: skip


def test_tasks_have_lm_evals_own_numbers(corral: Corral, document: dict[str, Any], tmp_path: Path) -> None:
    """Items and metrics are those of lm-eval's `hf` backend; in bfloat16, whose steps are coarse, nearly."""
    tasks = tmp_path / "tasks"
    shutil.copytree(ROOT / "src" / "corral" / "data" / "tasks", tasks)
    (tasks / "texts.yaml").write_text(json.dumps(TEXTS))
    lines = [{"text": "The quick brown fox."}, {"text": "I love 🎉 in 東京.\nWe all do."}, {"text": "word " * 300}]
    (tasks / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ("corral_capitals", "corral_calendar", "texts")
    folder = tmp_path / "results"
    command = ("eval", "-d", "smollm2", "--include-path", str(tasks), "--tasks", ",".join(names), "-o", str(folder))
    first = corral.json(*command)
    again = corral.json(*command)
    assert (first["asked"], again["asked"], again["kept"]) == (48 + 38 + 3, 0, 48 + 38 + 3)
    assert again["tasks"]["texts"]["metrics"] == first["tasks"]["texts"]["metrics"]
    record = json.loads((folder / "eval.json").read_text())["model"]
    assert record["revision"].startswith("sha256:")
    assert "computed in" in record["number_format"]
    dtype = planned_dtype(corral.home, "smollm2")
    theirs = by_hf(corral, dtype, tasks, *names)
    exact = dtype == "float32"
    worst = 0.0
    for name in names:
        items = map(json.loads, (folder / "samples" / f"{name}.jsonl").read_text().splitlines())
        for ours, other in zip(items, theirs["samples"][name], strict=True):
            assert ours["arguments"] == other["arguments"]
            for one, value in zip(ours["filtered_resps"], other["filtered_resps"], strict=True):
                if isinstance(one, str):
                    assert one == value or not exact
                else:
                    pair = [found[0] if isinstance(found, list) else found for found in (one, value)]
                    worst = max(worst, abs(float(pair[0]) - float(pair[1])))
        for key, value in first["tasks"][name]["metrics"].items():
            assert value == pytest.approx(
                theirs["results"][name][key], rel=1e-5 if exact else 0.1, abs=1e-9 if exact else 0.15
            )
    print(f"smollm2, {dtype}: largest difference {worst:.1e}")
    assert worst < (1e-3 if exact else 2.0)


def test_conversations_have_lm_evals_own_answers(corral: Corral, document: dict[str, Any], tmp_path: Path) -> None:
    task, folder = "corral_calendar", tmp_path / "results"
    found = corral.json("eval", "-d", "smollm2", "--tasks", task, "--chat", "--limit", "8", "-o", str(folder))
    assert found["tasks"][task]["settings"]["chat"]
    theirs = by_hf(corral, planned_dtype(corral.home, "smollm2"), ROOT / "src" / "corral" / "data" / "tasks", task,
                   CHAT="1")  # fmt: skip
    items = [json.loads(line) for line in (folder / "samples" / f"{task}.jsonl").read_text().splitlines()]
    assert len(items) == 8
    prompts = {item["doc_id"]: item["arguments"][0][0] for item in theirs["samples"][task]}
    assert all(item["arguments"][0][0] == prompts[item["doc_id"]] for item in items)
    failed = corral.run("eval", "-d", "smollm2", "--tasks", "corral_capital", "-o", str(folder), check=False)
    assert (failed.returncode, "Did you mean corral_capitals" in failed.stderr) == (3, True)
    offline = Corral({**corral.env, "HF_HUB_OFFLINE": "1"}, corral.home)
    failed = offline.run("eval", "-d", "smollm2", "--tasks", "arc_easy", "-o", str(folder), check=False)
    assert (failed.returncode, "HF_HOME" in failed.stderr) == (10, True), failed.stderr


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
    assert re.fullmatch(r"\d{3}-\d{4}", number)
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
    report = corral.json("score", str(items), "-o", str(tmp_path / "scores.parquet"))
    assert report["summary"]["rows"] == 1
    assert report["summary"]["perplexity"] < 100
    (line,) = corral.json("top", "smollm2")
    assert line["reading"]["kv_tokens"] > 0


def tutorial(name: str) -> Any:
    """The notebook, for a deployment that is there: its own would be one more start of the same model."""
    notebook = nbformat.read(ROOT / "notebooks" / "tutorial.ipynb", as_version=4)
    assert sum('"tutorial"' in cell.source for cell in notebook.cells) == 2  # where it is found, where a batch goes
    for cell in notebook.cells:
        cell.source = cell.source.replace('"tutorial"', f'"{name}"')
    return notebook


def test_the_tutorial_runs_and_stops_what_it_used(
    corral: Corral, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "CORRAL_HOME"):
        monkeypatch.setenv(name, corral.env[name])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = tutorial(document["name"])
    client = nbclient.NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    try:
        client.execute()
    finally:
        if kept := os.environ.get("CORRAL_KEEP_TUTORIAL"):
            nbformat.write(notebook, kept)
    assert corral.json("status", document["name"])["state"] == "stopped"
    drawing = [cell for cell in notebook.cells if "plt.show()" in cell.source]
    assert drawing
    for cell in drawing:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.source

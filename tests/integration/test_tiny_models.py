"""Other kinds of models than Llama, with random weights, on the CPU: a mixture of experts, and one that sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import FAST, Corral
from tests.tiny_models import QUERIES, make_tiny_blip, make_tiny_moe
from tests.unit.test_chat_screen import PNG


def test_a_mixture_of_experts_is_planned_started_and_answers(corral: Corral, tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path / "moe")
    plan = corral.json("plan", str(model))
    assert (plan["model"]["experts"], plan["model"]["experts_per_token"]) == (8, 2)
    assert plan["model"]["active_parameters"] < plan["model"]["parameters"]
    try:
        corral.run("up", str(model), "--name", "moe", *FAST, "--json")
        options = ("--deployment", "moe", "--max-tokens", "8", "--temperature", "0")
        answers = [corral.json("complete", "San Francisco is a", *options) for _ in range(2)]
        assert answers[0]["usage"]["completion_tokens"] == 8
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
        form = ("--schema", str(tmp_path / "schema.json"), "--max-tokens", "16")
        done = corral.run("complete", "Is it so?", "--deployment", "moe", *form)
        assert json.loads(done.stdout) in ("yes", "no")
    finally:
        corral.run("down", "moe", check=False)


def test_a_model_that_sees_is_asked_with_a_picture(corral: Corral, tmp_path: Path) -> None:
    model = make_tiny_blip(tmp_path / "blip")
    picture = tmp_path / "one.png"
    picture.write_bytes(PNG)
    parts = [{"type": "image_url", "image_url": {"url": "one.png"}}, {"type": "text", "text": "what?"}]
    rows = [json.dumps({"messages": [{"role": "user", "content": content}]}) for content in (parts, parts[1:])]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    try:
        corral.run("up", str(model), "--name", "sees", *FAST, "--json", "--", "--load-format", "dummy")
        batch = ("batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "-d", "sees")
        corral.run(*batch, "--max-tokens", "4", "--temperature", "0", "--param", "ignore_eos=true", "--ordered")
        seen, unseen = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        assert seen["completion_tokens"] == unseen["completion_tokens"] == 4
        assert seen["prompt_tokens"] == unseen["prompt_tokens"] + QUERIES
        talk = ("chat", "sees", "--image", str(picture), "--max-tokens", "4")
        done = subprocess.run([sys.executable, "-m", "corral", *talk], env=corral.env, input="what?\n", text=True,
                              capture_output=True, check=True)  # fmt: skip
        assert "corral:" not in done.stderr
    finally:
        corral.run("down", "sees", check=False)

"""`corral up` with nothing said: the embedded default, compiled, answers a question of fact."""

from __future__ import annotations

from pathlib import Path

import openai

from tests.integration.conftest import Corral


def test_the_capital_of_france_is_paris(corral: Corral) -> None:
    document = corral.json("up")
    try:
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
        rows = {row["name"]: row for row in status["plan_against_engine"]["rows"]}
        assert abs(rows["kv_tokens"]["percent"]) < 1
        assert (
            "engine runs in the forked process" in corral.run("logs", "smollm2").stdout
        )  # the quick start was taken
    finally:
        corral.run("down", "smollm2")

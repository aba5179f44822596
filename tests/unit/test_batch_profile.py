"""A batch that starts its own model where a profile says: the command line wins over the profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corral.cli.batch import _target_fields
from corral.use.batch.spec import ModelToStart

PROFILE = '[hardware]\ngpus = "1xH100"\n[defaults]\nmodel = "llama-3.1-8b"\n%s\n'


def request(text: str, context: int | None, fixed: tuple[str, ...]) -> Any:
    folder = Path.home() / ".config" / "corral" / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "box.toml").write_text(PROFILE % text)
    more = _target_fields({"on": "box", "model": None, "context": context, "fixed": fixed})
    return ModelToStart(more["model"], context, fixed, (), more).request("batch")


@pytest.mark.parametrize(
    "text", ["set = { max_model_len = 4096 }", "context = 4096", "", 'args = ["--max-model-len", "4096"]']
)
def test_a_given_context_takes_the_place_of_the_profiles(clean_home: Path, text: str) -> None:
    made = request(text.replace("args", "\n[engine]\nargs"), 2048, ())
    assert made.goal.context == 2048
    assert "max_model_len" not in made.fixed
    assert made.goal.goal == "throughput"


def test_a_field_that_is_set_takes_the_place_of_the_profiles(clean_home: Path) -> None:
    made = request("context = 4096\nset = { tensor = 1 }", None, ("max_model_len=2048",))
    assert made.goal.context is None
    assert made.fixed == {"tensor": 1, "max_model_len": "2048"}
    assert request("set = { max_model_len = 4096 }", None, ()).fixed == {"max_model_len": 4096}

"""A context length as people say it, in every verb that takes one."""

from __future__ import annotations

import pytest

from corral.base.errors import UsageError
from corral.cli import main
from corral.cli.options import TokenCount


@pytest.mark.parametrize(("text", "number"), [("32768", 32768), ("32k", 32768), ("128K", 131072), ("1m", 1 << 20)])
def test_counts(text: str, number: int) -> None:
    assert TokenCount().convert(text, None, None) == number


@pytest.mark.parametrize("text", ["", "0", "0k", "-1", "3.5k", "32kb", "k"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        TokenCount().convert(text, None, None)
    assert "32k" in refused.value.remedy


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "llama-3.1-8b", "--gpus", "8xa100-40", "--context", "32k"],
        ["plan", "llama-3.1-8b", "--gpus", "1x4090", "--context", "8k"],
    ],
)
def test_verbs_take_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert f"{int(words[-1][:-1]) * 1024:,} tokens" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["up", "plan", "batch run"])
def test_every_verb_with_a_context_takes_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*verb.split(), "x", "--context", "3kk"])
    assert "'3kk' is not a number of tokens" in capsys.readouterr().err

"""Arguments after `--` are judged by the very flags of the pinned vLLM."""

from __future__ import annotations

import pytest

from corral.base.errors import CorralError, EngineError, UsageError
from corral.engines import PINNED_VERSION
from corral.engines.flags import FlagList, check_arguments, shipped_flags


@pytest.fixture(scope="module")
def flags() -> FlagList:
    found = shipped_flags(PINNED_VERSION)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--max-model-len", "8192"],
        ["--max_model_len=8192"],
        ["-tp", "2"],
        ["-O3"],
        ["--enforce-eager"],
        ["--no-enforce-eager"],
        ["-cc.mode=2", "-cc.backend=eager"],
        ["--compilation-config.mode", "2"],
        ["--hf-overrides", '{"num_hidden_layers": 2}'],
        ["--lora-modules", "a=b", "c=d", "--enforce-eager"],
        ["--seed", "-1"],
    ],
)
def test_valid(flags: FlagList, arguments: list[str]) -> None:
    check_arguments(arguments, flags)


@pytest.mark.parametrize(
    ("arguments", "kind", "words", "remedy"),
    [
        (["--max-model-le", "1"], EngineError, "no flag --max-model-le", "--max-model-len"),
        (["--swap-space", "16"], EngineError, "no --swap-space any more", "leave it out"),
        (["--disable-log-requests"], EngineError, "any more", "--enable-log-requests"),
        (["--port", "1"], UsageError, "--port is set by Corral", "--port"),
        (["--api-key=x"], UsageError, "--api-key is set by Corral", "key file"),
        (["--middleware", "x"], UsageError, "--middleware is set by Corral", "guard"),
        (["--max-model-len"], UsageError, "--max-model-len needs a value", "VALUE"),
        (["--lora-modules", "--port", "9"], UsageError, "--lora-modules needs a value", "VALUE"),
        (["--config", "x.yaml"], UsageError, "--config is set by Corral", "after `--`"),
        (["stray"], UsageError, "'stray' after `--` is not a flag", "flags and their values"),
    ],
)
def test_refused(flags: FlagList, arguments: list[str], kind: type[CorralError], words: str, remedy: str) -> None:
    with pytest.raises(kind) as caught:
        check_arguments(arguments, flags)
    assert words in caught.value.message
    assert remedy in caught.value.remedy


def test_an_unknown_version_has_no_shipped_list() -> None:
    assert shipped_flags("9.9.9") is None

"""One stage for each page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.stage import Reader, make_stage
from tests.tiny_llama import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 16 heads: once a page has pulled it in place of a large model, plans go by it, and pages divide by 16 GPUs
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_attention_heads=16)


@pytest.fixture
def reader(
    clean_home: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Reader]:
    yield from make_stage(tmp_path, clean_home, tiny_model, monkeypatch, capsys)

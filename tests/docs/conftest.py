"""One stage for each page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.stage import Reader, make_stage
from tests.tiny_llama import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def reader(
    clean_home: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Reader]:
    yield from make_stage(tmp_path, clean_home, tiny_model, monkeypatch, capsys)

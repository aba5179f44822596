"""A fleet and a batch while the storage of CORRAL_HOME fails at random (longer: `make soak`)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.skips import NO_COMPILER
from tests.storage_slice import open_slice

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason=NO_COMPILER)


@pytest.mark.timeout(900)
def test_nothing_is_lost_refused_or_started_twice_on_a_storage_that_fails(tmp_path: Path) -> None:
    with open_slice(tmp_path, seed=11) as made:
        made.run(60.0)
        assert made.problems == []
        assert made.answers["200"]

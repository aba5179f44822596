"""`corral.up` with the stand-in engine: used, reused, stopped, interrupted."""

from __future__ import annotations

import subprocess
import sys

import pytest

import corral as library
from corral.base.errors import ConflictError, LaunchError, NotFoundError
from tests.unit.conftest import Corral
from tests.until import free_port, until

# the agent is meant to outlive the process that starts it; Python warns of every child that nobody waited for
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:subprocess .* is still running:ResourceWarning"
)


def state(corral: Corral, name: str) -> str:
    return str(corral("status", name, "--json").json()["state"])


def test_up_serves_and_leaving_stops(corral: Corral, capfd: pytest.CaptureFixture[str]) -> None:
    with library.up(str(corral.model), name="one", port=free_port()) as llm:
        assert state(corral, "one") == "ready"
        assert "one" in library.connect("one").endpoint.key_file  # type: ignore[operator]
        with pytest.raises(ConflictError):
            library.up(str(corral.model), name="one", quiet=True)
        with library.up(str(corral.model), name="one", reuse=True, quiet=True) as same:
            assert same.endpoint == llm.endpoint
        assert state(corral, "one") == "ready"
    assert state(corral, "one") == "stopped"
    assert "] ready" in capfd.readouterr().err
    with pytest.raises(NotFoundError, match="stopped"):
        library.connect("one")


def test_an_engine_that_dies_raises_its_reason(corral: Corral, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_OPTIONS", "exit=0")
    with pytest.raises(LaunchError):
        library.up(str(corral.model), name="two", port=free_port(), quiet=True)


def begun(corral: Corral) -> bool:
    found = corral("status", "three", "--json")
    return found.code == 0 and found.json()["state"] in ("starting", "loading") and bool(found.json()["engine"])


def test_an_interrupted_start_leaves_nothing(corral: Corral) -> None:
    code = f"import corral; corral.up({str(corral.model)!r}, name='three', port={free_port()})"
    env = {**corral.env, "STUB_OPTIONS": "silent"}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: begun(corral), "the engine's start")
        process.send_signal(2)
        process.communicate(timeout=120)
    assert state(corral, "three") == "stopped"

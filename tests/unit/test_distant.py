"""A deployment reached through another machine: where it is asked for, again and again, until it is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import CorralError, NotFoundError, UnreachableError
from corral.client.endpoint import Endpoint
from corral.deploy.lifecycle import distant
from corral.deploy.lifecycle.distant import Distant, ask_status
from tests.until import until

FIRST = {"base_url": "http://a:1/v1", "model": "m", "key_file": "/key"}
SECOND = {**FIRST, "base_url": "http://b:2/v1"}


def told(
    name: str, state: str, endpoint: dict[str, str] | None = None, *followers: tuple[str, str]
) -> dict[str, Any]:
    following = [{"name": one, "state": stands} for one, stands in followers]
    return {"name": name, "state": state, "text": "", "endpoint": endpoint, "followed_by": following}


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the other machine says, by name; an error is raised."""
    known: dict[str, Any] = {}

    def status(name: str, *_: object) -> dict[str, Any]:
        if isinstance(known[name], CorralError):
            raise known[name]
        found: dict[str, Any] = known[name]
        return found

    monkeypatch.setattr(distant, "_status", status)
    monkeypatch.setattr(distant, "_bring_key", lambda _: None)
    monkeypatch.setattr(distant, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(distant, "LEAST_PAUSE_S", 0.01)
    return known


def test_whoever_serves_now_is_found(far: dict[str, Any]) -> None:
    far["mine"] = told("mine", "ready", FIRST)
    assert ask_status("mine", "login", ["corral"]).endpoint == Endpoint(**FIRST)
    far["mine-2"] = told("mine-2", "ready", SECOND)
    far["mine"] = told("mine", "draining", FIRST, ("mine-2", "ready"))
    assert ask_status("mine", "login", ["corral"]).endpoint == Endpoint(**SECOND)
    far["mine"] = told("mine", "ready", FIRST, ("mine-2", "ready"))  # both: before the first one drains
    assert ask_status("mine", "login", ["corral"]).endpoint == Endpoint(**SECOND)
    far["mine-2"] = told("mine-2", "loading")
    far["mine"] = told("mine", "stopped", None, ("mine-2", "loading"))
    found = ask_status("mine", "login", ["corral"])
    assert (found.name, found.ended) == ("mine-2", False)


def test_a_move_is_followed_and_an_end_is_said(far: dict[str, Any], tmp_path: Path) -> None:
    said: list[str] = []
    begun = Distant("mine", "login", ("corral",), Endpoint(**FIRST), 1, tmp_path / "key")
    far["mine"] = told("mine", "ready", FIRST)
    with distant._Watch(begun, said.append) as watch:
        assert watch.distant() == begun
        far["mine"] = UnreachableError("login cannot be reached.", "")  # no reason to give up what is open
        until(lambda: said)
        assert watch.distant() == begun
        far["mine"] = told("mine", "queued")
        until(lambda: watch.distant() is None)
        far["mine"] = told("mine", "ready", SECOND)
        moved = until(watch.distant)
        assert moved.forward.far == "b:2"
        until(lambda: "is now at http://b:2/v1; the tunnel leads there" in said[-1])
        far["mine"] = told("mine", "stopped")
        until(lambda: watch._gone)
        with pytest.raises(NotFoundError, match="the server is gone: mine on login is stopped"):
            watch.distant()

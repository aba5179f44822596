"""Clients that nobody here wrote, at a real server and at the gateway before it; each call is a test."""

from __future__ import annotations

import json
import re

import pytest

from tests.clients.conftest import Outcome
from tests.clients.runs import CALLED, TYPED, Calls, Line, Place
from tests.skips import NO_CLIENT

EACH = [pytest.param(run, call, id=f"{run.name}-{call}") for run in CALLED for call in run.found()]


def skip_without(place: Place, run: Calls | Line) -> None:
    if why := place.missing(run):
        pytest.skip(f"{NO_CLIENT}{why}")


@pytest.mark.parametrize("run", [pytest.param(line, id=line.name) for line in TYPED])
def test_line(place: Place, outcome: Outcome, run: Line) -> None:
    skip_without(place, run)
    done = outcome(run)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert re.search(run.shows, said), said[-4000:]


@pytest.mark.parametrize(("run", "call"), EACH)
def test_call(place: Place, outcome: Outcome, run: Calls, call: str) -> None:
    skip_without(place, run)
    done = outcome(run)
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"call"')]
    why = {one["call"]: one["why"] for one in ended}
    assert call in why, done.stdout[-2000:] + done.stderr[-2000:]
    assert not why[call], why[call]

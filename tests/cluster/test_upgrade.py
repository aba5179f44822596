"""Two versions of Corral side by side on one fleet, under streams (with a commit's real code: `upgrade.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.fleet_faults import NODES, open_herd
from tests.cluster.upgrade import SOURCE, copied, upgrade, use
from tests.testbed import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.timeout(900)
def test_a_fleet_goes_on_through_two_upgrades(tmp_path: Path) -> None:
    earlier, later = copied(tmp_path, "0.0.9"), copied(tmp_path, "9.0.0", later=True)
    with open_herd(tmp_path) as herd:
        use(herd, earlier)
        endpoint = herd.up()
        for members, (before, after) in enumerate([(earlier, SOURCE), (SOURCE, later)], len(NODES)):
            seen = upgrade(herd, endpoint, before, after, members)
            assert seen.takeover_s is not None, (herd.folder / "fleets/herd/gateway.log").read_text()
            assert seen.failed == []
            assert seen.cut == 0
            assert seen.refused == {}

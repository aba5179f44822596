"""A fleet on hosts with real sshd, with 64 streams: a node is lost, a gateway killed (more: `fleet_faults.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.fleet_faults import lose_node, open_herd, two_gateways
from tests.testbed import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def test_no_request_fails_before_its_first_byte(tmp_path: Path) -> None:
    with open_herd(tmp_path) as herd:
        endpoint = herd.up()
        for fault in (lose_node, two_gateways):
            assert fault(herd)(endpoint).streams.failed == []

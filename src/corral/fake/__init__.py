"""An OpenAI-compatible server with set pace, set faults and true latencies in its own log.

For load, faults and speed only: it computes nothing. What it shares with the real engine is the shape of its
answers, its paths, its refusals and its metrics (vLLM 0.32).
"""

from __future__ import annotations

from corral.fake.app import FakeOptions
from corral.fake.faults import Fault, parse_fault
from corral.fake.pace import Pace
from corral.fake.server import FakeServer, run

__all__ = ["FakeOptions", "FakeServer", "Fault", "Pace", "parse_fault", "run"]

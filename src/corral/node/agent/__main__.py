"""The agent's two commands."""

from __future__ import annotations

import sys
from typing import List

from . import __doc__ as usage
from .supervisor import supervise, sweep


def main(argv: List[str]) -> int:
    if len(argv) == 2 and argv[0] == "run":
        return supervise(argv[1])
    if len(argv) >= 2 and argv[0] == "sweep":
        return sweep(argv[1], argv[2:])
    sys.stderr.write(usage or "")
    return 2


def start() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    start()

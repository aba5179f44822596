"""Makes the calls of one client, inside its environment: `python run.py CLIENT` runs each `call_*` of CLIENT.py.

One JSON line for each call says its name and what went wrong. The variables are those of `corral env --for CLIENT`;
MODEL is the served name. Nothing here imports Corral.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    for name, call in vars(module).items():
        if name.startswith("call_"):
            why = ""
            try:
                call()
            except Exception:
                why = traceback.format_exc()
            print(json.dumps({"call": name, "why": why}), flush=True)


if __name__ == "__main__":
    main()

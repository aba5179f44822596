"""The fake server in the place of `vllm serve`: a deployment that answers, dies and comes back within a second.

`die` in the environment's FAKE_FAULT strikes only in the first life, so that a restart is a recovery.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from corral.fake import FakeOptions, Pace, parse_fault, run


def main() -> None:
    words = sys.argv[1:]
    if not any(word.startswith("--served-model-name") for word in words):  # only asked whether it is there
        print("fake")
        return

    def given(flag: str) -> str:
        joined = [word.partition("=")[2] for word in words if word.startswith(flag + "=")]
        return joined[0] if joined else words[words.index(flag) + 1]

    faults = os.environ.get("FAKE_FAULT", "")
    lived = Path("lived")  # in the rank's own folder
    if lived.exists():
        faults = ""
    lived.touch()
    options = FakeOptions(
        model=given("--served-model-name"),
        host=given("--host"),
        port=int(given("--port")),
        key_file=Path(os.environ["CORRAL_KEY_FILE"]),
        answer_tokens=(2, 6),
        pace=Pace(requests_per_s=float(os.environ.get("FAKE_RATE", "0"))),
        faults=tuple(map(parse_fault, faults.split())),
    )
    sys.exit(run(options))


if __name__ == "__main__":
    main()

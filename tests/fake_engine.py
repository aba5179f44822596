"""The fake server in the place of `vllm serve`: a deployment that answers, dies and comes back within a second.

`die` in the environment's FAKE_FAULT strikes only in the first life, so that a restart is a recovery. FAKE_TUNED is
how quick it is with which of vLLM's flags: `{"": 2000, "--max-num-seqs 64": 1.5, "--max-num-seqs 512": 0}`, tokens a
second and factors; with a factor of 0 it runs out of memory. It has a socket for rows, unless FAKE_BARE is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from corral.client.client import Client
from corral.client.endpoint import Endpoint
from corral.fake.app import FakeOptions
from corral.fake.faults import parse_fault
from corral.fake.pace import Pace
from corral.fake.server import run
from corral.node.row_socket import RowSocket


async def take_rows(client: Client, folder: str) -> None:
    """Rows in process, as the guard of a real engine takes them; here they are passed on to the server."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        page = await client.page(scope["path"], json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": page.status, "headers": []})
        await send({"type": "http.response.body", "body": page.body})

    rows = RowSocket(app, None, lambda _: None)
    await rows.listen(folder)
    await asyncio.Event().wait()


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
    speeds = json.loads(os.environ.get("FAKE_TUNED", "{}"))
    tokens_per_s = float(speeds.pop("", 0.0))
    for flag, factor in speeds.items():
        if f" {flag} " in f" {' '.join(words)} ".replace("=", " "):
            tokens_per_s *= factor
    if speeds and not tokens_per_s:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    options = FakeOptions(
        model=given("--served-model-name"),
        host=given("--host"),
        port=int(given("--port")),
        key_file=Path(os.environ["CORRAL_KEY_FILE"]),
        adapters=Path(os.environ["CORRAL_ADAPTERS"]) if "CORRAL_ADAPTERS" in os.environ else None,
        answer_tokens=(2, 6),
        pace=Pace(requests_per_s=float(os.environ.get("FAKE_RATE", "0")), tokens_per_s=tokens_per_s),
        faults=tuple(map(parse_fault, faults.split())),
    )
    if not os.environ.get("FAKE_BARE"):
        endpoint = Endpoint(f"http://127.0.0.1:{options.port}", options.model, str(options.key_file))
        taking = take_rows(Client(endpoint), os.environ["CORRAL_ROW_SOCKETS"])
        threading.Thread(target=asyncio.run, args=(taking,), daemon=True).start()
    sys.exit(run(options))


if __name__ == "__main__":
    main()

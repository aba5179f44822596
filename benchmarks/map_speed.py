"""`llm.map` against the workshops' recipe (20 threads with requests), on servers of several kinds, as ratios.

Both send the same prompts to the same fake server, in turns, in one run. A server with head-room takes as many
requests as come; one without runs 8 at a time, and then the best that a client can do is not to be slower.

    python benchmarks/map_speed.py
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from process import fake_server

import corral

PROMPTS = [f"Question {n}: what is {n} plus {n}?" for n in range(400)]
KINDS = (
    ("head-room: first token 50 ms, 16 tokens 5 ms apart", ("--ttft-ms", "50", "--itl-ms", "5")),
    (
        "head-room: first token 20 ms, one token",
        (
            "--ttft-ms",
            "20",
        ),
    ),
    ("limited: 8 at a time, 50 ms", ("--ttft-ms", "50", "--max-seqs", "8")),
    ("limited: 20 at a time, 50 ms", ("--ttft-ms", "50", "--max-seqs", "20")),
    ("at once: the server takes no time", ()),
)


def recipe(url: str, tokens: int) -> list[str]:
    """As the workshops show it: a request for each prompt, from a pool of 20 threads."""

    def one(prompt: str) -> str:
        body: dict[str, Any] = {"model": "fake", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body["ignore_eos"] = True
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=600)
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(20) as pool:
        return list(pool.map(one, PROMPTS))


def main() -> None:
    print(f"{len(PROMPTS)} prompts, medians of 3; CPU is the client's own, per request")
    print(f"{'':52}{'threads s':>11}{'map s':>9}{'ratio':>8}{'threads CPU ms':>16}{'map CPU ms':>12}")
    for title, options in KINDS:
        tokens = 16 if "16 tokens" in title else 1
        with fake_server(*options) as server:
            url = server.url
            theirs, ours, cpu = [], [], [0.0, 0.0]
            with corral.connect(url=url) as llm:
                for _ in range(3):
                    began, used = time.perf_counter(), time.process_time()
                    texts = recipe(url, tokens)
                    theirs.append(time.perf_counter() - began)
                    cpu[0] += (time.process_time() - used) / 3 / len(PROMPTS)
                    began, used = time.perf_counter(), time.process_time()
                    assert llm.map(PROMPTS, max_tokens=tokens, temperature=0, ignore_eos=True) == texts
                    ours.append(time.perf_counter() - began)
                    cpu[1] += (time.process_time() - used) / 3 / len(PROMPTS)
            a, b = statistics.median(theirs), statistics.median(ours)
            print(f"{title:52}{a:11.3f}{b:9.3f}{a / b:8.2f}{cpu[0] * 1e3:16.2f}{cpu[1] * 1e3:12.2f}", flush=True)


if __name__ == "__main__":
    main()

"""What the order of rows is worth: time of one batch in two orders, same server, same rows.

    python benchmarks/batch_order.py [--rows 400] [--seed 1]
    python benchmarks/batch_order.py --deployment NAME [--groups 80] [--each 6] [--words 500]

Without a deployment: longest-first, on the fake server, which runs 16 sequences at once, a token every 4 ms; row
lengths are drawn from a heavy-tailed distribution (8 to 512 tokens), a long one among the last in input order, as
happens to everybody.

With one: prefix-first, on that server. `--groups` documents of `--words` words each are asked `--each` questions, in
random order; then the same with an eighth of the documents, which may all fit into the KV cache. Every run has
documents of its own, so that none finds what another left in the cache.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from process import corral, fake_server

from corral.client import metrics
from corral.client.client import Client
from corral.serve.resolve import ready_endpoint


def batch(rows: list[dict[str, Any]], order: str, place: Path, *server: str) -> dict[str, Any]:
    """The summary of one batch."""
    folder = Path(tempfile.mkdtemp(dir=place))
    path, output = folder / "rows.jsonl", folder / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["batch", str(path), "-o", str(output), *server, "--order", order, "--json"]
    summary: dict[str, Any] = json.loads(corral(*argv).splitlines()[-1])
    return summary


def longest_first(given: argparse.Namespace, place: Path) -> None:
    chance = random.Random(given.seed)
    with fake_server("--answer-tokens", "all", "--max-seqs", "16", "--itl-ms", "4") as server:
        lengths = [min(512, int(8 * chance.paretovariate(1.0))) for _ in range(given.rows)]
        lengths[-3] = 512
        ideal = 0.004 * max(sum(lengths) / 16, max(lengths))
        rows = [{"prompt": f"row {n}", "max_tokens": length} for n, length in enumerate(lengths)]
        print(f"{'order':14} {'s':>7} {'of the ideal':>13}   (ideal {ideal:.2f} s)")
        for order in ("input", "longest-first"):
            took = batch(rows, order, place, "--url", server.url)["wall_s"]
            print(f"{order:14} {took:7.2f} {took / ideal:13.2f}", flush=True)


def questions(groups: int, each: int, words: int, seed: int) -> list[dict[str, Any]]:
    """Rows about documents of their own, in random order."""
    chance = random.Random(seed)
    plain = ["river", "stone", "light", "window", "garden", "letter", "morning", "road", "winter", "paper", "table"]
    rows = []
    for number in range(groups):
        text = f"Document {seed}-{number}: " + " ".join(chance.choice(plain) for _ in range(words))
        asked = (f"{text}\nQuestion {n}: what is said of the {plain[n % len(plain)]}?" for n in range(each))
        rows += [{"prompt": prompt, "max_tokens": 8} for prompt in asked]
    chance.shuffle(rows)
    return rows


def prefix_counts(deployment: str) -> tuple[float, float]:
    """Prompt tokens that were looked up in the server's prefix cache so far, and those found."""
    client = Client(ready_endpoint(deployment))
    try:
        reading = metrics.parse(client.page_sync("/metrics", timeout_s=10).body, 0.0)
    finally:
        client.close_sync()
    assert reading.prefix_queries is not None
    return reading.prefix_queries, reading.prefix_hits or 0.0


def prefix_first(given: argparse.Namespace, place: Path) -> None:
    print(f"{'documents':>9} {'order':13} {'s':>7} {'prompt tokens':>14} {'from the cache':>15}")
    for groups in (given.groups // 8, given.groups):
        times: dict[str, list[float]] = {"input": [], "prefix-first": []}
        for turn, order in enumerate(("input", "prefix-first", "prefix-first", "input")):
            rows = questions(groups, given.each, given.words, given.seed + 100 * turn + groups)
            before = prefix_counts(given.deployment)
            found = batch(rows, order, place, "--deployment", given.deployment)
            after = prefix_counts(given.deployment)
            times[order].append(found["wall_s"])
            share = (after[1] - before[1]) / (after[0] - before[0])
            tokens = found["prompt_tokens"]
            print(f"{groups:9} {order:13} {found['wall_s']:7.2f} {tokens:14,} {share:15.0%}", flush=True)
        print(f"{groups:9} input / prefix-first: {sum(times['input']) / sum(times['prefix-first']):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deployment", default="")
    parser.add_argument("--groups", type=int, default=80)
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--words", type=int, default=500)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (prefix_first if given.deployment else longest_first)(given, Path(folder))


if __name__ == "__main__":
    main()

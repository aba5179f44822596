"""The table of docs/measurements/models.md: what each known config counts to, beside what its publisher says.

benchmarks/model_counts.py
"""

from __future__ import annotations

import json
from pathlib import Path

from corral.plan.models.facts import facts_from_config

ROOT = Path(__file__).parent.parent
FILES = ("src/corral/data/models.json", "tests/data/model_configs.json")


def main() -> None:
    rows = [row for file in FILES for row in json.loads((ROOT / file).read_text(encoding="utf-8"))]
    heads = ("model", "published B", "counted B", "", "active published", "active", "GB stored", "format",
             "bytes/token", "MB/sequence", "128k tokens GiB")  # fmt: skip
    print("| " + " | ".join(heads) + " |")
    print("|---|" + "---|" * (len(heads) - 1))
    for row in sorted(rows, key=lambda one: one["repo"].lower()):
        facts = facts_from_config(row["config"], row["name"], row["repo"], "hub")
        whole, ends = facts.parameters / 1e9, facts.counted.embedding
        active = f"{(facts.active_parameters - ends) / 1e9:.2f} to {facts.active_parameters / 1e9:.2f}"
        cells = (
            row["repo"], f"{row['published_b']:g}", f"{whole:.2f}", f"{100 * (whole / row['published_b'] - 1):+.1f}%",
            f"{row['published_active_b']:g}" if row["published_active_b"] else "", active if facts.experts else "",
            f"{facts.weights_bytes / 1e9:.1f}", facts.weights, f"{facts.kv_bytes_per_token():,}",
            f"{facts.state_bytes / 1e6:.1f}" if facts.state_bytes else "", f"{facts.kept_bytes(131_072) / 2**30:.2f}",
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

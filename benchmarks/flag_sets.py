"""Sets of vLLM's flags against each other and against the plan's own: output tokens/s by requests at once.

    python benchmarks/flag_sets.py MODEL --flags "" --flags "--api-server-count 4" [--at 1,16,64,256,1024] \
        [--up "--runtime venv --runtime-option path=/opt/vllm"] [--out result.json]

Each set is given to `corral up` behind `--` on top of what the plan says (an empty one is the plan itself), then
measured by `corral bench run` with random prompts, streamed. Sets are started one after the other, and the whole list
again for each of `--turns`, because two starts of one server differ. Prints each figure as it is found, and at the
end what share of the best each set reaches.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from statistics import mean
from typing import Any

from process import corral_json, stop


def measured(name: str, running: int, lengths: tuple[int, int]) -> float:
    rounds = 2 if running >= 1024 else 3 if running >= 256 else 4
    words = ["--concurrency", str(running), "--num-prompts", str(running * rounds), "--warmup", str(min(running, 64))]
    found = corral_json(
        "bench", "run", "--deployment", name, *words, "--input-len", str(lengths[0]), "--output-len", str(lengths[1]),
        "--json",
    )  # fmt: skip
    for problem in found.get("problems", ()):
        print(f"    {problem['severity']}: {problem['text']}", flush=True)
    return float(found["output_throughput"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--flags", action="append", default=[], help="one set, as vLLM takes it")
    parser.add_argument("--at", default="1,16,64,256,1024", help="requests at once")
    parser.add_argument("--lengths", default="128,128", help="prompt and output tokens")
    parser.add_argument("--up", default="", help="further arguments of corral up")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path, help="every figure, as JSON, written as it goes")
    options = parser.parse_args()
    loads = [int(word) for word in options.at.split(",")]
    prompt, output = (int(word) for word in options.lengths.split(","))
    rows: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for flags in options.flags or [""]:
            name = "flag-sets"
            also = [*shlex.split(options.up), *(["--", *shlex.split(flags)] if flags else [])]
            corral_json("up", options.model, "--name", name, "--restart", "0", "--json", *also)
            try:
                for running in loads:
                    rate = measured(name, running, (prompt, output))
                    rows.append({"turn": turn, "flags": flags, "at_once": running, "tokens_s": rate})
                    print(f"turn {turn + 1}  {flags or 'the plan'}  {running} at once: {rate:,.0f} tok/s", flush=True)
                    if options.out:
                        options.out.write_text(json.dumps(rows, indent=1))
            finally:
                stop(name)
    table(rows, loads)


def table(rows: list[dict[str, Any]], loads: list[int]) -> None:
    print("| flags | " + " | ".join(map(str, loads)) + " |\n|---|" + "---|" * len(loads))
    found = {
        (flags, at): mean(row["tokens_s"] for row in rows if (row["flags"], row["at_once"]) == (flags, at))
        for flags, at in {(row["flags"], row["at_once"]) for row in rows}
    }
    best = {at: max(rate for (_, load), rate in found.items() if load == at) for at in loads}
    for flags in dict.fromkeys(row["flags"] for row in rows):
        cells = [f"{found[flags, at]:,.0f} ({found[flags, at] / best[at]:.2f})" for at in loads]
        print(f"| {flags or 'the plan'} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

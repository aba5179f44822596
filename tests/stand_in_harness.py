"""A harness without lm-eval: a task is as many items as its name ends with, and each is the likelihood of a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    results: dict[str, Any] = {
        name: {} for name in ("results", "n-samples", "versions", "n-shot", "higher_is_better")
    }
    samples = {}
    for task in settings["tasks"]:
        if task == "missing":
            tell({"error": "task", "text": task, "nearest": ["words3"]})
            return
        if task == "hub":
            tell({"error": "data", "text": "ConnectionError: offline", "task": task})
            return
        if task == "broken":
            sys.stderr.write("something broke\n")
            sys.exit(3)
        count = int(task.removeprefix("words"))
        rows = [{"id": f"w{n}", "kind": "text", "text": f"word {n} of many", "special": False} for n in range(count)]
        Path(settings["requests"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        tell({"requests": count})
        line = sys.stdin.readline()
        if not line:
            sys.exit(1)
        lines = map(json.loads, Path(json.loads(line)["answers"]).read_text().splitlines())
        found = {one["id"]: one["likelihoods"][0]["logprob"] for one in lines}
        values = [found[row["id"]] for row in rows]
        results["results"][task] = {"alias": task, "ll,none": sum(values) / count, "ll_stderr,none": 0.1}
        results["n-samples"][task] = {"original": count, "effective": count}
        results["versions"][task], results["n-shot"][task] = 1, 0
        results["higher_is_better"][task] = {"ll": True}
        samples[task] = f"{task}.jsonl"
        items = [{"doc_id": n, "filter": "none", "ll": value} for n, value in enumerate(values)]
        (Path(settings["samples"]) / samples[task]).write_text("".join(json.dumps(one) + "\n" for one in items))
    Path(settings["folder"], "lm-eval.json").write_text(json.dumps(results))
    tell({"done": samples, "ignored": []})


main()

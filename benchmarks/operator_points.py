"""Planned step times beside sums of measured operators, for layouts of several GPUs that no machine here has.

    python -m venv aic && aic/bin/pip install aiconfigurator
    benchmarks/operator_points.py aic/bin/python

aiconfigurator holds times of single operators of vLLM (0.24 for most), measured on H100, H200, B200 and GB200, and
adds them up: what an engine does beside its kernels (scheduling, sampling, launches) is not in its sums, and it is
not the vLLM that Corral installs. Both sides have the same model, layout, batch and length. Prints a table; asserts
nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from corral.plan.contract import EngineSettings, Parallel, Precision
from corral.plan.hardware.inventory import parse_gpus
from corral.plan.models.facts import ModelFacts, read_facts
from corral.plan.speed import Efficiency, roof_of

LENGTH, PROMPT = 1024, 2048  # tokens that each request of a decode step holds, and of a prompt
SYSTEMS = {"h100_sxm": "8xH100", "h200_sxm": "8xH200", "b200_sxm": "8xB200", "gb200": "4xGB200"}
MODELS = {
    "meta-llama/Meta-Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
}
LAYOUTS = (  # model, systems, tensor ranks, whether experts are whole
    ("meta-llama/Meta-Llama-3.1-8B", ("h100_sxm", "h200_sxm", "b200_sxm"), 1, False),
    ("meta-llama/Meta-Llama-3.1-70B", ("h100_sxm", "h200_sxm", "gb200"), 4, False),
    ("meta-llama/Meta-Llama-3.1-70B", ("h100_sxm", "h200_sxm", "b200_sxm"), 8, False),
    ("Qwen/Qwen3-32B", ("h100_sxm", "h200_sxm"), 2, False),
    ("Qwen/Qwen3-30B-A3B", ("h100_sxm", "h200_sxm"), 1, False),
    ("Qwen/Qwen3-30B-A3B", ("h100_sxm", "h200_sxm"), 4, False),
    ("Qwen/Qwen3-235B-A22B", ("h200_sxm", "b200_sxm"), 8, True),
    ("deepseek-ai/DeepSeek-V3", ("h200_sxm", "b200_sxm"), 8, False),
    ("deepseek-ai/DeepSeek-V3", ("h200_sxm", "b200_sxm"), 8, True),
)
BATCHES = (1, 16, 128)
ASK = """
import json, logging, sys, warnings
warnings.simplefilter("ignore"); logging.disable(logging.CRITICAL)
from aiconfigurator.cli.api import cli_estimate
for line in sys.stdin:
    point = json.loads(line)
    try:
        wide = {"tp_size": point["tensor"]}
        if point["experts"]:
            wide.update(moe_tp_size=1 if point["whole"] else point["tensor"],
                        moe_ep_size=point["tensor"] if point["whole"] else 1)
        given = {"backend_name": "vllm", "osl": 2, "stride": 1, "database_mode": "HYBRID", **wide}
        step = cli_estimate(point["repo"], point["system"], mode="static_gen", isl=point["length"],
                            batch_size=point["batch"], **given)
        first = cli_estimate(point["repo"], point["system"], mode="static_ctx", isl=point["prompt"],
                             batch_size=1, **given)
        answer = {"step_ms": step.tpot, "prefill_ms": first.ttft, "version": step.backend_version}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:150]}
    print("@" + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Point:
    """One step: so many requests of `length` tokens, on so many GPUs of one node."""

    repo: str
    system: str
    tensor: int
    whole: bool
    batch: int
    experts: bool
    length: int = LENGTH
    prompt: int = PROMPT


def points() -> Iterator[tuple[Point, ModelFacts]]:
    for repo, systems, tensor, whole in LAYOUTS:
        model = read_facts(MODELS[repo])
        for system in systems:
            for batch in BATCHES:
                yield Point(repo, system, tensor, whole, batch, model.experts > 0), model


def planned_ms(point: Point, model: ModelFacts) -> tuple[float, float]:
    """One decode step, and the prefill of one prompt."""
    precision = Precision(weights=model.weights, compute="bf16", kv="bf16", how="native")
    settings = EngineSettings(max_num_seqs=1024, max_num_batched_tokens=8192, gpu_memory_utilization=0.9)
    inventory = parse_gpus(SYSTEMS[point.system], nodes=-(-point.tensor // int(SYSTEMS[point.system][0])))
    parallel = Parallel(point.tensor, 1, 1, point.whole)
    roof = roof_of(model, inventory, parallel, precision, settings, Efficiency())
    return 1000 * roof.step(point.batch, point.length), 1000 * roof.chunk(point.prompt, point.prompt)


def main() -> None:
    asked = list(points())
    lines = "".join(json.dumps(asdict(point)) + "\n" for point, _ in asked)
    done = subprocess.run([sys.argv[1], "-c", ASK], input=lines, capture_output=True, text=True, check=False)
    answers = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    if len(answers) != len(asked):
        sys.exit(done.stderr[-2000:])
    print("| model | GPUs | layout | requests | operators | planned | ratio | prompt: operators | planned | ratio |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    ratios: dict[str, list[float]] = {"step": [], "prompt": []}
    for (point, model), answer in zip(asked, answers, strict=True):
        experts = ("+EP" if point.whole else "") if point.experts else ""
        head = f"| {model.name} | {point.system} | TP{point.tensor}{experts} | {point.batch} |"
        if "error" in answer:
            print(f"{head} {answer['error']} |")
            continue
        step, prefill = planned_ms(point, model)
        ratios["step"].append(step / answer["step_ms"])
        row = f"{head} {answer['step_ms']:.2f} | {step:.2f} | {ratios['step'][-1]:.2f} |"
        if point.batch == BATCHES[0]:
            ratios["prompt"].append(prefill / answer["prefill_ms"])
            row += f" {answer['prefill_ms']:.1f} | {prefill:.1f} | {ratios['prompt'][-1]:.2f} |"
        print(row)
    for name, found in ratios.items():
        if found:
            low, high = min(found), max(found)
            print(f"{name}: {len(found)} points, planned / operators {low:.2f} to {high:.2f}, "
                  f"median {statistics.median(found):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()

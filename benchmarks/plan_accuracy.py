"""Predicted against reported: starts real vLLM with dummy weights and holds the planner's numbers against it.

    python benchmarks/plan_accuracy.py --models DIR --out result.json      # on a CUDA machine with vLLM
    python benchmarks/plan_accuracy.py --models DIR --dry                  # only the predictions

`DIR` holds a model folder to borrow the tokenizer from (`llama-3.1-8b`: config and tokenizer, no weights). Each case
is a model shape and settings: Llama's, or one of the catalogue's with the borrowed tokenizer's vocabulary. Its server
is started with exactly the plan's engine arguments, its log gives weights,
activation, graphs and KV tokens, and a client gives one-stream decode and throughput at 16, 64 and 256. Needs nothing
but the standard library, this repository and vLLM's own environment (aiohttp).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from corral.base.record import to_json
from corral.plan.candidate import Tuning
from corral.plan.choose import make_plan
from corral.plan.contract import Goal, Plan
from corral.plan.hardware.inventory import GIB, Inventory, parse_gpus, probe
from corral.plan.measured import read_log
from corral.plan.memory import Coefficients
from corral.plan.models import catalogue
from corral.plan.models.facts import facts_from_folder
from corral.plan.speed import predict

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "head_dim": 64, "tie_word_embeddings": True}  # Llama 3.2 1B  # fmt: skip
MIDDLE = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
          "tie_word_embeddings": True}  # Llama 3.2 3B  # fmt: skip
SEVENTY = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
BATCHES_SMALL: dict[str, object] = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
GRAPHS_FEW: dict[str, object] = {"max_graph_size": 256, "max_num_seqs": 256}
HUGE = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 16, "num_attention_heads": 128}


@dataclass(frozen=True)
class Case:
    name: str
    change: dict[str, Any] = field(default_factory=dict)  # of the 8B's config
    fixed: dict[str, object] = field(default_factory=dict)
    rounds: int = 3  # requests per client at each concurrency; 0: memory only
    model: str = ""  # of the catalogue, in bf16, in place of the 8B's config; `change` is of its text model


CASES = (
    Case("8b-bf16"),
    Case("70b-fp8", {**SEVENTY, "quantization_config": FP8}, rounds=2),
    Case("405b-16-layers-bf16", HUGE, rounds=2),
    Case("1b-tied-bf16", SMALL),
    Case("8b-fp8", {"quantization_config": FP8}),
    Case("405b-4-layers-2048", {**HUGE, "num_hidden_layers": 4}, BATCHES_SMALL, rounds=0),
    Case("70b-8-layers-bf16", {**SEVENTY, "num_hidden_layers": 8}, rounds=0),
    Case("8b-bf16-32768", {}, {"max_num_batched_tokens": 32768, "gpu_memory_utilization": 0.85}, rounds=0),
    Case("8b-bf16-eager", {}, {"eager": True}),
    Case("3b-tied-bf16", MIDDLE),
    Case("8b-bf16-kv-fp8", {}, {"kv": "fp8"}),
    Case("8b-bf16-2048", {}, BATCHES_SMALL),
    Case("qwen3-30b-a3b", {"rms_norm_eps": 1e-6, "norm_topk_prob": True, "mlp_only_layers": [], "rope_theta": 1e6},
         fixed=GRAPHS_FEW, rounds=2, model="qwen3-30b-a3b"),
    Case("deepseek-v3-8-layers", {
        "num_hidden_layers": 8, "first_k_dense_replace": 1, "n_routed_experts": 64, "n_group": 8, "topk_group": 4,
        "num_nextn_predict_layers": 0, "rope_theta": 10000, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    }, GRAPHS_FEW, rounds=2, model="deepseek-v3"),
    Case("gpt-oss-20b", {"experts_per_token": 4, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000},
         fixed=GRAPHS_FEW, rounds=2, model="gpt-oss-20b"),
    Case("gemma-3-27b", {
        "architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 168, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0, "rope_theta": 1e6, "hidden_activation": "gelu_pytorch_tanh",
    }, GRAPHS_FEW, rounds=2, model="gemma-3-27b-it"),
    Case("nemotron-3-nano-30b-a3b", {
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
        "mlp_bias": False, "use_bias": False, "use_mamba_kernels": True, "residual_in_fp32": False,
        "time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 0.001, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "rope_theta": 10000, "sliding_window": None,
    }, GRAPHS_FEW, rounds=2, model="nvidia-nemotron-3-nano-30b-a3b-bf16"),
)  # fmt: skip

KEEP = re.compile(r"GiB|KV cache size|took|takes|version|Error|attention backend|non-default")


def prepare(case: Case, models: Path, work: Path) -> Path:
    """A model folder of the case's shape with the 8B's tokenizer."""
    base, folder = models / "llama-3.1-8b", work / case.name
    shutil.copytree(base, folder)
    config = json.loads((base / "config.json").read_text())
    if case.model:
        entry = catalogue.find(case.model)
        assert entry is not None, case.model
        text = dict(entry.config.get("text_config", entry.config))
        text.pop("quantization_config", None)
        special = {key: config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
        config = {**text, **special, "pad_token_id": 0, **case.change}
    else:
        config |= {"head_dim": 128, **case.change}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_case(case: Case, folder: Path, inventory: Inventory) -> Plan:
    goal = Goal(prompt_tokens=128, output_tokens=128)
    tuning = Tuning(memory=Coefficients(counts_graphs=counts_graphs()))
    fixed = {"max_model_len": 8192, **case.fixed}
    return make_plan(facts_from_folder(folder, case.name), inventory, goal, fixed, tuning)


def counts_graphs() -> bool:
    """vLLM's second model runner takes graphs out of the KV cache from some version after 0.26."""
    try:
        return tuple(int(n) for n in version("vllm").split(".")[:2]) > (0, 26)
    except (PackageNotFoundError, ValueError):
        return True


def predicted(plan: Plan) -> dict[str, float | None]:
    m = plan.memory
    row: dict[str, float | None] = {
        "weights_gib": m.weights_bytes_per_gpu / GIB,
        "activation_gib": m.activation_bytes_per_gpu / GIB,
        "graph_gib": m.graph_bytes_per_gpu / GIB,
        "non_torch_gib": m.overhead_bytes_per_gpu / GIB,
        "kv_tokens": m.kv_cache_tokens_per_replica,
        "decode_tok_s": plan.speed.decode_tokens_per_s,
    }
    for concurrency in (16, 64, 256):
        speed = predict(plan.model, plan.inventory, plan.parallel, plan.precision, plan.settings, m, plan.goal,
                        concurrency)  # fmt: skip
        row[f"throughput_{concurrency}"] = speed.throughput_tokens_per_s
    long = replace(plan.goal, prompt_tokens=6000)
    speed = predict(plan.model, plan.inventory, plan.parallel, plan.precision, plan.settings, m, long, 1)
    row["ttft_6000_s"] = speed.ttft_s
    return row


class Server:
    """One `vllm serve` in its own process group, its log in a file."""

    def __init__(self, command: list[str], folder: Path, plan: Plan, log: Path, port: int) -> None:
        args = [*command, str(folder), "--load-format", "dummy", "--served-model-name", "m", "--port", str(port)]
        self.port, self.log, self._file = port, log, log.open("w")
        env = {**os.environ, **plan.engine_env}
        self.process = subprocess.Popen(
            [*args, *plan.engine_args], stdout=self._file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )

    def wait(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while time.monotonic() < end and self.process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2),
            ):
                return True
            time.sleep(0.5)
        return False

    def stop(self) -> None:
        for number, wait_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._file.close()


def reported(log: str) -> dict[str, Any]:
    seen = to_json(read_log(log.splitlines()))
    return {key: value for key, value in seen.items() if value not in (None, "")}


async def _one(session: Any, port: int, seed: int, prompt: int, output: int) -> tuple[float, float, int]:
    """Seconds to the first token, seconds to the last, and tokens seen."""
    rng = random.Random(seed)
    body = {"model": "m", "prompt": [rng.randrange(3, 49000) for _ in range(prompt)], "max_tokens": output,
            "ignore_eos": True, "temperature": 0.0, "stream": True}  # fmt: skip
    start, first, count = time.perf_counter(), 0.0, 0
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - start
                count += 1
    return first, time.perf_counter() - start, count


async def _measure(port: int, rounds: int) -> dict[str, float]:
    import aiohttp  # type: ignore[import-not-found,unused-ignore]

    row: dict[str, float] = {}
    seed = iter(range(1, 10**9))
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(_one(session, port, next(seed), 128, 8) for _ in range(256)))
        alone = [await _one(session, port, next(seed), 128, 129) for _ in range(3)]
        row["decode_tok_s"] = statistics.median(128 / (last - first) for first, last, _ in alone)
        row["ttft_128_s"] = statistics.median(first for first, _, _ in alone)
        row["ttft_6000_s"] = statistics.median(
            [(await _one(session, port, next(seed), 6000, 2))[0] for _ in range(3)]
        )
        for concurrency in (16, 64, 256):
            # kernels of a mixture are compiled for the number of tokens of a step
            await asyncio.gather(*(_one(session, port, next(seed), 128, 16) for _ in range(concurrency)))
            left = iter(range(concurrency * rounds))
            done: list[tuple[float, float, int]] = []

            async def worker(todo: Any = left, into: Any = done) -> None:
                for _ in todo:
                    into.append(await _one(session, port, next(seed), 128, 128))

            start = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(concurrency)))
            took = time.perf_counter() - start
            row[f"throughput_{concurrency}"] = len(done) * 128 / took
            row[f"ttft_{concurrency}_s"] = statistics.median(first for first, _, _ in done)
            row[f"tpot_{concurrency}_s"] = statistics.median((last - first) / 127 for first, last, _ in done)
    return row


def run_case(case: Case, plan: Plan, folder: Path, command: list[str], work: Path, limit_s: float) -> dict[str, Any]:
    log = work / f"{case.name}.log"
    port = random.randrange(20000, 30000)
    start = time.monotonic()
    server = Server(command, folder, plan, log, port)
    row: dict[str, Any] = {"case": case.name, "engine_args": list(plan.engine_args), "predicted": predicted(plan)}
    try:
        if not server.wait(limit_s):
            row["failed"] = log.read_text(errors="replace")[-3000:]
            return row
        row["ready_s"] = round(time.monotonic() - start, 1)
        row["reported"] = reported(log.read_text(errors="replace"))
        if case.rounds:
            row["reported"] |= asyncio.run(_measure(port, case.rounds))
    except Exception as error:  # one broken case must not cost the others
        row["failed"] = repr(error)
    finally:
        server.stop()
        lines = log.read_text(errors="replace").splitlines()
        row["log"] = [line[:400] for line in lines if KEEP.search(line)][:200]
    row["took_s"] = round(time.monotonic() - start, 1)
    return row


COLUMNS = ("weights_gib", "activation_gib", "graph_gib", "non_torch_gib", "kv_tokens", "decode_tok_s",
           "throughput_16", "throughput_64", "throughput_256", "ttft_6000_s")  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | number | predicted | reported | off |", "|---|---|---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['case']} | failed | | | {row['failed'][-200:]!r} |")
            continue
        for key in COLUMNS:
            guess, real = row["predicted"].get(key), row["reported"].get(key)
            if guess is None or real is None:
                continue
            off = f"{100 * (guess - real) / real:+.1f}%" if real else ""
            lines.append(f"| {row['case']} | {key} | {guess:,.4g} | {real:,.4g} | {off} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="case names, comma-separated")
    parser.add_argument("--vllm", default="vllm serve")
    parser.add_argument("--budget-s", type=float, default=3600)
    parser.add_argument("--gpus", help="instead of this machine's, for --dry")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    wanted = [c for c in CASES if not options.only or c.name in options.only.split(",")]
    inventory = parse_gpus(options.gpus) if options.gpus else probe()
    print(f"inventory: {inventory}", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for case in wanted:
            folder = prepare(case, options.models, work)
            plan = plan_case(case, folder, inventory)
            if options.dry:
                print(case.name, plan.reason, json.dumps(predicted(plan)))
                continue
            left = options.budget_s - (time.monotonic() - began)
            if left < 100:
                print(f"{case.name}: no time left", flush=True)
                continue
            rows.append(run_case(case, plan, folder, options.vllm.split(), work, left - 40))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "log"}), flush=True)
            if options.out:
                options.out.write_text(json.dumps({"inventory": str(inventory), "rows": rows}, indent=1))
    if rows:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

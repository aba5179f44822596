"""``python -m corral_cpu_engine.measure REQUEST``: how fast this CPU multiplies, measured in two seconds.

REQUEST is JSON: ``products``, the matrices of the model as [outputs, inputs, how many], of
which the last is the head; ``formats``, ``rows`` and ``budget_s``.  The answer is one line
of JSON: for each format the 10^9 operations per second by rows multiplied at once, what
multiplied, and how many 10^9 bytes per second are read from memory.

The products run on vLLM's own path: oneDNN through ``vllm._C``, and torch where oneDNN
refuses the format, which makes that format very slow.  The weights exceed the caches,
as a model's do.  Other programs on the machine only ever slow a product down, so the
fast ones count, and ``busy`` is the share of the time that others used.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from corral_cpu_engine import launch, openmp

#: Weights of one format that are multiplied in turn: more than a last-level cache, less than a machine minds.
_LEAST_BYTES, _MOST_BYTES = 96 << 20, 384 << 20
_PASSES = 5
_MARK = "CORRAL_CPU_MEASURE"


def spent() -> float:
    """Processor seconds of this thread: on a busy machine the budget does not run down with the clock."""
    return time.thread_time()


def environment(library: openmp.OpenMP) -> dict[str, str]:
    """This process's environment with the threads that the engine will have."""
    bound = launch.bound_cores(library)
    env = dict(os.environ) | openmp.environment(library, os.environ, bound)
    here = sorted(os.sched_getaffinity(0))
    count = len(_numbers(bound)) if bound != "auto" else max(1, len(here) - 1)
    env["OMP_NUM_THREADS"] = str(count)
    if library.kind == "intel" and bound != "auto":
        env["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{','.join(map(str, _numbers(bound)))}]"
        env["KMP_BLOCKTIME"] = "5"  # as vLLM has it
    env[_MARK] = "1"
    return env


def _numbers(cores: str) -> list[int]:
    """The cores of a list such as "0-3,8"."""
    found: list[int] = []
    for part in cores.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def load_kernels(torch: Any) -> bool:
    """vLLM's kernels without the rest of vLLM; False where they do not load."""
    spec = importlib.util.find_spec("vllm")
    folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
    name = "_C"
    if hasattr(torch.cpu, "_is_avx512_supported") and os.uname().machine == "x86_64":
        if not torch.cpu._is_avx512_supported():
            name = "_C_AVX2"
        elif not torch.cpu._is_avx512_bf16_supported():
            name = "_C_AVX512"
    for path in glob.glob(os.path.join(folder, f"{name}.abi3.so")):
        try:
            torch.ops.load_library(path)
        except OSError:
            return False
    return hasattr(torch.ops._C, "create_onednn_mm_handler")


class Products:
    """The matrices of one format, ready to be multiplied as vLLM does."""

    def __init__(self, torch: Any, kernels: bool, format_: str, products: list[list[int]]):
        self.torch, self.dtype = (
            torch,
            {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[format_],
        )
        self.kernel = "onednn" if kernels else "torch"
        self.made: list[tuple[int, int, Callable[[Any], Any]]] = []  # outputs, inputs, multiply
        self.bytes = 0
        for outputs, inputs, _ in products:
            self.add(outputs, inputs)

    def add(self, outputs: int, inputs: int) -> None:
        weight = self.torch.full((outputs, inputs), 0.01, dtype=self.dtype)
        self.bytes += weight.numel() * weight.element_size()
        multiply = self._onednn(weight) if self.kernel == "onednn" else None
        if multiply is None:
            self.kernel = "torch"
            linear = self.torch.nn.functional.linear
            self.made.append((outputs, inputs, lambda x: linear(x, weight)))
        else:
            self.made.append((outputs, inputs, multiply))

    def _onednn(self, weight: Any) -> Callable[[Any], Any] | None:
        ops, torch = self.torch.ops._C, self.torch
        try:
            handler = torch.tensor(ops.create_onednn_mm_handler(weight.t(), 32), dtype=torch.int64)
        except RuntimeError:  # "Failed to create oneDNN linear" in vLLM's log
            return None
        outputs = weight.size(0)

        def multiply(x: Any) -> Any:
            out = torch.empty((x.size(0), outputs), dtype=x.dtype)
            ops.onednn_mm(out, x, None, handler)
            return out

        return multiply

    def times(self, rows: int, which: slice, until: float) -> tuple[float, float]:
        """Seconds and operations of one pass over some of the matrices: for each shape its quick products' time.

        A product takes less than a slice of the scheduler, so that even on a busy machine some run undisturbed.
        The first pass is not counted: oneDNN makes its code and packs its weights there.
        """
        inputs = {k: self.torch.full((rows, k), 0.01, dtype=self.dtype) for _, k, _ in self.made[which]}
        seen: dict[tuple[int, int], list[float]] = {}
        for number in range(_PASSES + 1):
            for n, k, multiply in self.made[which]:
                began = time.perf_counter()
                multiply(inputs[k])
                if number or spent() > until:
                    seen.setdefault((n, k), []).append(time.perf_counter() - began)
            if number and spent() > until:
                break
        quick = {shape: sorted(took)[len(took) // 20] for shape, took in seen.items()}
        shapes = [(n, k) for n, k, _ in self.made[which]]
        return sum(quick[s] for s in shapes), sum(2.0 * rows * n * k for n, k in shapes)


def build(torch: Any, kernels: bool, format_: str, request: dict[str, Any]) -> Products:
    """One layer's matrices, once more until the caches are exceeded, and the head last."""
    *layer, head = request["products"]
    element = 4 if format_ == "fp32" else 2
    once = sum(n * k for n, k, _ in layer) * element
    fitting = [[max(16, int(n * min(1.0, _MOST_BYTES / once))), k, c] for n, k, c in layer]  # a slice of a huge layer
    layers = max(1, min(layer[0][2], -(-_LEAST_BYTES // max(1, once)), _MOST_BYTES // max(1, once)))
    head = [max(16, min(head[0], _MOST_BYTES // (2 * head[1] * element))), head[1], 1]
    return Products(torch, kernels, format_, [*(fitting * layers), head])


def measure_format(torch: Any, kernels: bool, format_: str, request: dict[str, Any], until: float) -> dict[str, Any]:
    """Operations per second by rows.

    Where time does not allow all matrices, one layer's stand for them; where it does not allow those either, the rate
    is that of fewer rows, which is no quicker.
    """
    made = build(torch, kernels, format_, request)
    rates: list[float] = []
    everything, one_layer = slice(None), slice(0, len(request["products"]) - 1)

    def affordable(rows: int, which: slice, left: float) -> bool:
        flops = sum(2.0 * rows * n * k for n, k, _ in made.made[which])
        return not rates or 2 * flops / (rates[-1] * 1e9) <= left  # once to warm up, once to count

    for number, rows in enumerate(request["rows"]):
        now = spent()
        prompt = rows > 64  # a prompt needs the head for its last token only
        parts = (one_layer,) if prompt else (everything, one_layer)
        which = next((part for part in parts if affordable(rows, part, until - now)), None)
        if which is None:
            rates.append(rates[-1])
            continue
        seconds, flops = made.times(rows, which, now + (until - now) / (len(request["rows"]) - number))
        rates.append(flops / seconds / 1e9)
    return {"format": format_, "kernel": made.kernel, "rows": request["rows"], "gflops": [round(r, 3) for r in rates]}


def read_gb_s(torch: Any) -> float:
    """Bytes per second that all threads together read from memory."""
    block = torch.full((32 << 20,), 1.0, dtype=torch.float32)  # 128 MiB
    best = 0.0
    for _ in range(8):
        began = time.perf_counter()
        block.sum()
        best = max(best, block.numel() * 4 / (time.perf_counter() - began) / 1e9)
    return best


def python_s() -> float:
    """Seconds of a fixed piece of plain Python: how fast one core is at other work than arithmetic."""
    best = 1e9
    for _ in range(40):
        began = spent()
        table: dict[int, int] = {}
        for i in range(20_000):
            table[i & 255] = table.get(i & 255, 0) + i
        best = min(best, spent() - began)
    return best


def main() -> None:
    """Entry point of ``python -m corral_cpu_engine.measure``."""
    library = launch.find_openmp()
    if isinstance(library, openmp.OpenMP) and _MARK not in os.environ:
        os.execve(sys.executable, sys.orig_argv, environment(library))
    request = json.loads(sys.argv[1])
    import torch

    began, computed = time.perf_counter(), spent()
    answer: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "python_s": python_s(),
        "read_gb_s": read_gb_s(torch),
    }
    kernels, formats = load_kernels(torch), request["formats"]
    with torch.inference_mode():
        answer["formats"] = [
            measure_format(torch, kernels, format_, request, computed + request["budget_s"] * (i + 1) / len(formats))
            for i, format_ in enumerate(formats)
        ]
    answer["python_s"] = min(answer["python_s"], python_s())  # a virtual core may be slow for a tenth of a second
    took = time.perf_counter() - began
    answer |= {"took_s": took, "busy": max(0.0, 1 - (spent() - computed) / took)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

"""LoRA adapters as `peft` writes them, with random numbers, for the tiny Llama or any other shapes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_llama import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS

SHAPES = {  # outputs and inputs
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
Matrices = dict[str, tuple[list[list[float]], list[list[float]]]]  # A and B of each module


def make_adapter(
    folder: Path, seed: int = 0, rank: int = 4, shapes: Mapping[str, tuple[int, int]] = SHAPES, **config: Any
) -> Matrices:
    """Write an adapter of all layers; its matrices, by the names of the model's modules."""
    source = random.Random(seed)

    def matrix(rows: int, columns: int) -> list[list[float]]:  # numbers that a float32 holds
        return [[source.randint(-64, 64) / 512 for _ in range(columns)] for _ in range(rows)]

    made = {
        f"model.layers.{layer}.{name}": (matrix(rank, inputs), matrix(outputs, rank))
        for layer in range(LAYERS)
        for name, (outputs, inputs) in shapes.items()
    }
    tensors = {
        f"base_model.model.{name}.lora_{half}.weight": values
        for name, both in made.items()
        for half, values in zip("AB", both, strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "adapter_model.safetensors", tensors)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(shapes), "bias": "none",
            "base_model_name_or_path": "/somewhere/base"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**said, **config}))
    return made


def write_tensors(path: Path, tensors: Mapping[str, list[list[float]]]) -> None:
    """A safetensors file of float32 matrices."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, rows in tensors.items():
        raw = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
        shape, begin = [len(rows), len(rows[0])], len(data)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def merge(model: Path, made: Matrices, scale: float) -> None:
    """Add an adapter to a float32 model's own matrices: W + scale · B · A."""
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    for name, (a, b) in made.items():
        begin, end = header[f"{name}.weight"]["data_offsets"]
        values = memoryview(data)[8 + length + begin : 8 + length + end].cast("f")
        columns = list(zip(*a, strict=True))
        for row, of_b in enumerate(b):
            for column, of_a in enumerate(columns):
                values[row * len(columns) + column] += scale * sum(x * y for x, y in zip(of_b, of_a, strict=True))
        values.release()
    path.write_bytes(data)

"""What safetensors headers say: every tensor's name, type and size, without its data and without torch.

A file starts with eight bytes (the header's length, little-endian) and that much JSON. Sharded models name their
files in `model.safetensors.index.json`.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from corral.base.errors import DataError
from corral.base.untrusted import parse_json
from corral.plan.models.layers import Parts

_LARGEST_HEADER = 100_000_000  # the format's own limit
_MOST = 1 << 60  # bytes or elements
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I64": 64, "I32": 32,
    "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, as its header describes it."""

    name: str
    dtype: str
    elements: int

    @property
    def size_bytes(self) -> int:
        return self.elements * _BITS.get(self.dtype, 16) // 8


def read_header(path: Path) -> Mapping[str, Any]:
    """The header of one safetensors file, whose tensors must all lie inside it."""
    cut = DataError(f"{path} is cut off or is not a safetensors file.", "Download it again.")
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise cut
            (length,) = struct.unpack("<Q", start)
            if not 2 <= length <= _LARGEST_HEADER:
                raise cut
            body = file.read(length)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions.") from error
    if len(body) < length:
        raise cut
    try:
        header = parse_json(body, f"the header of {path}", _LARGEST_HEADER)
    except DataError:
        raise cut from None
    if not isinstance(header, dict):
        raise cut
    needed = 8 + length + _end_of_data(header, str(path))
    if needed > size:
        raise DataError(
            f"{path} is cut off: its header says {needed:,} bytes, and it has {size:,}.", "Download it again."
        )
    return header


def _end_of_data(header: Mapping[str, Any], where: str) -> int:
    """Where the last tensor ends, counted from the end of the header."""
    end = 0
    for name, row in header.items():
        if name == "__metadata__":
            continue
        span = row.get("data_offsets") if isinstance(row, dict) else None
        whole = span if isinstance(span, list) and all(type(n) is int and 0 <= n <= _MOST for n in span) else []
        if len(whole) != 2 or whole[0] > whole[1]:
            raise DataError(f"{where} has a malformed safetensors header.", "Download it again.")
        end = max(end, whole[1])
    return end


def header_tensors(header: Mapping[str, Any], where: str) -> list[Tensor]:
    """The tensors a header lists."""
    try:
        found = [
            Tensor(name, str(row["dtype"]), prod(int(n) for n in row["shape"]))
            for name, row in header.items()
            if name != "__metadata__"
        ]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DataError(f"{where} has a malformed safetensors header.", "Download it again.") from None
    if any(not 0 <= tensor.elements <= _MOST for tensor in found):
        raise DataError(f"{where} lists a tensor of an impossible shape.", "Download it again.")
    return found


def folder_tensors(folder: Path) -> list[Tensor]:
    """All tensors of a model folder; empty when it holds no safetensors."""
    return [tensor for file in weight_files(folder) for tensor in header_tensors(read_header(file), str(file))]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; refuses one that lacks some of those its index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    found = parse_json(index.read_bytes(), str(index), _LARGEST_HEADER, "Download it again.")
    shards = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shards, dict) or not all(map(_is_file_name, shards.values())):
        raise DataError(f"{index} is not a safetensors index.", "Download it again.")
    names = sorted(set(shards.values()))
    missing = [name for name in names if not (folder / name).is_file() or not (folder / name).stat().st_size]
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}.",
            "Finish the download; finished files are kept.",
        )
    return [folder / name for name in names]


def _is_file_name(name: Any) -> bool:
    """Whether an index may name it: a file of the folder, and of no other."""
    return isinstance(name, str) and bool(name) and not name.startswith("/") and ".." not in name.split("/")


def by_dtype(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes per stored type."""
    sums: Counter[str] = Counter()
    for tensor in tensors:
        sums[tensor.dtype] += tensor.size_bytes
    return dict(sums)


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|vision_embed\w*|audio_tower|multi_modal_projector"
                    r"|mm_projector|embed_vision|embed_audio)\.")  # fmt: skip
_MATRIX = r"\.(?:weight|qweight|weight_packed)"
_WHERE = (
    ("experts", re.compile(r"\.experts\.")),
    ("copied", re.compile(r"\.(?:q_a_proj|kv_a_proj_with_mqa|wq_a|wkv|indexer|compressor)\.")),
    ("mixer", re.compile(r"\.(?:linear_attn|mixer\.(?:in_proj|out_proj)|mamba)\b")),
    ("key_value", re.compile(rf"\.(?:k_proj|v_proj){_MATRIX}")),
    ("query_output", re.compile(r"\.(?:q_proj|o_proj|q_b_proj|kv_b_proj|qkv_proj|dense|out_proj|query_key_value)\."
                                r"(?:weight|qweight)")),
    ("mlp", re.compile(r"\.(?:mlp|block_sparse_moe|feed_forward|experts|shared_experts?)\..*(?:weight|qweight)")),
)  # fmt: skip
_PACKED = {"U8": 2, "I32": 8}  # numbers of four bits that are stored as one of these


def is_loaded(tensor: Tensor, layers: int) -> bool:
    """Whether vLLM loads it without speculation: layers for multi-token prediction stay in the file."""
    found = _LAYER.search(tensor.name)
    tower = _TOWER.search(tensor.name)
    return not tensor.name.startswith("mtp.") and (tower is not None or found is None or int(found[1]) < layers)


def numbers_of(tensors: Iterable[Tensor], weights: str) -> int:
    """Parameters: as many as there are elements, or more where several are packed into one."""
    packed = _PACKED if "4" in weights else {}
    return sum(one.elements * packed.get(one.dtype, 1) for one in tensors)


def by_part(tensors: Iterable[Tensor]) -> Parts:
    """Bytes per part, by the names Hugging Face models use; what fits no name counts as small (kept on each rank)."""
    sums: Counter[str] = Counter()
    for tensor in tensors:
        sums[_part(tensor)] += tensor.size_bytes
    return Parts(**sums)


def _part(tensor: Tensor) -> str:
    name = tensor.name
    if _TOWER.search(name):
        return "tower"
    if not _LAYER.search(name):
        if "embed" in name or "wte" in name:
            return "embedding"
        return "head" if "lm_head" in name else "small"
    if "norm" in name or name.endswith((".gate.weight", ".bias")):
        return "small"
    for part, pattern in _WHERE:
        if pattern.search(name):
            return part
    return "mlp" if tensor.elements > 1 << 20 else "small"

"""How quick a CPU multiplies, measured in the engine's own environment and remembered per machine and engine.

A measurement is taken with the shapes of one model (`corral_cpu_engine.measure`, two seconds) and kept in the home's
cache under the kind of CPU, its cores and the engine's pins, so that a shared home serves machines of several kinds.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import CorralError
from corral.base.files import make_dir, write_atomic
from corral.base.home import cache_dir
from corral.base.record import dump_json, from_json, load_json
from corral.base.shell import run
from corral.plan.hardware.inventory import CpuFacts

ROWS = (1, 4, 32, 512)
BUDGET_S = 2.0
_QUIET, _MOST_TIMES = 0.1, 5
TIMEOUT_S = 90.0  # importing torch on a busy machine takes longer than measuring


@dataclass(frozen=True)
class Product:
    """A matrix of a model, and how many of its kind a token is multiplied with; the head comes last."""

    outputs: int
    inputs: int
    count: int

    @property
    def parameters(self) -> int:
        return self.outputs * self.inputs * self.count


@dataclass(frozen=True)
class CpuKind:
    """What a measurement holds for: a kind of CPU, how many cores of it, and the engine's pins."""

    cpu: CpuFacts
    cores: int
    engine: str

    @property
    def key(self) -> str:
        return hashlib.sha256(dump_json(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FormatSpeed:
    """How quick one number format is, by rows multiplied at once."""

    format: str  # bf16 | fp16 | fp32
    rows: tuple[int, ...]
    gflops: tuple[float, ...]  # 10^9 operations per second
    kernel: str = ""  # what multiplied: onednn, or torch where oneDNN refuses the format

    def at(self, rows: float) -> float:
        """10^9 operations per second with so many rows, between the measured ones by their logarithms."""
        if rows <= self.rows[0]:
            return self.gflops[0]
        for i in range(1, len(self.rows)):
            low, high = self.rows[i - 1], self.rows[i]
            if rows <= high:
                share = math.log(rows / low) / math.log(high / low)
                return float(self.gflops[i - 1] * (self.gflops[i] / self.gflops[i - 1]) ** share)
        return self.gflops[-1]


@dataclass(frozen=True)
class CpuSpeed:
    """One measurement."""

    model: str  # whose shapes were multiplied
    products: tuple[Product, ...]
    threads: int
    read_gb_s: float  # from memory, all threads together
    python_s: float  # a fixed piece of plain Python: how quick a core is at what is not arithmetic
    formats: tuple[FormatSpeed, ...]
    measured_s: float = 0.0  # when
    busy: float = 0.0  # share of the time that others computed meanwhile
    times: int = 1  # how often it was measured, until the machine was quiet

    @property
    def disturbed(self) -> bool:
        """Whether it is worth measuring again: others computed meanwhile, and not too often already."""
        return self.busy > _QUIET and self.times < _MOST_TIMES

    def of(self, format_: str) -> FormatSpeed | None:
        return next((speed for speed in self.formats if speed.format == format_), None)


@dataclass(frozen=True)
class Remembered:
    """All measurements of one kind of CPU with one engine."""

    kind: CpuKind
    speeds: tuple[CpuSpeed, ...] = ()


def _path(kind: CpuKind) -> Path:
    return cache_dir() / f"cpu-speed-{kind.key}.json"


def _read(kind: CpuKind) -> Remembered:
    try:
        found = load_json(Remembered, _path(kind))
    except (OSError, CorralError):  # none yet, or of another version of Corral: measured again
        return Remembered(kind)
    return found if found.kind == kind else Remembered(kind)


def recall_cpu_speed(kind: CpuKind, products: Sequence[Product]) -> CpuSpeed | None:
    """What was measured with these shapes, or with the nearest in size."""
    speeds = _read(kind).speeds
    wanted = sum(product.parameters for product in products)
    same = [speed for speed in speeds if speed.products == tuple(products)]
    return min(same or speeds, key=lambda speed: _distance(speed, wanted), default=None)


def _distance(speed: CpuSpeed, parameters: int) -> float:
    return abs(math.log(max(1, sum(p.parameters for p in speed.products)) / max(1, parameters)))


def remember_cpu_speed(kind: CpuKind, speed: CpuSpeed) -> None:
    """Keep a measurement; of one that was disturbed and the next of the same shapes, the quicker figures."""
    known = _read(kind).speeds
    others = [old for old in known if old.products != speed.products]
    for old in known:
        if old.products == speed.products:
            speed = _joined(old, speed)
    path = _path(kind)
    make_dir(path.parent)
    write_atomic(path, dump_json(Remembered(kind, (*others, speed))), 0o644)


def _joined(old: CpuSpeed, new: CpuSpeed) -> CpuSpeed:
    """What two measurements of one machine tell: others only ever slow it."""
    formats = {speed.format: speed for speed in old.formats}
    for speed in new.formats:
        before = formats.get(speed.format)
        if before is not None and before.rows == speed.rows:
            best = tuple(max(pair) for pair in zip(before.gflops, speed.gflops, strict=True))
            speed = replace(speed, gflops=best)
        formats[speed.format] = speed
    return replace(
        new,
        formats=tuple(formats.values()),
        read_gb_s=max(old.read_gb_s, new.read_gb_s),
        python_s=min(old.python_s, new.python_s),
        busy=min(old.busy, new.busy),
        times=old.times + 1,
    )


def measure_cpu_speed(python: str, model: str, products: Sequence[Product], formats: Sequence[str]) -> CpuSpeed:
    """Multiply in the engine's environment; raises where that environment cannot."""
    order = {
        "products": [[p.outputs, p.inputs, p.count] for p in products],
        "formats": list(formats),
        "rows": list(ROWS),
        "budget_s": BUDGET_S,
    }
    command = [python, "-m", "corral_cpu_engine.measure", json.dumps(order)]
    done = run(command, TIMEOUT_S).or_raise("the CPU could not be measured")
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        found = {name: answer[name] for name in ("threads", "read_gb_s", "python_s", "formats", "busy")}
        measured = from_json(CpuSpeed, {**found, "model": model, "products": []})
    except (ValueError, IndexError, KeyError, TypeError, CorralError) as error:
        raise CorralError(
            f"the CPU could not be measured: the script's answer cannot be read ({error}).", ""
        ) from None
    return replace(measured, products=tuple(products), measured_s=time.time())

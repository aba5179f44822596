"""Workloads by name: lengths that are typical of a use, stated, so that nobody takes them for his own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.base.errors import DataError, UsageError
from corral.base.files import read_text
from corral.base.untrusted import parse_json
from corral.lab.bench.spec import Workload


@dataclass(frozen=True)
class Preset:
    """Tokens of a prompt and of an answer; lengths vary by ± a third."""

    input_len: int
    output_len: int
    shared: int = 0  # of the prompt, the same for many

    @property
    def words(self) -> str:
        shared = f", the first {self.shared} of them shared" if self.shared else ""
        return f"{self.input_len} prompt tokens{shared}, {self.output_len} output tokens"


PRESETS = {
    "chat": Preset(512, 256, 128),
    "rag": Preset(4096, 256),
    "code": Preset(2048, 384),
    "summarise": Preset(6144, 384),
    "batch": Preset(512, 128),
}


def workload_of(word: str, chat: bool, seed: int) -> Workload:
    """A preset by its name, or a file of requests: a trace, a batch file, or prompts with one JSON object a line."""
    preset = PRESETS.get(word)
    if preset is not None:
        dataset = "prefix_repetition" if preset.shared else "random"
        return Workload(
            dataset=dataset, input_len=preset.input_len, output_len=preset.output_len, range_ratio=0.33,
            prefix_len=preset.shared or 64, chat=chat, seed=seed,
        )  # fmt: skip
    if "." not in word and "/" not in word:
        raise UsageError(f"there is no workload called {word!r}.", f"Known: {', '.join(PRESETS)}; or give a file.")
    return Workload(dataset=_kind(word), file=str(Path(word).expanduser().absolute()), chat=chat, seed=seed)


def _kind(file: str) -> str:
    """What a file holds, by its first line."""
    first = next((line for line in read_text(file).splitlines() if line.strip()), "")
    try:
        found = parse_json(first, file)
    except DataError:
        found = None
    names = set(found) if isinstance(found, dict) else set()
    if names & {"custom_id", "body"}:
        return "batch"
    return "trace" if names & {"timestamp", "time_s"} and "prompt" not in names else "custom"

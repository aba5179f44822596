"""Runs inside an engine's environment: one GGUF file -> a folder that vLLM loads (safetensors, tokenizer, template).

    python convert_gguf.py SOURCE.gguf DESTINATION

The folder is written beside its place and renamed when whole.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def main(source: Path, destination: Path) -> None:
    say("reading the quantised file")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    quantised = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=quantised, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    say("writing safetensors")
    temporary = destination.with_name(f".{destination.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(destination)
    say("converted")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

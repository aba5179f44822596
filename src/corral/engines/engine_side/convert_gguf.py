#!/usr/bin/env python3
"""Turn a GGUF file into a Hugging Face model folder that vLLM can serve.

    ENGINE_PYTHON convert_gguf.py SRC.gguf DEST_DIR [--dtype bfloat16] [--force]

Runs inside the engine environment (needs torch, transformers, gguf,
safetensors; no network).  Writes weights (dequantized, bf16), tokenizer, chat
template and generation config to DEST_DIR.tmp and renames it at the end, so
DEST_DIR is complete or absent.  Progress goes to stdout, one line per step:

    convert: 40% reading tensors (3.1 s)

Exit code 0 done (or already there), 1 failed (reason on stderr), 2 bad usage.

transformers parses the file anew for configuration, weights and tokenizer, each
time through a slow memory-map class.  The file is parsed once here, which is
three times faster; where a library looks different, its own way is used.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

START = time.monotonic()


def say(percent: int, text: str) -> None:
    """One progress line."""
    print(f"convert: {percent:3d}% {text} ({time.monotonic() - START:.1f} s)", flush=True)


def speed_up_reader() -> None:
    """Parse the GGUF file once, through plain arrays; best effort."""
    import gguf
    import numpy as np
    from gguf import gguf_reader
    from transformers import modeling_gguf_pytorch_utils as utils

    class Numpy:
        """numpy as the reader sees it: memmap() gives a plain array."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        @staticmethod
        def memmap(*args: Any, **kwargs: Any) -> Any:
            return np.asarray(np.memmap(*args, **kwargs))

    if getattr(gguf_reader, "np", None) is np:
        gguf_reader.np = Numpy()
    # transformers does `from gguf import GGUFReader, get_tensor_name_map` in functions
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

    original = utils.load_gguf_checkpoint
    parsed: dict[str, Any] = {}

    @functools.wraps(original)
    def load_gguf_checkpoint(path: Any, return_tensors: bool = False, **kwargs: Any) -> Any:
        if return_tensors:
            return original(path, return_tensors=True, **kwargs)
        key = os.fspath(path)
        if key not in parsed:
            parsed[key] = original(path, return_tensors=False, **kwargs)
        return copy.deepcopy(parsed[key])

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformers") and (
            vars(module).get("load_gguf_checkpoint") is original
        ):
            module.load_gguf_checkpoint = load_gguf_checkpoint


def convert(source: Path, dest: Path, dtype: str) -> None:
    """Convert `source` into the new folder `dest`."""
    say(0, "loading libraries")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        speed_up_reader()
    except (ImportError, AttributeError) as e:
        say(10, f"slow reader ({e})")
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    say(20, f"reading tokenizer of {source.name}")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    say(40, "reading tensors")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, dtype), **where
    )
    for name in ("quantization_config", "_name_or_path"):  # plain weights from here on
        if hasattr(model.config, name):
            delattr(model.config, name)
    if tokenizer.eos_token_id is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id

    say(80, "writing")
    dest.mkdir(parents=True)
    model.save_pretrained(dest)
    tokenizer.save_pretrained(dest)
    if tokenizer.chat_template is None:
        say(90, "note: the file carries no chat template")
    for path in dest.iterdir():
        path.chmod(0o644)
        with open(path, "rb") as f:
            os.fsync(f.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--force", action="store_true", help="replace DEST_DIR")
    args = parser.parse_args()
    source, dest = args.source.absolute(), args.dest.absolute()
    if not source.is_file():
        print(f"convert: no such file: {source}", file=sys.stderr)
        return 2
    if (dest / "config.json").is_file() and not args.force:
        say(100, f"already there: {dest}")
        return 0
    work = dest.with_name(dest.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    os.environ["TQDM_DISABLE"] = "1"
    gc.disable()  # millions of short-lived objects, no cycles worth finding
    try:
        convert(source, work, args.dtype)
        if dest.exists():
            shutil.rmtree(dest)
        work.rename(dest)
    except Exception as e:
        shutil.rmtree(work, ignore_errors=True)
        print(f"convert: failed: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    say(100, f"done: {dest}")
    gc.freeze()
    return 0


if __name__ == "__main__":
    sys.exit(main())

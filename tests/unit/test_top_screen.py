"""`corral top` at 60, 80 and 120 columns, as text: read it when it changes."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from corral.cli.top import _drawn
from corral.client.metrics import Load, Reading
from corral.use.llm.top import Line

BUSY = Line(
    "llama-3.1-405b-instruct-fp8",
    "meta-llama/Llama-3.1-405B-Instruct-FP8",
    "http://127.0.0.1:8000",
    Reading(at_s=0, running=256, waiting=1744, kv_use=0.987),
    Load(generated_tokens_per_s=12_345.6, prompt_tokens_per_s=98_765.4, ttft_s=12.345, prefix_hit_share=0.43),
)
SILENT = Line("smollm2", "smollm2", "http://127.0.0.1:8001", None, None, "127.0.0.1:8001 refused the connection.")

SCREENS = {
    60: """
NAME              RUN  WAIT     KV   TOK/S       TTFT
llama-3.1-405b-…  256  1744  98.7%  12,346  12,345 ms
smollm2
Ctrl-C leaves
smollm2: 127.0.0.1:8001 refused the connection.
""",
    80: """
NAME                      RUN  WAIT     KV   TOK/S  PROMPT/S       TTFT  HITS
llama-3.1-405b-instruct…  256  1744  98.7%  12,346    98,765  12,345 ms   43%
smollm2
Ctrl-C leaves
smollm2: 127.0.0.1:8001 refused the connection.
""",
    120: """
NAME                      RUN  WAIT                KV   TOK/S  PROMPT/S       TTFT  HITS  MODEL
llama-3.1-405b-instruct…  256  1744  ██████████ 98.7%  12,346    98,765  12,345 ms   43%  meta-llama/Llama-3.1-405…
smollm2
Ctrl-C leaves
smollm2: 127.0.0.1:8001 refused the connection.
""",
}


@pytest.mark.parametrize("columns", SCREENS)
def test_the_screen_fits(columns: int) -> None:
    console = Console(file=io.StringIO(), width=columns, force_terminal=False, color_system=None)
    console.print(_drawn([BUSY, SILENT], columns))
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r" +$", "", console.file.getvalue(), flags=re.MULTILINE)
    assert text == SCREENS[columns].lstrip("\n")

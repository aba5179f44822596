"""`corral fake-server`: the fake server as a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from corral.base.errors import UsageError
from corral.cli.help_pages import RenamedOption


def _answer_tokens(text: str) -> tuple[int, int] | None:
    if text == "all":
        return None
    low, _, high = text.partition("-")
    try:
        span = int(low), int(high or low)
    except ValueError:
        span = 0, 0
    if not 1 <= span[0] <= span[1]:
        raise UsageError(f"--answer-tokens {text!r} cannot be used.", "Give N, LOW-HIGH, or `all`.")
    return span


def _tool_call(text: str) -> tuple[str, str]:
    name, _, arguments = text.partition("=")
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    if not name or not isinstance(found, dict):
        raise UsageError(f"--tool-call {text!r} cannot be used.", "Give a name and arguments: 'add={\"a\": 2}'.")
    return name, json.dumps(found)


_SAME = (  # an option and a field
    "model", "host", "port", "max_model_len", "key_file", "log", "seed", "control", "answer", "thoughts", "adapters",
)  # fmt: skip


@click.command(epilog="Faults and their settings: docs/fake-server.md.")
@click.option("--model", default="fake", show_default=True, help="Name of the served model.")
@click.option("--adapters", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Serve the folders of DIR beside the model, each by its name.")  # fmt: skip
@click.option("--bind", "host", cls=RenamedOption, was="--host", default="127.0.0.1", show_default=True,
              metavar="ADDRESS", help="Address to listen on.")  # fmt: skip
@click.option("--port", default=0, show_default=True, help="Port; 0 takes a free one.")
@click.option("--max-model-len", default=8192, show_default=True, help="Context length in tokens.")
@click.option("--key-file", type=click.Path(path_type=Path), help="File with the key that callers must present.")
@click.option("--log", type=click.Path(path_type=Path), help="Append every request's true times to this JSONL file.")
@click.option("--seed", default=0, show_default=True, help="Seed of the fault choice.")
@click.option("--answer-tokens", default="16-256", show_default=True, help="When answers end: N, LOW-HIGH, or `all`.")
@click.option("--ttft-ms", default=0.0, show_default=True, help="Time to the first token.")
@click.option("--itl-ms", default=0.0, show_default=True, help="Time between tokens.")
@click.option("--jitter", default=0.0, show_default=True, help="Relative spread of the time between tokens, 0 to 1.")
@click.option("--prefill-rate", default=0.0, help="Prompt tokens per second, added to the time to the first token.")
@click.option("--max-seqs", default=0, help="Sequences that run at once; more wait.  [default: no limit]")
@click.option("--kv-tokens", default=0, help="Tokens the cache holds; past it the youngest is preempted.")
@click.option("--requests-per-s", default=0.0, help="Requests let in per second: a knee for request rates.")
@click.option("--tokens-per-s", default=0.0, help="Output tokens per second, shared: a knee for token rates.")
@click.option(
    "--tool-call", "tool_calls", multiple=True, metavar="NAME=JSON",
    help="Answer a chat that has tools with this call; repeatable, the next one once the result is there.",
)  # fmt: skip
@click.option("--answer", default="", metavar="TEXT", help="Answer everything with this text.")
@click.option(
    "--thought-tokens",
    "thoughts",
    default=0,
    metavar="N",
    help="Send the first N tokens of a chat answer as `reasoning`.",
)
@click.option("--no-prefix-cache", is_flag=True, help="No prefix-cache hits.")
@click.option(
    "--fault", "faults", multiple=True, metavar="KIND[:k=v,…]", help="Something that goes wrong; repeatable."
)
@click.option("--control", is_flag=True, help="Allow POST /control/faults, /control/health and /control/pace.")
@click.option("--no-uvloop", is_flag=True, help="Use the standard event loop even where uvloop is installed.")
@click.option("--until-eof", is_flag=True, help="Stop when standard input ends, so that no orphan is left.")
def command(**settings: Any) -> int:
    """Serve made-up answers the way vLLM serves real ones, at a set pace and with set faults.

    Prints one JSON line with `url` and `pid` when ready.
    """
    from corral.fake.app import FakeOptions
    from corral.fake.faults import parse_fault
    from corral.fake.pace import Pace
    from corral.fake.server import run

    if not 0 <= settings["jitter"] <= 1:
        raise UsageError(f"--jitter {settings['jitter']} is out of range.", "Give a number from 0 to 1.")
    rates = ("jitter", "max_seqs", "kv_tokens", "requests_per_s", "tokens_per_s")
    pace = Pace(
        ttft_s=settings["ttft_ms"] / 1000,
        itl_s=settings["itl_ms"] / 1000,
        prefill_tokens_per_s=settings["prefill_rate"],
        **{name: settings[name] for name in rates},
    )
    options = FakeOptions(
        **{name: settings[name] for name in _SAME},
        answer_tokens=_answer_tokens(settings["answer_tokens"]),
        prefix_cache=not settings["no_prefix_cache"],
        uvloop=not settings["no_uvloop"],
        pace=pace,
        faults=tuple(map(parse_fault, settings["faults"])),
        tool_calls=tuple(map(_tool_call, settings["tool_calls"])),
    )
    return run(options, until_eof=settings["until_eof"])

"""Runs inside an engine's environment: prints the flags of its `vllm serve`, its parsers and variables."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def first_attribute(modules: list[str], name: str) -> Any:
    """The attribute from the first module that has it: vLLM moves these between versions."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"no {name} in any of {modules}")


def main() -> None:
    vllm = importlib.import_module("vllm")
    launchers = ["vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"]
    parser_type = first_attribute(["vllm.utils.argparse_utils", "vllm.utils"], "FlexibleArgumentParser")
    parser = first_attribute(launchers, "make_arg_parser")(parser_type())
    flags = {
        option: {"dest": action.dest, "takes_value": action.nargs != 0}
        for action in parser._actions
        for option in action.option_strings
    }
    old = "vllm.entrypoints.openai.tool_parsers"
    tool_parsers = first_attribute(["vllm.tool_parsers", old], "ToolParserManager").list_registered()
    reasoning_parsers = first_attribute(["vllm.reasoning"], "ReasoningParserManager").list_registered()
    document = {
        "version": vllm.__version__,
        "flags": flags,
        "tool_parsers": sorted(tool_parsers),
        "reasoning_parsers": sorted(reasoning_parsers),
        "variables": sorted(first_attribute(["vllm.envs"], "environment_variables")),
    }
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()

"""Which of vLLM's parsers reads a model's tool calls: one table by name, and the chat template for other names.

vLLM refuses `tool_choice: auto`, which every agent framework sends, unless a server is started with a parser. Models
write their calls in the form of their family, so the name decides; a folder with a name of its own is judged by the
markers in its chat template. A parser is only used where the engine's version has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from corral.engines.flags import FlagList, flag_name

_PARSERS = (  # the first row whose pattern is found in a name, in small letters with dashes, decides
    (r"embed|rerank|reward|guard|asr|tts|lfm2.*(base|vl|jp$)|nemotron-(nano-9b-v2|nas|h-)|llama.*nemotron", ""),
    (r"llama-4.*instruct", "llama4_pythonic"),
    (r"llama-3[.-][123].*instruct", "llama3_json"),
    (r"deepseek.*v4", "deepseek_v4"),
    (r"deepseek.*v3[.-]?2", "deepseek_v32"),
    (r"deepseek.*v3[.-]?1", "deepseek_v31"),
    (r"deepseek-(v3|r1)(?!.*distill)", "deepseek_v3"),
    (r"gemma-?4(?!b)|diffusiongemma", "gemma4"),
    (r"functiongemma", "functiongemma"),
    (r"glm-(4\.7|5)|macaron", "glm47"),
    (r"glm-4\.[56]", "glm45"),
    (r"gpt-oss", "openai"),
    (r"granite-4", "granite4"),
    (r"granite-3.*instruct", "granite"),
    (r"hy3", "hy_v3"),
    (r"inkling", "inkling"),
    (r"intern-s2", "qwen3_coder"),
    (r"intern-s1|internlm", "internlm"),
    (r"jamba", "jamba"),
    (r"kimi-k3", "kimi_k3"),
    (r"kimi-k2", "kimi_k2"),
    (r"laguna", "poolside_v1"),
    (r"lfm2", "lfm2"),
    (r"ling-3", "ling3"),
    (r"mimo-v2-flash", "qwen3_xml"),
    (r"mimo-v2", "mimo"),
    (r"minicpm-?v-4\.6", "qwen3_coder"),
    (r"minimax-m2", "minimax_m2"),
    (r"minimax-m3", "minimax_m3"),
    (r"(mistral|ministral|magistral|devstral|mixtral)(?!.*base)(?!.*embed)", "mistral"),
    (r"muse-glimmer", "muse_glimmer"),
    (r"nemotron-(3-super|3\.5-lightning)", "qwen3_xml"),
    (r"nemotron-3|trinity-large", "qwen3_coder"),
    (r"phi-4-mini", "phi4_mini_json"),
    (r"qwen3-coder|qwen3\.\d", "qwen3_coder"),
    (r"^(?!.*(base|-vl|omni)).*(qwen3|qwen2\.5.*instruct|qwq)", "hermes"),
    (r"hermes|mellum2|smollm2($|.*instruct)|smollm3", "hermes"),
    (r"seed-oss", "seed_oss"),
    (r"dots3", "dots"),
    (r"step-3\.[57]", "step3p5"),
    (r"xlam", "xlam"),
)
_MARKERS = (  # in a chat template; the more particular first
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
)
_OWN_FLAGS = {"--tool-call-parser", "--enable-auto-tool-choice", "--tool-parser-plugin"}


def parser_for(names: Sequence[str], folder: str = "") -> str:
    """vLLM's name of the parser for a model with any of these names; empty where none is known."""
    for name in names:
        spelled = name.lower().replace("_", "-")
        row = next((row for row in _PARSERS if re.search(row[0], spelled)), None)
        if row is not None:
            return row[1]
    template = _chat_template(Path(folder)) if folder else ""
    return next((parser for marker, parser in _MARKERS if marker in template), "")


def tool_arguments(parser: str, said: Sequence[str], flags: FlagList) -> list[str]:
    """The flags that switch tool calls on; none where the user's own flags decide, or this vLLM lacks the parser."""
    if not parser or _OWN_FLAGS & {flag_name(word) for word in said} or parser not in flags.tool_parsers:
        return []
    return ["--enable-auto-tool-choice", "--tool-call-parser", parser]


def _chat_template(folder: Path) -> str:
    """The text of a folder's chat template; empty where there is none to be read."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
        found = json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template", "")
    except (OSError, ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

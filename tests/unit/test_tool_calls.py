"""Which parser reads a model's tool calls, and what `corral up` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corral.engines.flags import FlagList, shipped_flags
from corral.engines.tool_calls import parser_for, tool_arguments

RECIPES = json.loads((Path(__file__).parent.parent / "data" / "tool_parsers.json").read_text())
FLAGS = shipped_flags()


@pytest.mark.parametrize(("model", "parser"), sorted(RECIPES.items()))
def test_the_table_agrees_with_the_recipes_of_vllm(model: str, parser: str) -> None:
    assert parser_for([model.rpartition("/")[2]]) == parser


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("llama-3.1-8b-instruct-fp8", "llama3_json"),
        ("Meta-Llama-3.1-405B-Instruct", "llama3_json"),
        ("nvidia_Llama-3.3-70B-Instruct-FP8", "llama3_json"),
        ("Llama-4-Scout-17B-16E-Instruct", "llama4_pythonic"),
        ("smollm2", "hermes"),
        ("Mistral-7B-Instruct-v0.3", "mistral"),
        ("DeepSeek-R1-Distill-Llama-70B", ""),
        ("llama-3.1-8b", ""),  # a base model has no form for calls
        ("Qwen3-Embedding-8B", ""),
        ("bge-m3", ""),
        ("my-model", ""),
    ],
)
def test_names_of_families(name: str, parser: str) -> None:
    assert parser_for([name]) == parser


def test_every_parser_of_the_table_is_one_of_vllm() -> None:
    from corral.engines.tool_calls import _MARKERS, _PARSERS

    assert FLAGS is not None
    assert {parser for _, parser in (*_PARSERS, *_MARKERS) if parser} <= FLAGS.tool_parsers


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{% if tools %}<tool_call>{{ x }}</tool_call>{% endif %}", "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("[TOOL_CALLS]{{ x }}", "mistral"),
        ("{{ messages }}", ""),
    ],
)
def test_a_folder_with_a_name_of_its_own_is_judged_by_its_chat_template(
    tmp_path: Path, template: str, parser: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert parser_for(["my-finetune"], str(tmp_path)) == parser
    (tmp_path / "tokenizer_config.json").write_text("[1, 2")
    assert parser_for(["my-finetune"], str(tmp_path)) == ""
    (tmp_path / "chat_template.jinja").write_text(template)
    assert parser_for(["my-finetune"], str(tmp_path)) == parser


def test_the_users_own_flags_and_an_older_vllm_decide() -> None:
    assert FLAGS is not None
    on = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    assert tool_arguments("hermes", [], FLAGS) == on
    assert tool_arguments("hermes", ["--tool-call-parser=pythonic"], FLAGS) == []
    assert tool_arguments("hermes", ["--enable_auto_tool_choice"], FLAGS) == []
    assert tool_arguments("", [], FLAGS) == []
    assert tool_arguments("hermes", [], FlagList("0.1", {}, tool_parsers=frozenset({"mistral"}))) == []

"""What is known of a model's family, and what `corral up` makes of it."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import DataError, EngineError, NotFoundError, UnreachableError
from corral.engines import PINNED_VERSION
from corral.engines.flags import FlagList, check_arguments, shipped_flags
from corral.engines.recipes import (
    ModelRecipe,
    applied,
    newer_engine,
    read_table,
    recipe_for,
    shipped_table,
    tables,
    updated_file,
)
from tests.unit.conftest import Corral

# by model, as vllm-project/recipes had it in August 2026: parsers of tool calls (None: none) and thoughts, version
FACTS = json.loads((Path(__file__).parent.parent / "data" / "recipes.json").read_text())
NIGHTLY = "nightly"
OLD = (0, 12, 0)  # up to here a recipe names the version that it was tried with rather than the least
FLAGS = shipped_flags() or FlagList("", {})
TABLE = shipped_table()


def of(*names: str, folder: str = "") -> ModelRecipe:
    return recipe_for(names, folder, [TABLE])


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@pytest.mark.parametrize(("model", "facts"), sorted(FACTS.items()))
def test_the_table_agrees_with_the_recipes_of_vllm(model: str, facts: list[str | None]) -> None:
    tools, thoughts, since = facts
    recipe = of(model.rpartition("/")[2])
    if tools is not None:
        assert recipe.tool_parser == tools
    assert (recipe.reasoning_parser or None) == thoughts
    if since and since != NIGHTLY:
        least = version(recipe.least_vllm or "0.0")
        assert least == version(since) if version(since) > OLD else least <= OLD


@pytest.mark.parametrize("model", sorted(FACTS))
def test_every_recipe_passes_the_check_of_flags(model: str) -> None:
    recipe = of(model.rpartition("/")[2])
    used = applied(recipe, [], {}, FLAGS, tools=True)
    check_arguments([*used.api_arguments, *used.arguments], FLAGS)
    assert not [note for note in used.notes if "left out" in note]
    assert used.environment == (recipe.environment or {})
    assert version(recipe.least_vllm or "0.0") <= version(PINNED_VERSION)


def test_every_row_is_of_the_pinned_vllm() -> None:
    for row in TABLE.recipes:
        assert {row.tool_parser} <= {None, "", *FLAGS.tool_parsers}, row
        assert {row.reasoning_parser} <= {None, "", *FLAGS.reasoning_parsers}, row
        assert {*(row.environment or {})} <= FLAGS.variables, row
        check_arguments(row.arguments or (), FLAGS)
    assert {marker.tool_parser for marker in TABLE.templates} <= FLAGS.tool_parsers


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
        ("Qwen3-8B-Base", ""),
        ("Qwen3-Embedding-8B", ""),
        ("bge-m3", ""),
        ("my-model", ""),
    ],
)
def test_names_of_families(name: str, parser: str) -> None:
    assert (of(name).tool_parser or "") == parser


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("Qwen3-8B", "qwen3"),
        ("Qwen3-30B-A3B-Thinking-2507-FP8", "qwen3"),
        ("Qwen3-30B-A3B-Instruct-2507", ""),
        ("Qwen3-Coder-Next", ""),
        ("Qwen3-8B-Base", ""),
        ("DeepSeek-R1-Distill-Llama-70B", "deepseek_r1"),
        ("llama-3.1-8b-instruct", ""),
    ],
)
def test_who_thinks(name: str, parser: str) -> None:
    assert (of(name).reasoning_parser or "") == parser


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{% if tools %}<tool_call>{{ x }}</tool_call>{% endif %}", "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("[TOOL_CALLS]{{ x }}", "mistral"),
        ("{{ messages }}", None),
    ],
)
def test_a_folder_with_a_name_of_its_own_is_judged_by_its_chat_template(
    tmp_path: Path, template: str, parser: str | None
) -> None:
    def chosen() -> str | None:
        return of("my-finetune", folder=str(tmp_path)).tool_parser

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert chosen() == parser
    (tmp_path / "tokenizer_config.json").write_text("[1, 2")
    assert chosen() is None
    (tmp_path / "chat_template.jinja").write_text(template)
    assert chosen() == parser


ARGUMENTS = ("--no-enable-prefix-caching", "--tokenizer-mode", "mistral")
RECIPE = ModelRecipe("hermes", "qwen3", ARGUMENTS, {"VLLM_MOE_X": "1"})
ON = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def test_the_users_own_flags_decide() -> None:
    def tools(*said: str) -> list[str]:
        return list(applied(RECIPE, said, {}, FLAGS, tools=True).api_arguments)

    def rest(*said: str) -> list[str]:
        return list(applied(RECIPE, said, {}, FLAGS, tools=True).arguments)

    assert tools() == tools("--reasoning-parser", "qwen3") == ON
    assert tools("--tool-call-parser=pythonic") == tools("--enable_auto_tool_choice") == []
    assert rest() == ["--reasoning-parser", "qwen3", *ARGUMENTS]
    assert rest("--reasoning-parser=deepseek_r1") == list(ARGUMENTS)
    assert "--no-enable-prefix-caching" not in rest("--enable-prefix-caching")
    assert "--tokenizer-mode" not in rest("--tokenizer_mode=hf")
    assert not applied(RECIPE, [], {}, FLAGS, tools=False).api_arguments


def test_what_an_engine_lacks_is_left_out_and_named() -> None:
    used = applied(RECIPE, [], {}, FLAGS, tools=True)
    assert used.environment == {}
    assert used.notes[-1].endswith(f"vLLM {PINNED_VERSION} has no VLLM_MOE_X")
    small = FlagList("0.1", {"--tokenizer-mode": True}, tool_parsers=frozenset({"mistral"}), variables=frozenset())
    used = applied(RECIPE, [], {}, small, tools=True)
    assert (used.api_arguments, used.arguments) == ((), ("--tokenizer-mode", "mistral"))
    assert used.notes[-1].endswith("vLLM 0.1 has no --reasoning-parser qwen3 --no-enable-prefix-caching VLLM_MOE_X")


@pytest.fixture
def qwen(corral: Corral, tmp_path: Path) -> str:
    shutil.copytree(corral.model, tmp_path / "Qwen3.5-397B-A17B")
    return str(tmp_path / "Qwen3.5-397B-A17B")


def rank(corral: Corral, *words: str) -> tuple[list[str], dict[str, str], str]:
    done = corral("up", *words)
    assert done.code == 0, done.err
    spec = json.loads(done.out)["ranks"][0]
    return spec["argv"], spec["env"], done.err


def test_up_applies_a_recipe_and_says_so(corral: Corral, qwen: str) -> None:
    argv, env, said = rank(corral, qwen, "--dry-run", "--json")
    assert argv[argv.index("--reasoning-parser") + 1] == "qwen3"
    assert argv[argv.index("--tool-call-parser") + 1] == "qwen3_coder"
    assert env["VLLM_USE_DEEP_GEMM"] == "0"
    variables = "VLLM_USE_DEEP_GEMM=0, VLLM_DEEP_GEMM_WARMUP=skip"
    note = f"its recipe ({TABLE.label}) sets --reasoning-parser qwen3, {variables}; --no-recipe leaves it out"
    assert note in " ".join(said.split())
    argv, env, said = rank(corral, qwen, "--dry-run", "--json", "--no-recipe")
    assert not {"--reasoning-parser", "--tool-call-parser"} & {*argv}
    assert "VLLM_USE_DEEP_GEMM" not in env
    assert "recipe" not in said
    argv, env, said = rank(
        corral,
        qwen,
        "--dry-run",
        "--json",
        "--no-tools",
        "--env",
        "VLLM_USE_DEEP_GEMM=1",
        "--",
        "--reasoning-parser",
        "glm45",
    )
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--reasoning-parser"] == ["glm45"]
    assert "--tool-call-parser" not in argv
    assert (env["VLLM_USE_DEEP_GEMM"], env["VLLM_DEEP_GEMM_WARMUP"]) == ("1", "skip")


def test_an_engine_that_is_too_old_is_refused_before_anything_is_fetched(corral: Corral, qwen: str) -> None:
    words = ("up", qwen, "--runtime", "docker", "--runtime-option", "image=vllm/vllm-openai:v0.16.1", "--dry-run")
    done = corral(*words)
    assert done.code == EngineError.exit_code
    assert f"needs vLLM 0.17.0 or later, and 0.16.1 would serve it ({TABLE.label})" in " ".join(done.err.split())
    assert "corral engine install cpu" in " ".join(done.err.split())
    assert corral(*words, "--no-recipe").code == 0


def test_the_way_to_a_newer_engine_is_one_that_exists() -> None:
    assert "`corral engine install cuda` installs" in newer_engine("0.20.0", "managed", "cuda")
    assert "`corral engine install --into conda:NAME`" in newer_engine("0.20.0", "conda", "cuda")
    assert f"image vllm/vllm-openai-rocm:v{PINNED_VERSION}" in newer_engine("0.20.0", "docker", "rocm")
    assert "image=vllm/vllm-openai-rocm:v0.99.1" in newer_engine("0.99.1", "docker", "rocm")
    assert "corral engine install" not in newer_engine("0.99.1", "managed", "cuda")  # it has no lock of that


def table(**row: Any) -> bytes:
    row = {"models": ["*tiny*"], **row}
    return json.dumps({"date": "2027-01-31", "source": "the team", "recipes": [row]}).encode()


def test_an_updated_table_comes_first_and_a_newer_vllm_is_asked_for(corral: Corral, qwen: str) -> None:
    updated_file().write_bytes(table(models=["qwen3.5-397b*"], least_vllm="0.99.0", tool_parser="xlam"))
    known, problem = tables()
    assert ([one.date for one in known], problem) == (["2027-01-31", TABLE.date], "")
    done = corral("up", qwen, "--dry-run")
    text = " ".join(done.err.split())
    assert f"needs vLLM 0.99.0 or later, and {PINNED_VERSION} would serve it (the team, 2027-01-31)" in text
    assert "--runtime docker --runtime-option image=vllm/vllm-openai:v0.99.0" in text
    done = corral("plan", qwen)
    assert f"needs vLLM 0.99.0 or later, and {PINNED_VERSION} would serve it" in " ".join(done.out.split()), done
    updated_file().write_bytes(table(models=["qwen3.5-397b*"], tool_parser="xlam"))
    argv, env, _ = rank(corral, qwen, "--dry-run", "--json")
    assert argv[argv.index("--tool-call-parser") + 1] == "xlam"
    assert argv[argv.index("--reasoning-parser") + 1] == "qwen3"  # what the newer table does not say stays
    assert env["VLLM_USE_DEEP_GEMM"] == "0"
    updated_file().write_bytes(table().replace(b"2027", b"2026").replace(b"01-31", b"01-01"))
    assert [one.date for one in tables()[0]] == [TABLE.date, "2026-01-01"]
    updated_file().write_bytes(b"{")
    argv, _, said = rank(corral, qwen, "--dry-run", "--json")
    assert argv[argv.index("--tool-call-parser") + 1] == "qwen3_coder"
    assert "warning: newer recipes are not used" in " ".join(said.split())


@pytest.mark.parametrize(
    "row",
    [
        {"arguments": ["--trust-remote-code"]},
        {"arguments": ["--middleware", "evil.Guard"]},
        {"arguments": ["--tokenizer-mode=hf"]},
        {"arguments": ["--tokenizer-mode"]},
        {"arguments": ["--tokenizer-mode", "/x"]},
        {"arguments": ["--generation-config", "/home/x"]},
        {"arguments": ["--no-enable-prefix-caching", "--port", "1"]},
        {"arguments": ["serve"]},
        {"arguments": "--tokenizer-mode hf"},
        {"environment": {"LD_PRELOAD": "x.so"}},
        {"environment": {"VLLM_API_KEY": "x"}},
        {"environment": {"VLLM_PLUGINS": "x"}},
        {"environment": {"VLLM_SERVER_DEV_MODE": "1"}},
        {"environment": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}},
        {"environment": {"VLLM_USE_RUST_FRONTEND": "1"}},
        {"environment": {"VLLM_RUST_FRONTEND_PATH": "x"}},
        {"environment": {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "x"}},
        {"environment": {"VLLM_MOE_X\n": "1"}},
        {"environment": {"VLLM_USE_DEEP_GEMM": "a/b"}},
        {"environment": {"VLLM_USE_DEEP_GEMM": "1 2"}},
        {"environment": {"VLLM_USE_DEEP_GEMM": 1}},
        {"tool_parser": "--x"},
        {"reasoning_parser": "a b"},
        {"reasoning_parser": "../x"},
        {"least_vllm": "newest"},
        {"models": []},
        {"models": ["a" * 100]},
        {"models": ["*a*a*a*a*a*a*b"]},
        {"models": ["(a+)+$"]},
        {"except": ["\x1b[2J"]},
    ],
)
def test_a_table_cannot_set_what_it_likes(row: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        read_table(table(**row), "recipes.json")
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"date": "2027-01-31"}', b'{"recipes": [], "date": "2027-01-31", "source": ""}',
     table().replace(b"2027-01-31", b"tomorrow"), b" " * (1 << 21), b"\xff", b"[" * 100_000,
     json.dumps({"date": "2027-01-31", "source": "x", "recipes": [1]}).encode()],
)  # fmt: skip
def test_a_broken_table_is_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        read_table(data, "recipes.json")


def test_models_update_reads_a_newer_table(corral: Corral, tmp_path: Path) -> None:
    file = tmp_path / "newer.json"
    file.write_bytes(table(tool_parser="xlam", colour="red"))
    done = corral("models", "update", str(file))
    assert done.code == 0, done.err
    assert f"{file} was read into {updated_file()}: 1 rows (the team, 2027-01-31)." in done.out
    assert "does not know them: colour" in done.out
    kept = updated_file().read_bytes()
    assert json.loads(kept)["recipes"] == [{"models": ["*tiny*"], "tool_parser": "xlam", "colour": "red"}]
    for broken in (b"{", table(arguments=["--trust-remote-code"]), table().replace(b"2027", b"2025")):
        file.write_bytes(broken)
        done = corral("models", "update", str(file))
        assert done.code not in (0, 1), done
        assert updated_file().read_bytes() == kept
    assert "is of 2025-01-31, and recipes of 2027-01-31 are in use" in " ".join(done.err.split())
    assert corral("models", "update").code == 2
    assert corral("models", "update", str(tmp_path / "none")).code == NotFoundError.exit_code


def test_models_update_reads_from_an_address(corral: Corral) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", f"http://0.0.0.0:{self.server.server_port}/r.json")  # type: ignore[attr-defined]
                self.end_headers()
                return
            self.send_response(200 if self.path.startswith("/r.json") else 404)
            self.end_headers()
            self.wfile.write(table(tool_parser="xlam") if self.path.startswith("/r.json") else b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"127.0.0.1:{server.server_port}"
        done = corral("models", "update", f"http://{at}/r.json?token=secret", "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out)["read_from"] == f"http://{at}/r.json"
        assert "secret" not in done.out + updated_file().read_text()
        for address in (f"http://{at}/none", f"http://{at}/away"):
            assert corral("models", "update", address).code == UnreachableError.exit_code
        server.shutdown()
    for address in ("http://example.org/r.json", f"file://{updated_file()}", "ftp://example.org/r.json"):
        assert corral("models", "update", address).code == 2

"""What a model needs of vLLM beside its plan: parsers, a tokenizer mode, variables, the least version; one table.

The table is data by family (`data/recipes.json`). A row holds for the models that one of its shell patterns matches,
in small letters with dashes; for each field the first such row that has it decides. vLLM refuses `tool_choice: auto`,
which every agent framework sends, unless a server is started with a parser of tool calls: for a folder with a name of
its own that parser is chosen by the markers in its chat template.

`corral models update` reads a newer table into Corral's home; the later of the two comes first. Such a file is not
trusted: it may set the flags and variables named here, to plain words, and nothing that names code, a file or a
secret. What the engine's version lacks is left out and named; what the user sets stays.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from corral.base.errors import (
    ConflictError,
    DataError,
    EngineError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from corral.base.files import write_atomic
from corral.base.home import home_dir
from corral.base.record import from_json
from corral.base.untrusted import parse_json, plain
from corral.engines import PINNED_VERSION
from corral.engines.flags import FlagList, flag_name
from corral.engines.locks import FLAVOURS

MOST_BYTES = 1 << 20
_MOST_ROWS, _MOST_PATTERNS = 2000, 50
_FLAGS = {  # that a recipe may set, and the values that each may have; None: it takes none
    "--chat-template-content-format": "auto|openai|string",
    "--generation-config": "auto|vllm",
    "--mm-processor-cache-gb": r"\d{1,3}",
    "--no-enable-prefix-caching": None,
    "--tokenizer-mode": "[a-z0-9_]{1,30}",
}
_VARIABLE = re.compile(
    r"VLLM_(?:ALLREDUCE|DEEP_?GEMM|DISABLE_COMPILE_CACHE$|FLASHINFER|KV_CACHE_LAYOUT$|MARLIN|MEMORY_PROFILER|MLA|MOE"
    r"|MXFP[48]|ROCM|USE_(?:DEEP_GEMM|FLASHINFER|FUSED_MOE|TRITON|V2_MODEL_RUNNER$)|VIDEO_LOADER_BACKEND$)[A-Z0-9_]*"
    r"(?<!_DIR)(?<!_PATH)(?<!_FILE)"
)
_WORD, _PARSER = re.compile(r"[A-Za-z0-9_.+-]{1,60}"), re.compile(r"(?!-)[a-z0-9_-]{0,40}")
_PATTERN, _VERSION = re.compile(r"[a-z0-9.*\[\]-]{1,80}"), re.compile(r"\d{1,3}(\.\d{1,4}){1,2}")
_MOST_STARS = 5
_ADDRESS = re.compile(r"https://|http://(localhost|127\.0\.0\.1)[:/]")
_PATIENCE_S = 30
_TOOL_FLAGS = {"--tool-call-parser", "--enable-auto-tool-choice", "--tool-parser-plugin"}
_REASONING_FLAGS = {"--reasoning-parser", "--reasoning-parser-plugin"}


@dataclass(frozen=True)
class ModelRecipe:
    """What is known of a model, or of a row's models; None: the row does not say."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    arguments: tuple[str, ...] | None = None
    environment: Mapping[str, str] | None = None
    least_vllm: str | None = None
    source: str = ""  # of the table, with its date
    problem: str = ""  # with the user's own table


@dataclass(frozen=True)
class RecipeRow(ModelRecipe):
    """One row of a table."""

    models: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = field(default=())

    def holds_for(self, name: str) -> bool:
        return _matches(name, self.models) and not _matches(name, self.exceptions)


@dataclass(frozen=True)
class TemplateMarker:
    """A text in chat templates that tells the form of tool calls."""

    has: str
    tool_parser: str


@dataclass(frozen=True)
class RecipeTable:
    """Recipes of one date."""

    date: str
    source: str
    recipes: tuple[RecipeRow, ...]
    templates: tuple[TemplateMarker, ...] = ()  # the more particular first
    read_from: str = ""  # the file or address that `corral models update` was given

    @property
    def label(self) -> str:
        return f"{self.source}, {self.date}"


@dataclass(frozen=True)
class Applied:
    """What of a recipe a start uses: flags of the API server, flags of every rank, variables; and why, in words."""

    api_arguments: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def updated_file() -> Path:
    """Where `corral models update` keeps the table that it read."""
    return home_dir() / "recipes.json"


def shipped_table() -> RecipeTable:
    file = resources.files("corral") / "data" / "recipes.json"
    return read_table(file.read_bytes(), "recipes.json")


def tables() -> tuple[list[RecipeTable], str]:
    """The tables, the later one first, and what is wrong with the user's, which then is not used."""
    shipped, file = shipped_table(), updated_file()
    try:
        own = read_table(file.read_bytes(), str(file))
    except FileNotFoundError:
        return [shipped], ""
    except (OSError, DataError) as error:
        return [shipped], f"warning: newer recipes are not used: {error}"
    return sorted((own, shipped), key=lambda table: table.date, reverse=True), ""


def read_table(data: bytes, what: str) -> RecipeTable:
    """A table from a file that anybody may have written; unknown keys are ignored."""
    body = parse_json(data, what, MOST_BYTES)
    table = from_json(RecipeTable, _renamed(body), what, strict=False)
    if not re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", table.date):
        raise DataError(f"{what} has no date.", 'Its "date" is written as 2026-08-31.')
    if not table.recipes or len(table.recipes) > _MOST_ROWS:
        raise DataError(f"{what} has {len(table.recipes):,} recipes; 1 to {_MOST_ROWS:,} are read.")
    for number, row in enumerate(table.recipes, 1):
        if problem := _problem(row):
            raise DataError(f"recipe {number} of {what} {problem}.")
    for marker in table.templates:
        if not 3 <= len(marker.has) <= 60 or not _PARSER.fullmatch(marker.tool_parser):
            raise DataError(f"{what} has a marker of chat templates that cannot be used.")
    return table


def update_from(source: str) -> tuple[RecipeTable, list[str]]:
    """Read a newer table into Corral's home, and the keys in it that are ignored; what was there stays otherwise."""
    shown = re.sub(r"://[^/@]*@|[?#].*", lambda part: "://" if part[0].startswith("://") else "", source)
    data = _fetched(source, shown)
    table = read_table(data, shown)
    if table.date < (newest := tables()[0][0]).date:
        raise ConflictError(
            f"{shown} is of {table.date}, and recipes of {newest.date} are in use.",
            "Give the file a later date if it is to be used.",
        )
    body = {**parse_json(data, shown, MOST_BYTES), "read_from": shown}
    write_atomic(updated_file(), json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    return replace(table, read_from=shown), _unknown_keys(body)


def _fetched(source: str, shown: str) -> bytes:
    """At most a byte more than a table may have."""
    if "://" not in source:
        try:
            with Path(source).expanduser().open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError as error:
            raise NotFoundError(f"{shown} cannot be read: {error.strerror}.", "Name a file or an address.") from None
    import http.client
    import urllib.error
    import urllib.request

    if not _ADDRESS.match(source):
        raise UsageError(
            f"recipes are not read from {shown}.", "Give a file, or an address that begins with https://."
        )
    try:
        with urllib.request.urlopen(source, timeout=_PATIENCE_S) as answer:  # noqa: S310 - checked above
            if _ADDRESS.match(answer.url):
                return bytes(answer.read(MOST_BYTES + 1))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise UnreachableError(f"{shown} cannot be read: {plain(str(error), 200)}.", "Check the address.") from None
    raise UnreachableError(f"{shown} leads to an address without https.", "Download the file and name it instead.")


def _unknown_keys(body: Mapping[str, Any]) -> list[str]:
    known = {*RecipeTable.__dataclass_fields__, *RecipeRow.__dataclass_fields__, "except"}
    return [plain(key, 60) for key in sorted({key for row in (body, *body["recipes"]) for key in row} - known)][:10]


def _renamed(body: object) -> object:
    """With the field that Python has no name for."""
    rows = body.get("recipes") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(rows, list):
        return body
    renamed = [{**row, "exceptions": row.get("except", ())} if isinstance(row, dict) else row for row in rows]
    return {**body, "source": plain(str(body.get("source", "")), 80), "recipes": renamed}


def _problem(row: RecipeRow) -> str:
    """What is wrong with a row; empty where nothing is."""
    patterns = (*row.models, *row.exceptions)
    if not row.models or len(patterns) > _MOST_PATTERNS:
        return f"has {len(patterns)} patterns of names; 1 to {_MOST_PATTERNS} are read"
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern) or pattern.count("*") > _MOST_STARS:
            return f"has {plain(repr(pattern), 80)}, which is not a pattern of names"
    for parser in (row.tool_parser, row.reasoning_parser):
        if parser is not None and not _PARSER.fullmatch(parser):
            return f"has {plain(repr(parser), 60)}, which is not the name of a parser"
    if row.least_vllm is not None and not _VERSION.fullmatch(row.least_vllm):
        return f"has {plain(repr(row.least_vllm), 60)}, which is not a version of vLLM"
    for name, value in (row.environment or {}).items():
        if not _VARIABLE.fullmatch(name) or not _WORD.fullmatch(value):
            return f"sets {plain(name, 60)} to {plain(repr(value), 60)}, which a recipe may not"
    return _forbidden(list(row.arguments or ()))


def _forbidden(words: list[str]) -> str:
    while words:
        flag = words.pop(0)
        value = words.pop(0) if _FLAGS.get(flag) and words else ""
        if flag not in _FLAGS or not re.fullmatch(_FLAGS[flag] or "", value):
            return f"has the argument {plain(repr(f'{flag} {value}'.strip()), 100)}, which a recipe may not set"
    return ""


def recipe_for(names: Sequence[str], folder: str, known: Sequence[RecipeTable]) -> ModelRecipe:
    """Of a model with any of these names; its folder's chat template, where no row names its tool parser."""
    rows = [
        (row, table)
        for table in known
        for name in names
        for row in table.recipes
        if row.holds_for(name.lower().replace("_", "-"))
    ]
    source = next((table.label for _, table in rows), "")

    def first(name: str) -> Any:
        return next((value for row, _ in rows if (value := getattr(row, name)) is not None), None)

    tool_parser = first("tool_parser")
    if tool_parser is None and folder:
        template = _chat_template(Path(folder))
        markers = [marker for table in known for marker in table.templates]
        tool_parser = next((one.tool_parser for one in markers if one.has in template), None)
    return ModelRecipe(
        tool_parser, first("reasoning_parser"), first("arguments"), first("environment"), first("least_vllm"), source
    )


def older_engine(model: str, recipe: ModelRecipe, version: str) -> str:
    """That a vLLM is older than the model needs; empty where it is not, or where that is not known."""
    if not recipe.least_vllm or not version or _number(version) >= _number(recipe.least_vllm):
        return ""
    return f"{model} needs vLLM {recipe.least_vllm} or later, and {version} would serve it ({recipe.source})"


def refuse_old_engine(model: str, recipe: ModelRecipe, version: str, runtime: str, flavour: str) -> None:
    """Refuse it before anything is fetched."""
    if problem := older_engine(model, recipe, version):
        remedy = newer_engine(recipe.least_vllm or "", runtime, flavour)
        raise EngineError(f"{problem}.", f"{remedy} With --no-recipe `corral up` tries it all the same.")


def newer_engine(least: str, runtime: str, flavour: str) -> str:
    """Where such an engine comes from; Corral itself installs the pinned version only."""
    image = f"vllm/vllm-openai{'-rocm' if flavour == 'rocm' else ''}:v"
    if _number(least) > _number(PINNED_VERSION):
        words = f"--runtime docker --runtime-option image={image}{least}"
        return f"Use its image ({words}) or an environment of your own that has it (--runtime venv or conda)."
    if runtime == "conda":
        return "Install it: `corral engine install --into conda:NAME`, and name that environment."
    if flavour not in FLAVOURS:
        return f"Use the image {image}{PINNED_VERSION}."
    return f"Leave --runtime out: `corral engine install {flavour}` installs vLLM {PINNED_VERSION}."


def _number(version: str) -> tuple[int, ...]:
    """Of a version, also of one with letters behind: 0.32.1rc2.dev5."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else (1 << 30,)


def applied(
    recipe: ModelRecipe, said: Sequence[str], environment: Mapping[str, str], flags: FlagList, tools: bool
) -> Applied:
    """What of a recipe is used beside the user's own flags and variables, and what this vLLM does not have."""
    own = {_positive(flag_name(word)) for word in said}
    lacks: list[str] = []
    api = ["--enable-auto-tool-choice", "--tool-call-parser", recipe.tool_parser or ""]
    if not tools or not recipe.tool_parser or _TOOL_FLAGS & own or recipe.tool_parser not in flags.tool_parsers:
        api = []
    words: list[str] = []
    if recipe.reasoning_parser and not _REASONING_FLAGS & own:
        known = recipe.reasoning_parser in flags.reasoning_parsers
        (words if known else lacks).extend(["--reasoning-parser", recipe.reasoning_parser])
    for flag, value in _pairs(recipe.arguments or ()):
        if _positive(flag) not in own:
            (words if flag in flags.takes_value else lacks).extend([flag, *value])
    wanted = {name: value for name, value in (recipe.environment or {}).items() if name not in environment}
    used = {name: value for name, value in wanted.items() if name in flags.variables or not flags.complete}
    lacks += [name for name in wanted if name not in used]
    notes = [recipe.problem] if recipe.problem else []
    notes += [f"tool calls are read by vLLM's parser {api[-1]}; --no-tools switches them off"] if api else []
    if words or used:
        text = ", ".join(filter(None, (" ".join(words), *(f"{name}={value}" for name, value in used.items()))))
        notes.append(f"its recipe ({recipe.source}) sets {text}; --no-recipe leaves it out")
    if lacks:
        notes.append(f"left out of its recipe ({recipe.source}): vLLM {flags.version} has no {' '.join(lacks)}")
    return Applied(tuple(api), tuple(words), used, tuple(notes))


def _positive(flag: str) -> str:
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


def _pairs(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Flags, each with its value where it takes one."""
    pairs: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            pairs.append((word, []))
        else:
            pairs[-1][1].append(word)
    return pairs


def _chat_template(folder: Path) -> str:
    """The text of a folder's chat template; empty where there is none to be read."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
        found = json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template", "")
    except (OSError, ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

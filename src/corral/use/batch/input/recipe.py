"""How a row becomes a request: kind of row, template, chat or completion, parameters for all and per row.

Rows are of one of two kinds. An OpenAI batch row carries the whole request (`custom_id`, `method`, `url`, `body`). A
plain row carries `prompt` or `messages` (or the columns of a template); columns named like a sampling parameter set
it for that row, all others are carried through. A row's own parameters win over those for all rows.

Everything here is pure: the same row and recipe give the same request, at check time and when it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from corral.base.errors import DataError, UsageError
from corral.base.record import nearest
from corral.client.client import CHAT, COMPLETIONS
from corral.client.pooling import EMBEDDINGS, NEEDED, RERANK, SCORE, TRANSCRIPTIONS, embed_body
from corral.client.sampling import FIELDS, body_fields, check_fields, misspelt, parse_cell, with_length
from corral.use.batch.input.rows import decode_row

OPENAI, PLAIN, AUTO = "openai", "plain", "auto"
_OPENAI_KEYS = ("custom_id", "method", "url", "body")
_PATHS = (CHAT, COMPLETIONS, *NEEDED)
_HOLE = re.compile(r"\{\{\s*([^{}]+?)\s*\}\}")
_ID_COLUMNS = ("custom_id", "id")


def max_answer_tokens(body: Mapping[str, Any]) -> int:
    """The longest answer that a request allows, as vLLM reads it; 0 where it sets no limit."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0)


class Parsed(NamedTuple):
    """A row as it will be sent."""

    id: str
    path: str
    body: dict[str, Any]
    row: dict[str, Any]


def kind_of(row: Mapping[str, Any]) -> str:
    """Whether a row carries a whole request."""
    return OPENAI if isinstance(row.get("body"), dict) and ("url" in row or "custom_id" in row) else PLAIN


@dataclass(frozen=True)
class Recipe:
    """How rows become requests; saved with the batch's spec and compared before a resume."""

    kind: str = AUTO  # decided by the first row
    template: str | None = None
    chat: bool = False
    system: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    id_column: str | None = None
    prompt_column: str | None = None
    row_params: bool = True
    any_model: bool = False
    text_cells: bool = False  # CSV: every value is text
    only_path: str | None = None  # the one url that rows may name
    task: str = ""  # embed | rerank: what plain rows are for, where it is not to write
    query: str | None = None  # rerank: that of all rows; None: the column `query`
    documents_column: str | None = None  # rerank (default: documents)
    dimensions: int | None = None  # embed: of a vector
    top_n: int | None = None  # rerank: only so many of the best

    def __post_init__(self) -> None:
        body_fields(self.params, chat=True)  # refuses bad values; whether it is a chat depends on the rows
        if self.kind == OPENAI and (self.template or self.chat or self.system or self.prompt_column):
            raise UsageError(
                "the rows are whole requests (OpenAI batch lines): they take no template, --chat or --system.",
                "Drop those options, or give rows with `prompt`.",
            )

    def settled(self, raw: bytes) -> Recipe:
        """This recipe for the kind of rows that the first one shows."""
        if self.kind != AUTO:
            return self
        try:
            row = decode_row(raw)
        except DataError:
            return self
        return replace(self, kind=kind_of(row) if isinstance(row, dict) else PLAIN)

    def loose_id(self, raw: bytes) -> str | None:
        """The id of a bad row, if it has a readable one."""
        try:
            row = decode_row(raw)
        except DataError:
            return None
        value = row.get(self.id_column or "custom_id", row.get("id")) if isinstance(row, dict) else None
        return str(value) if isinstance(value, (str, int)) and value != "" else None

    def read(self, raw: bytes, line: int, models: tuple[str, ...] = ()) -> Parsed:
        """The request of a row; DataError with the problem as its message when it is bad."""
        row = decode_row(raw)
        if isinstance(row, str) and self.kind != OPENAI:
            row = {"prompt": row}
        if not isinstance(row, dict):
            raise DataError("is not a JSON object")
        try:
            return self._openai(row, models) if self.kind == OPENAI else self._plain(row, line)
        except UsageError as error:
            raise DataError(error.in_full.removesuffix(".")) from None

    def _openai(self, row: dict[str, Any], models: tuple[str, ...]) -> Parsed:
        for key in row:
            if key not in _OPENAI_KEYS:
                near = nearest(key, _OPENAI_KEYS, 1)
                raise DataError(f"has an unknown field {key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        identity, body, path = row.get("custom_id"), row.get("body"), row.get("url")
        if not isinstance(identity, str) or not identity:
            raise DataError("lacks 'custom_id' (text)")
        if row.get("method", "POST") != "POST":
            raise DataError(f"has the method {row['method']!r}; only POST is supported")
        if path not in _PATHS:
            raise DataError(f"has the url {path!r}; it must be one of {', '.join(_PATHS)}")
        if self.only_path is not None and path != self.only_path:
            raise DataError(f"has the url {path!r}; the batch is for {self.only_path}")
        if not isinstance(body, dict):
            raise DataError("lacks 'body' (an object)")
        if path in NEEDED:
            return self._other(identity, path, dict(body), row, models)
        whole = {**body_fields(self.params, path == CHAT), **body} if self.params else dict(body)
        check_fields(whole, path == CHAT)
        _refuse_misspelt(whole)
        if whole.get("stream"):
            raise DataError("asks for a stream; batches do not stream")
        if path == CHAT:
            _check_messages(whole.get("messages"))
        elif not isinstance(whole.get("prompt"), (str, list)) or not whole["prompt"]:
            raise DataError("lacks 'prompt' in its body")
        self._check_model(whole, models)
        return Parsed(identity, path, whole, row)

    def _other(
        self, identity: str, path: str, body: dict[str, Any], row: dict[str, Any], models: tuple[str, ...]
    ) -> Parsed:
        """A request whose answer is no completion: the server checks the rest."""
        lacks = [name for name in NEEDED[path] if not body.get(name)]
        pairs = ({"queries", "documents"}, {"queries", "items"}, {"text_1", "text_2"}, {"data_1", "data_2"})
        if path == SCORE and not any(pair <= body.keys() for pair in pairs):
            lacks = ["queries", "documents"]
        if path == TRANSCRIPTIONS and not lacks:
            if not isinstance(body["file"], str):
                raise DataError("has a 'file' that is not the path of a recording")
            if (form := body.get("response_format", "json")) not in ("json", "verbose_json"):
                raise DataError(f"asks for the response_format {form!r}; in a batch it is json or verbose_json")
        if lacks:
            raise DataError(f"lacks {' and '.join(map(repr, lacks))} in its body")
        if body.get("stream"):
            raise DataError("asks for a stream; batches do not stream")
        self._check_model(body, models)
        return Parsed(identity, path, body, row)

    def _check_model(self, whole: dict[str, Any], models: tuple[str, ...]) -> None:
        model = whole.get("model")
        if model is not None and models and model not in models:
            if not self.any_model:
                raise DataError(
                    f"asks for the model {model!r}; the server has {', '.join(models)} (--any-model uses that)"
                )
            del whole["model"]

    def _ranked(self, row: dict[str, Any], line: int) -> Parsed:
        query = self.query if self.query is not None else row.get("query")
        name = self.documents_column or "documents"
        documents = row.get(name)
        if self.text_cells and isinstance(documents, str):
            documents = parse_cell("documents", documents)
        if not isinstance(query, str) or not query:
            raise DataError("lacks 'query' (text)")
        if not isinstance(documents, list) or not documents or not all(isinstance(one, str) for one in documents):
            raise DataError(f"lacks {name!r} (a list of texts)")
        body: dict[str, Any] = {"query": query, "documents": documents}
        if self.top_n is not None:
            body["top_n"] = self.top_n
        return Parsed(self._id(row, line), RERANK, body, row)

    def _plain(self, row: dict[str, Any], line: int) -> Parsed:
        if self.task == "rerank":
            return self._ranked(row, line)
        if self.task == "embed":
            return Parsed(self._id(row, line), EMBEDDINGS, embed_body(self._prompt(row), self.dimensions), row)
        messages = None if self.template or self.prompt_column else row.get("messages")
        if messages is not None:
            if self.text_cells and isinstance(messages, str):
                messages = parse_cell("messages", messages)
            _check_messages(messages)
            if self.system and messages[0].get("role") != "system":
                messages = [{"role": "system", "content": self.system}, *messages]
        elif self.chat or self.system:
            system = [{"role": "system", "content": self.system}] if self.system else []
            messages = [*system, {"role": "user", "content": self._prompt(row)}]
        prompt = {"prompt": self._prompt(row)} if messages is None else {"messages": messages}
        path = COMPLETIONS if messages is None else CHAT
        fields = body_fields({**self.params, **self._own_params(row)}, path == CHAT)
        body = {**(fields if path == CHAT else with_length(fields)), **prompt}
        return Parsed(self._id(row, line), path, body, row)

    def _own_params(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row that are parameters."""
        if not self.row_params:
            return {}
        if self.template is None:
            _refuse_misspelt(row)
        params = {name: row[name] for name in row.keys() & FIELDS.keys() if row[name] is not None}
        if not self.text_cells:
            return params
        return {name: parse_cell(name, value) for name, value in params.items() if value != ""}

    def _prompt(self, row: Mapping[str, Any]) -> str:
        if self.template is not None:
            return _HOLE.sub(lambda hole: self._cell(row, hole[1]), self.template)
        plain = "text" if self.task == "embed" and "prompt" not in row else "prompt"
        name = self.prompt_column or plain
        if name not in row:
            near = nearest(name, list(row), 1)
            hint = f" (it has: {', '.join(list(row)[:8])}; --prompt-column says which is the prompt)" if row else ""
            if near:
                hint = f" (did you mean {near[0]!r}? --prompt-column {near[0]})"
            wanted = "'prompt' or 'messages'" if self.prompt_column is None and not self.task else repr(name)
            raise DataError(f"lacks {wanted}{hint}")
        prompt = row[name]
        if not isinstance(prompt, str):
            raise DataError(f"has a {name!r} that is not text")
        if not prompt:
            raise DataError(f"has an empty {name!r}")
        return prompt

    def _cell(self, row: Mapping[str, Any], name: str) -> str:
        if name not in row:
            near = nearest(name, list(row), 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(f"lacks the template's column {name!r}{hint}")
        value = row[name]
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()

    def _id(self, row: Mapping[str, Any], line: int) -> str:
        if self.id_column is not None:
            if row.get(self.id_column) in (None, ""):
                raise DataError(f"lacks the id column {self.id_column!r}")
            return str(row[self.id_column])
        for name in _ID_COLUMNS:
            value = row.get(name)
            if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
                return str(value)
        return f"row-{line}"


def _refuse_misspelt(row: Mapping[str, Any]) -> None:
    """A misspelt parameter would be ignored by the server, in silence."""
    for name in row:
        if known := misspelt(name):
            raise DataError(f"has an unknown parameter {name!r} (did you mean {known!r}?)")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError("lacks 'messages' (a list of at least one message)")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"has a message (number {number}) without a 'role'")

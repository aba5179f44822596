"""JSON schemas for answers: read from a file, refused where they are none, and sent as `response_format`.

The check finds what is no schema at all and what is misspelt in it; which keywords can be enforced, the server says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.base.errors import DataError
from corral.base.files import read_text
from corral.base.untrusted import parse_json

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas, by name
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # of schemas
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_DECIDING = ("type", "enum", "const", "$ref", "required", *_MAPS, *_LISTS, *_SCHEMAS)


def read_schema(path: str | Path) -> dict[str, Any]:
    """The schema in a file."""
    remedy = 'For example {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}.'
    value = parse_json(read_text(path), str(path), remedy=remedy)
    problem = "it is not an object" if not isinstance(value, dict) else next(_problems(value, ""), "")
    if not problem and not any(name in value for name in _DECIDING):
        problem = "it has none of the keywords type, properties, items, enum, anyOf"
    if problem:
        raise DataError(f"{path} is not a JSON schema: {problem}.", remedy)
    return dict(value)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The `response_format` of a request whose answer is JSON of this schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _problems(value: Any, where: str) -> Iterator[str]:
    """What is wrong with a schema, with the path to it."""
    if isinstance(value, bool):
        return
    if not isinstance(value, dict):
        yield f"{where} is no schema"
        return
    at = where and f"{where}."
    kinds = value.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            yield f"{at}type is {kind!r}, not one of {', '.join(_TYPES)}"
    required = value.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield f"{at}required is no list of names"
    if not isinstance(value.get("enum", []), list):
        yield f"{at}enum is no list"
    for name in _MAPS:
        if not isinstance(below := value.get(name, {}), dict):
            yield f"{at}{name} is no object"
            continue
        for key, one in below.items():
            yield from _problems(one, f"{at}{name}.{key}")
    for name in _LISTS:
        if not isinstance(below := value.get(name, []), list):
            yield f"{at}{name} is no list"
            continue
        for number, one in enumerate(below):
            yield from _problems(one, f"{at}{name}[{number}]")
    for name in _SCHEMAS:
        if name in value and not (name == "items" and isinstance(value[name], list)):
            yield from _problems(value[name], f"{at}{name}")

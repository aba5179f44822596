"""Frozen dataclasses to JSON and back.

The stages of Corral exchange frozen dataclasses, which can be written to disk and read again unchanged. Supported
field types: str, int, float, bool, None, enums, tuples, lists, dicts with string keys, nested dataclasses, unions of
those, and Any. Wrong types are refused, with their place.

What people write is read strictly (`from_json`): an unknown key is an error that names the nearest valid one. What
Corral wrote is read by other versions as well (`load_json`, `save_record`): unknown keys are ignored, and stay in the
file when it is written again. A new file has the number of its format, `FORMAT` of its class (1 without one), and the
version that wrote it; a file without a number has format 1. The number grows only when the meaning of a key changes:
a later format is refused. A file that exists gains only keys that are not at their defaults, so that processes of an
earlier version, which refuse unknown keys, go on reading it for as long as nothing new is used.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from corral import __version__
from corral.base.errors import DataError
from corral.base.untrusted import parse_json, plain
from corral.node.files import write_atomic

T = TypeVar("T")
OLD_NAMES = "old names"  # of a field, in its metadata
FORMAT, WRITER = "file_format", "written_by"  # keys of a file: the number of its format, the version that wrote it
RESTORE = "Restore the file or delete it."
LONGEST_SHOWN = 200  # characters of a wrong value in a message
SCALARS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object"}


def nearest(word: str, known: Sequence[str], count: int = 3) -> list[str]:
    """The known words most like `word`, best first."""
    return difflib.get_close_matches(word, known, n=count, cutoff=0.5)


def to_json(value: Any) -> Any:
    """A JSON-ready copy of a record or of plain data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def dump_json(value: Any) -> str:
    """Readable JSON text of a record, ending in a newline."""
    return json.dumps(to_json(value), indent=2, ensure_ascii=False) + "\n"


def load_json(cls: type[T], path: Path) -> T:
    """Read one record that Corral wrote into a file, whichever version did."""
    data = parse_json(path.read_bytes(), str(path), remedy=RESTORE)
    if isinstance(data, Mapping) and cls is not dict:
        _refuse_later(cls, data, path)
    return from_json(cls, data, f"{path}: {cls.__name__}", strict=False)


def save_record(path: Path, value: Any) -> None:
    """Write a record into a file that other versions of Corral may have written, and may read."""
    try:
        before = parse_json(path.read_bytes(), str(path), remedy=RESTORE)
    except FileNotFoundError:
        write_atomic(path, dump_json({**_head(type(value)), **to_json(value)}))
        return
    if isinstance(before, Mapping):
        _refuse_later(type(value), before, path)
        if FORMAT in before or _format_of(type(value)) > 1:
            before = {**before, **_head(type(value))}
    write_atomic(path, dump_json(_merged(before, value)))


def _format_of(cls: type) -> int:
    return int(getattr(cls, "FORMAT", 1))


def _head(cls: type) -> dict[str, Any]:
    return {FORMAT: _format_of(cls), WRITER: __version__}


def _refuse_later(cls: type, data: Mapping[str, Any], path: Path) -> None:
    number, known = data.get(FORMAT, 1), _format_of(cls)
    if isinstance(number, int) and number <= known:
        return
    writer = plain(str(data.get(WRITER, "of an unknown version")), LONGEST_SHOWN)
    raise DataError(
        f"{path} has format {plain(str(number), LONGEST_SHOWN)}, written by Corral {writer}; this is Corral"
        f" {__version__}, which reads formats up to {known}.",
        f"Use Corral {writer} or a later version in this home.",
        path=str(path),
        written_by=writer,
    )


def _merged(before: Any, value: Any) -> Any:
    """The JSON of a value, with what stands beside it in `before`; named items of lists are found by their names."""
    if isinstance(value, (list, tuple)) and value and all(hasattr(one, "name") for one in value):
        items = before if isinstance(before, list) else []
        named = {one.get("name"): one for one in items if isinstance(one, Mapping)}
        return [_merged(named.get(one.name, {}), one) for one in value]
    if not dataclasses.is_dataclass(value) or not isinstance(before, Mapping):
        return to_json(value)
    merged = dict(before)
    for field in dataclasses.fields(value):
        one = getattr(value, field.name)
        key = next((name for name in (field.name, *field.metadata.get(OLD_NAMES, ())) if name in before), None)
        if key is not None or one != _default(field):
            merged[key or field.name] = _merged(before.get(key), one)
    return merged


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def from_json(cls: type[T], data: Any, where: str = "", strict: bool = True) -> T:
    """Rebuild a record from JSON data; `where` names its place in messages, `strict` refuses unknown keys."""
    return _build(cls, data, where or cls.__name__, strict)  # type: ignore[no-any-return]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _wrong(where: str, wanted: str, data: Any) -> DataError:
    shown = plain(repr(data), LONGEST_SHOWN)
    return DataError(f"{plain(where)} must be {wanted}, not {shown}.", "Correct the value.")


def _build(kind: Any, data: Any, where: str, strict: bool) -> Any:
    if kind is Any:
        return data
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _build_union(args, data, where, strict)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_record(kind, data, where, strict)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(data)
        except ValueError:
            raise _wrong(where, "one of " + ", ".join(str(m.value) for m in kind), data) from None
    if origin in (tuple, list, Sequence):
        return _build_sequence(origin, args, data, where, strict)
    if origin in (dict, Mapping):
        if not isinstance(data, Mapping):
            raise _wrong(where, "an object", data)
        return {str(k): _build(args[1], v, f"{where}.{k}", strict) for k, v in data.items()}
    return _build_scalar(kind, data, where)


def _build_union(args: tuple[Any, ...], data: Any, where: str, strict: bool) -> Any:
    if data is None and type(None) in args:
        return None
    failures = []
    for option in (a for a in args if a is not type(None)):
        try:
            return _build(option, data, where, strict)
        except DataError as error:
            failures.append(error)
    raise failures[0]


def _build_record(kind: type, data: Any, where: str, strict: bool) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(where, "an object", data)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    data = _under_new_names(data, fields)
    for key in data if strict else ():
        if key not in fields:
            guess = nearest(str(key), list(fields), 1)
            hint = f"Did you mean {guess[0]!r}?" if guess else "Known keys: " + ", ".join(fields)
            raise DataError(f"{plain(where)} has an unknown key {plain(repr(key), LONGEST_SHOWN)}.", hint)
    hints, values = _hints(kind), {}
    for name, field in fields.items():
        if name in data:
            values[name] = _build(hints[name], data[name], f"{where}.{name}", strict)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DataError(f"{where} lacks {name!r}.", f"Add {name!r}.", lacks=name)
    return kind(**values)


def renamed_from(*names: str) -> dict[str, Any]:
    """Metadata of a field that earlier versions wrote under other names; those are still read."""
    return {OLD_NAMES: names}


def _under_new_names(data: Mapping[str, Any], fields: Mapping[str, dataclasses.Field[Any]]) -> Mapping[str, Any]:
    new = {old: name for name, field in fields.items() for old in field.metadata.get(OLD_NAMES, ())}
    return {new.get(key, key): value for key, value in data.items()} if new.keys() & data.keys() else data


def _build_sequence(origin: Any, args: tuple[Any, ...], data: Any, where: str, strict: bool) -> Any:
    if not isinstance(data, (list, tuple)):
        raise _wrong(where, "a list", data)
    if origin is tuple and Ellipsis not in args:
        if len(data) != len(args):
            raise _wrong(where, f"a list of {len(args)} values", data)
        return tuple(_build(a, v, f"{where}[{i}]", strict) for i, (a, v) in enumerate(zip(args, data, strict=True)))
    items = [_build(args[0], v, f"{where}[{i}]", strict) for i, v in enumerate(data)]
    return items if origin is list else tuple(items)


def _build_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if kind is int and isinstance(data, bool):
        raise _wrong(where, "a whole number", data)
    if kind in SCALARS and not isinstance(data, kind):
        raise _wrong(where, SCALARS[kind], data)
    return data

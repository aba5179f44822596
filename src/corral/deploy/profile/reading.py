"""Reading a profile's text, strictly: the error for an unknown key, a wrong type or an impossible value names its
line.
"""

from __future__ import annotations

import contextlib
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from corral.base.errors import AccessError, DataError, UsageError
from corral.base.record import nearest
from corral.deploy.profile.contract import ProfileSettings, all_keys, takes
from corral.deploy.targets.keys import target_tables

MOST_BYTES = 256 * 1024  # a hundred times the largest profile that people write
_HEADER = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\"'\s-]+?)\s*\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z0-9_-]+(?:\s*\.\s*[A-Za-z0-9_-]+)*)\s*=")


@dataclass(frozen=True)
class Layer:
    """Values from one source, and where in it each key is."""

    kind: str  # example | user | project | environment
    label: str  # a path, or "the environment"
    values: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)  # dotted key -> "FILE:LINE" or a variable's name

    def at(self, dotted: str) -> str:
        """Where a key is, or the nearest table around it."""
        while dotted:
            if dotted in self.origins:
                return self.origins[dotted]
            dotted = dotted.rpartition(".")[0]
        return self.label


def read_file(path: Path, kind: str) -> Layer:
    """One file as a layer; its keys are checked."""
    return parse(read_text(path), str(path), kind)


def parse(text: str, label: str, kind: str = "user") -> Layer:
    """A profile's text as a layer; its keys are checked."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{label} is not TOML: {error}.", "Correct that line; text needs quotes.") from None
    except RecursionError:
        raise DataError(
            f"{label} is not a profile: it is nested too deeply.", "Tables may be nested only one level deep."
        ) from None
    origins = {key: f"{label}:{line}" for key, line in key_lines(text).items()}
    layer = Layer(kind, label, values, origins)
    build_settings(values, layer)
    return layer


def read_text(path: Path) -> str:
    """The text of a small file; refuses anything else at that path."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a file.", "Move it away.")
        if status.st_size > MOST_BYTES:
            text = f"{path} has {status.st_size:,} bytes; {MOST_BYTES:,} are read at most."
            raise DataError(text, "Check that it is the right file.")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line} is not UTF-8 text.", "Save it as UTF-8.") from None
    except PermissionError:
        raise AccessError(f"{path} may not be read.", f"Make it readable: chmod u+r {path}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.", "Check the path.") from None


def key_lines(text: str) -> dict[str, int]:
    """Dotted key -> line. Reads only what profiles look like; a key it misses is reported with its table's line."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = re.sub(r"[\s\"']", "", header[1])
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            name = re.sub(r"\s", "", assignment[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def build_settings(values: Mapping[str, Any], layer: Layer) -> ProfileSettings:
    """A whole profile from its values; a target declares its own table."""
    tables = target_tables()
    made: dict[str, Any] = {}
    settings: ProfileSettings = ProfileSettings()
    with all_wrong() as wrong:
        with kept_in(wrong):
            shared = {name: value for name, value in values.items() if name not in tables}
            settings = build(ProfileSettings, shared, layer)
        for name in [name for name in values if name in tables]:
            with kept_in(wrong):
                made[name] = build(tables[name], values[name], layer, name)
    return replace(settings, targets=made)


def build(kind: Any, data: Any, layer: Layer, where: str = "") -> Any:
    """The dataclass of a table from its values."""
    if not isinstance(data, Mapping):
        raise DataError(
            f"{layer.at(where)}: {where} must be a table, not {data!r}.", f"Write [{where}] and its keys below it."
        )
    entries = {entry.name: entry for entry in fields(kind) if not entry.metadata.get("targets")}
    rest = next((name for name, entry in entries.items() if entry.metadata.get("rest")), "")
    hints, values, others = get_type_hints(kind), {}, {}
    with all_wrong() as wrong:
        for name, value in data.items():
            dotted = f"{where}.{name}" if where else name
            if name == rest or name not in entries:
                if not rest:
                    wrong.append(_unknown(name, where, [*entries, *([] if where else target_tables())], layer))
                others[name] = value
                continue
            with kept_in(wrong):
                if is_dataclass(hints[name]):
                    values[name] = build(hints[name], value, layer, dotted)
                else:
                    value = _read(entries[name].metadata.get("read"), value, dotted, layer)
                    values[name] = _checked(hints[name], entries[name].metadata["check"], value, dotted, layer)
    if rest:
        values[rest] = others
    return kind(**values)


def _read(how: tuple[str, Callable[[str], Any]] | None, value: Any, dotted: str, layer: Layer) -> Any:
    """The value of a text such as "32k", for a key that may be text."""
    if how is None or not isinstance(value, str):
        return value
    try:
        return how[1](value)
    except UsageError:
        raise _wrong(dotted, how[0], value, layer) from None


def _checked(kind: Any, check: Callable[[Any], str] | None, value: Any, dotted: str, layer: Layer) -> Any:
    made = _value(kind, value, dotted, layer)
    expected = check(made) if check and made is not None else ""
    if expected:
        raise _wrong(dotted, expected, value, layer)
    return made


@contextlib.contextmanager
def all_wrong() -> Iterator[list[DataError]]:
    """Collect errors; at the end the first is raised, with the others in its details."""
    wrong: list[DataError] = []
    yield wrong
    if not wrong:
        return
    others = [one for error in wrong for one in (_as_detail(error), *error.details.get("others", ()))][1:]
    if others:
        first = wrong[0]
        raise DataError(first.message, first.remedy, **{**first.details, "others": others})
    raise wrong[0]


@contextlib.contextmanager
def kept_in(wrong: list[DataError]) -> Iterator[None]:
    """Collect an error inside instead of raising it."""
    try:
        yield
    except DataError as error:
        wrong.append(error)


def _as_detail(error: DataError) -> dict[str, str]:
    return {"message": error.message, "remedy": error.remedy}


def _unknown(name: str, table: str, known: list[str], layer: Layer) -> DataError:
    dotted = f"{table}.{name}" if table else name
    inside = f"[{table}]" if table else "a profile"
    elsewhere = [key.table for key in all_keys() if key.name == name and key.table]
    if elsewhere:
        remedy = f"{name!r} belongs into [{elsewhere[0]}]."
    elif guess := nearest(name, known, 1):
        remedy = f"Did you mean {guess[0]!r}?"
    else:
        remedy = f"Known: {', '.join(known)}."
    return DataError(f"{layer.at(dotted)}: {inside} has no key {name!r}.", remedy, key=dotted)


def _wrong(dotted: str, expected: str, value: object, layer: Layer) -> DataError:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "…"
    remedy = "Put quotes around it." if expected == "text" and isinstance(value, (int, float)) else "Correct it."
    return DataError(f"{layer.at(dotted)}: {dotted} must be {expected}, not {shown}.", remedy, key=dotted)


def _value(kind: Any, value: Any, dotted: str, layer: Layer) -> Any:
    """The value, if it has the type; a whole number is also a number, and true is not 1."""
    options = [option for option in get_args(kind) if option is not type(None)] or [kind]
    if get_origin(kind) is tuple:
        return tuple(_items(value, dotted, layer))
    if get_origin(kind) is not None and isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(dotted, "a table", value, layer)
        inner = get_args(kind)[1]
        return {name: _value(inner, item, f"{dotted}.{name}", layer) for name, item in value.items()}
    if type(value) in options:
        return value
    if float in options and type(value) is int:
        return float(value)
    raise _wrong(dotted, takes(kind), value, layer)


def _items(value: Any, dotted: str, layer: Layer) -> list[str]:
    if not isinstance(value, list):
        raise _wrong(dotted, 'a list such as ["one", "two"]', value, layer)
    for item in value:
        if not isinstance(item, str):
            raise _wrong(dotted, "a list of text", value, layer)
    return value

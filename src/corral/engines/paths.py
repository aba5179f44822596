"""The files and folders that arguments after `--` name: templates, adapters, drafts, tokenizers, in JSON too.

A rank runs in a folder of its own, on another machine maybe, so a path is a whole one. The folders of the system and
devices are everywhere, and are neither looked for nor mounted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.errors import UsageError

_SYSTEM = re.compile(r"/(bin|boot|dev(/.*)?|etc|lib|lib64|proc(/.*)?|root|run|sbin|sys(/.*)?|tmp|usr|var)?/*")
_RELATIVE = re.compile(r"(\.\.?|~[\w-]*)(/|$)")
_NAMED = re.compile(r"[\w.-]+=(?=[/~.])")  # an adapter: name=/path
_PATH_KEY = re.compile(r"path|dir|file|folder|model|tokenizer|template|weights|adapter", re.IGNORECASE)
_WRITTEN = re.compile(r"(^|[-_])(dir|directory)$|storage_path|cache_path", re.IGNORECASE)


@dataclass(frozen=True)
class NamedPath:
    """One path, and the flag that names it."""

    flag: str
    path: str
    written: bool = False  # the engine writes there


def named_paths(arguments: Sequence[str]) -> tuple[NamedPath, ...]:
    """Every whole path in these arguments, once; refuses one that depends on where the engine runs."""
    found: dict[str, NamedPath] = {}
    flag = ""
    for word in arguments:
        value = word
        if re.match(r"--?[A-Za-z]", word):
            flag, _, value = word.partition("=")
        for key, path in _in_value(flag, value):
            if _RELATIVE.match(path) or (key == "--chat-template" and _looks_like_a_file(path)):
                raise UsageError(
                    f"{flag} names {path}, and the engine runs in another folder.",
                    f"Write the whole path: {Path(path).expanduser().absolute()}",
                )
            if path.startswith("/") and not _SYSTEM.fullmatch(path):
                found.setdefault(path, NamedPath(flag, path, bool(_WRITTEN.search(key))))
    return tuple(found.values())


def _looks_like_a_file(text: str) -> bool:
    """Rather than a template itself."""
    return text.endswith(".jinja") and not text.startswith("/") and "{" not in text


def _in_value(flag: str, value: str) -> Iterator[tuple[str, str]]:
    """What may be a path, with the key that it belongs to."""
    if value[:1] in ("{", "["):
        try:
            yield from _in_json("", json.loads(value))
        except (ValueError, RecursionError):  # a template, or what vLLM will refuse
            return
    else:
        yield flag.rpartition(".")[2] or flag, _NAMED.sub("", value, count=1)


def _in_json(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _in_json(name, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _in_json(key, inner)
    elif isinstance(value, str) and _PATH_KEY.search(key):
        yield key, value

"""The LoRA adapters that a deployment's owner gave it: no other may be served by it.

They are those of its folder of adapters now (`corral up --adapters`, `corral adapter`), and those that its start
named (`--lora-modules`). The guard closes vLLM's own paths by which adapters are added.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator

from corral.deploy.launch.render import LaunchSpec
from corral.engines.adapters import adapter_names

FLAG = "--lora-modules"


def adapters(spec: LaunchSpec) -> tuple[str, ...]:
    """Their names, as the launch's commands and the folder say."""
    started_with = (name for rank in spec.ranks for name in _named(_words(rank.argv)))
    return tuple(dict.fromkeys((*started_with, *(adapter_names(spec.adapters) if spec.adapters else ()))))


def _words(argv: Iterable[str]) -> Iterator[str]:
    """The words of a command, those of a shell line within it as well."""
    for word in argv:
        yield from shlex.split(word) if f"{FLAG} " in word or f"{FLAG}=" in word[1:] else (word,)


def _named(words: Iterable[str]) -> Iterator[str]:
    """`--lora-modules name=path name=path`, or each as a JSON object."""
    inside = False
    for word in words:
        value = word.removeprefix(f"{FLAG}=")
        if word == FLAG or (word.startswith("-") and value == word):
            inside = word == FLAG
            continue
        inside = inside or value != word
        if not inside:
            continue
        try:
            name = json.loads(value)["name"]
        except (ValueError, TypeError, KeyError):
            name = value.partition("=")[0] if "=" in value else ""
        if isinstance(name, str) and name:
            yield name

"""What Corral sends to other machines: a file of its own as it is, a package of files as one text.

The agent and the courier are packages here and one file there, so that a start places, and a plain Python reads, one
thing that is whole or absent. The text is `node/parts.py`, then every file of the package as a string that people can
read, then the call that runs the package's `__main__.start`. Inside, a package imports its own parts relatively and
nothing else of Corral: there it is called `corral_agent`, here `corral.node.agent`.
"""

from __future__ import annotations

from importlib import resources

__all__ = ["bundle"]

QUOTES = "'''"  # the sources themselves write double ones


def bundle(resource: str) -> str:
    """The text of a file inside the corral package, or of a folder of them as one file that runs."""
    place = resources.files("corral") / resource
    if place.is_file():
        return place.read_text(encoding="utf-8")
    package = f"corral_{place.name}"
    lines = [(resources.files("corral") / "node" / "parts.py").read_text(encoding="utf-8"), "SOURCES = {}"]
    for file in sorted(place.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            stem = file.name.removesuffix(".py")
            name = package if stem == "__init__" else f"{package}.{stem}"
            lines.append(f"SOURCES[{name!r}] = {_quoted(file.read_text(encoding='utf-8'), file.name)}")
    return "\n".join([*lines, f"start({package!r}, SOURCES)", ""])


def _quoted(text: str, name: str) -> str:
    if QUOTES in text:
        raise ValueError(f"{name} contains {QUOTES}, and cannot travel")
    return f"r{QUOTES}{text}{QUOTES}"

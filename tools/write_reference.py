"""docs/reference/: every verb with its options, as `--help` prints them. `make reference` writes the pages anew.

    python tools/write_reference.py [--check]

Nothing on these pages is written by hand: change the help text of an option in src/corral/cli, then run this.
`--check` changes nothing and exits 1 when a page is not what would be written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from corral.cli import VERBS, root

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
WIDTH = 100  # columns, whatever the terminal has
# page -> (title, verbs); a page has at most 250 lines
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "planning": ("Planning and preparing", ("plan", "doctor", "models", "pull", "engine")),
    "places": ("Profiles and SLURM", ("profile", "slurm")),
    "up": ("Starting a model", ("up",)),
    "deployments": ("Deployments", ("ps", "status", "logs", "events", "wait", "down", "env")),
    "fleets": ("Fleets", ("scale", "fleet", "service")),
    "addresses": ("Addresses", ("gateway", "proxy", "renew", "tunnel")),
    "using": ("Using a model", ("complete", "chat", "top", "console")),
    "scoring": ("Scoring, embedding, ranking", ("score", "embed", "rerank")),
    "batch": ("Batches", ("batch",)),
    "bench": ("Measuring", ("bench",)),
    "tune": ("Tuning and simulating", ("tune", "simulate")),
    "fake-server": ("The fake server", ("fake-server",)),
}


def help_texts(command: click.Command, parent: click.Context, name: str) -> Iterator[tuple[str, str]]:
    """A command and all below it: what is typed, and its help."""
    context = click.Context(command, parent, name, **{**command.context_settings, "terminal_width": WIDTH})
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found and not found.hidden and below != getattr(command, "default", None):  # its options are above
                yield from help_texts(found, context, below)


def page_text(title: str, verbs: tuple[str, ...]) -> str:
    top = click.Context(root, info_name="corral", **{**root.context_settings, "terminal_width": WIDTH})
    parts = [f"# {title}: options\n"]
    for verb in verbs:
        command = root.get_command(top, verb)
        assert command is not None, verb
        parts += [f"## `{path}`\n\n```text\n{text.rstrip()}\n```\n" for path, text in help_texts(command, top, verb)]
    return "\n".join(parts)


def index_text() -> str:
    rows = [f"| [`{verb}`]({page}.md) | {VERBS[verb][1]} |" for page, (_, verbs) in PAGES.items() for verb in verbs]
    return (
        "# Verbs and options\n\n"
        "Each page has what `corral VERB --help` prints; `make reference` writes these pages from the program.\n"
        "[Exit codes](../exit-codes.md) and [files](../files.md) have pages of their own.\n\n"
        "| verb | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def pages() -> dict[str, str]:
    """File name -> text."""
    missing = set(VERBS) - {verb for _, verbs in PAGES.values() for verb in verbs}
    assert not missing, f"PAGES in tools/write_reference.py lacks {', '.join(sorted(missing))}"
    return {"README.md": index_text(), **{f"{name}.md": page_text(*page) for name, page in PAGES.items()}}


def stale(folder: Path = FOLDER) -> list[str]:
    """The pages that are not what would be written: other text, missing, or of no verb any more."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main(words: list[str]) -> int:
    changed = stale()
    if "--check" in words:
        if changed:
            print(f"docs/reference is out of date ({', '.join(changed)}): run `make reference`", file=sys.stderr)  # noqa: T201
        return 1 if changed else 0
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for name in changed:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
        print(f"docs/reference/{name}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

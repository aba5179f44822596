"""docs/reference/: every verb with its options, as `--help` prints them. `make reference` writes the pages anew.

    python tools/write_reference.py [--check]

Nothing on these pages but `BY_HAND` is written by hand: change the help text of an option in src/corral/cli, then run
this.
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
# An option that several verbs have means the same with each. Where their help differs: what it means, and what each
# help text must contain for that (a regular expression, in lower case).
MEANINGS: dict[str, tuple[str, str]] = {
    "--adapters": ("folder of adapters, one in each of its folders", "of dir beside the model"),
    "--all": ("also what is left out without it", r"\balso\b|\ball\b|\btoo\b"),
    "--allowed-origins": ("pages that may call the address from a browser", "pages that may"),
    "--answer-column": ("column of the result", "column"),
    "--bind": ("address to listen on", "address to listen on"),
    "--chat": ("prompts are sent as chat messages", r"\bchat\b"),
    "--concurrency": ("requests at once", "at once"),
    "--context": ("longest request in tokens: 32768, or 32k", "longest request"),
    "--dataset": ("what the requests look like", "what the requests look like"),
    "--deployment": ("deployment to use", "deployment"),
    "--dry-run": ("show what would be done, and do nothing", "would"),
    "--force": ("do it although something is there that does not agree", "^accept|^overwrite"),
    "--from": ("source: an example, a host, a measured run", "begin with|take it from|fit to"),
    "--gpus": ("hardware: 8xH100", "^hardware"),
    "--hosts": ("nodes, as ssh knows them", r"\bssh\b"),
    "--ignore-eos": ("go on past the model's own end", "go on past the model's own end"),
    "--input-len": ("prompt tokens of a request", "^prompt tokens"),
    "--interface": ("network interface between the nodes", "interface .*between the nodes"),
    "--json": ("the result as JSON", "json"),
    "--key-file": ("file with the key of the server", r"^file .*\bkey\b"),
    "--max-jobs": ("most jobs that are queued one after the other", r"\bjobs?\b"),
    "--max-tokens": ("longest answer in tokens", "longest answer in tokens"),
    "--model": ("name of the served model", "served model"),
    "--n": ("answers to one prompt", "answers"),
    "--name": ("name of what is made: a deployment, a run", "^name of the"),
    "--network": ("network between nodes", "between nodes"),
    "--nodes": ("number of nodes", "nodes"),
    "--num-prompts": ("requests to send", "^requests"),
    "--on": ("profile: where to run", "profile"),
    "--once": ("do it once, and end", r"\bonce\b"),
    "--output": ("file to write the result to", "^results|^write"),
    "--output-len": ("output tokens of a request", "^output tokens"),
    "--param": ("any other field of a request", "^any other"),
    "--patience": ("how long to wait for a server that is away", "^how long to wait"),
    "--port": ("port of the server", r"\bport\b"),
    "--replicas": ("servers of one model: N, or A..B", "servers"),
    "--request-rate": ("requests per second", "requests per second"),
    "--route": ("how a server is chosen for a request", "how a server is chosen"),
    "--runtime": ("how vLLM is installed on a node", "how vllm is installed"),
    "--seconds": ("send nothing after this long", "send nothing after this long"),
    "--seed": ("seed of what is chosen by chance", r"\bseed\b|repeatable"),
    "--set": ("fix a value: a field of the plan, a key of a profile", r"\bfix\b|set a key"),
    "--skip-bad": ("bad rows are listed, and no reason to stop", "^send bad rows|^bad rows are listed"),
    "--slo": ("service level: ttft_p99=1s,tpot_p99=50ms", "^service level"),
    "--system": ("system message", "^system message"),
    "--temperature": ("spread of the choice", "^spread of the choice"),
    "--timeout": ("how long a server may be silent", "^how long a server may be silent"),
    "--top-p": ("choose among the likeliest tokens of this total probability", "likeliest tokens of this total prob"),
    "--trace-speed": ("how many times faster a trace is replayed", "how many times faster"),
    "--url": ("address of a server", r"\baddress\b"),
    "--wait": ("wait until it is ready, or ready again", r"\bwait\b"),
}
# the same meaning with other values, and why
OTHER_VALUES = {
    "--arrival": "a search and a simulation have no ramp, and the trace of a simulation has times of its own",
    "--concurrency": "a sweep takes several numbers",
    "--dataset": "a simulation needs no texts, so it has no datasets of texts",
    "--replicas": "where the load decides, a range",
    "--request-rate": "a sweep takes several numbers, a simulation a range",
}
# short forms with two long ones, as other programs have them
OTHER_SHORT = {"-f": {"--follow", "--file"}, "-n": {"--lines", "--n"}}
BY_HAND = {"plan-json.md"}
# page -> (title, verbs); a page has at most 250 lines
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "planning": ("Planning and preparing", ("plan", "doctor", "models", "pull", "engine")),
    "places": ("Profiles and SLURM", ("profile", "slurm")),
    "up": ("Starting a model", ("up",)),
    "deployments": ("Deployments", ("ps", "status", "logs", "events", "wait", "down", "env", "adapter")),
    "fleets": ("Fleets", ("scale", "fleet", "service")),
    "addresses": ("Addresses", ("gateway", "proxy", "renew", "tunnel")),
    "using": ("Using a model", ("complete", "chat", "top", "console")),
    "scoring": ("Scoring, embedding, ranking", ("score", "embed", "rerank")),
    "eval": ("Evaluating", ("eval",)),
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


def options(command: click.Command, parent: click.Context, path: str) -> Iterator[tuple[str, click.Option]]:
    """The options of a command and all below it, with the verb that each is typed after."""
    context = click.Context(command, parent)
    default = getattr(command, "default", None)
    yield from ((path, one) for one in command.params if isinstance(one, click.Option))
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found and not found.hidden:
                yield from options(found, context, path if below == default else f"{path} {below}")


def all_options() -> dict[str, list[tuple[str, click.Option]]]:
    """Option -> the verbs that have it, and what each has."""
    top = click.Context(root, info_name="corral")
    found: dict[str, list[tuple[str, click.Option]]] = {}
    for verb in VERBS:
        command = root.get_command(top, verb)
        assert command is not None, verb
        for path, option in options(command, top, verb):
            for name in option.opts:
                found.setdefault(name, []).append((path, option))
    return found


def options_text() -> str:
    """One table of the options that several verbs have, and one of the spellings that are replaced."""
    rows, old = [], []
    for name, having in sorted(all_options().items()):
        shown = {path.split()[0]: option for path, option in having if not option.hidden}
        if name.startswith("--") and len(shown) > 1:
            meaning = next(iter(shown.values())).help or ""
            if name in MEANINGS:
                meaning = MEANINGS[name][0][0].upper() + MEANINGS[name][0][1:]
            note = f" ({OTHER_VALUES[name]})" if name in OTHER_VALUES else ""
            rows.append(f"| `{name}` | {meaning.rstrip('.')}{note} | {', '.join(shown)} |")
        for path, option in having:
            was, new = getattr(option, "was", name), getattr(option, "argument", name)
            if name == option.opts[0] and was != new:
                old.append(f"| `{path} {was}` | `{path} {new}` |")
    return (
        "# Options that several verbs have\n\n"
        "An option has one meaning, whatever the verb. `make reference` writes this page from the program.\n\n"
        "| option | meaning | verbs |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "## Spellings of earlier releases\n\n"
        "They still work in this release, with a hint on stderr.\n\n"
        "| was | is now |\n|---|---|\n" + "\n".join(sorted(old)) + "\n"
    )


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
        "[Options that several verbs have](options.md) lists each with its one meaning.\n"
        "[Exit codes](../exit-codes.md), [files](../files.md) and [the JSON of a plan](plan-json.md) have pages of\n"
        "their own.\n\n"
        "| verb | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def pages() -> dict[str, str]:
    """File name -> text."""
    missing = set(VERBS) - {verb for _, verbs in PAGES.values() for verb in verbs}
    assert not missing, f"PAGES in tools/write_reference.py lacks {', '.join(sorted(missing))}"
    written = {f"{name}.md": page_text(*page) for name, page in PAGES.items()}
    return {"README.md": index_text(), "options.md": options_text(), **written}


def stale(folder: Path = FOLDER) -> list[str]:
    """The pages that are not what would be written: other text, missing, or of no verb any more."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md") if path.name not in BY_HAND}
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

"""`corral embed` and `corral rerank`: vectors and rankings of a file's rows, resumable as `corral batch` is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from corral.cli.batch import HELP, output_options, run_options, run_rows, server_options
from corral.cli.help_pages import GroupedCommand

_FIXED = {"shape": None, "engine": "http", "in_process": False}


def _file_options(answer: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        options = [
            click.argument("input"),
            click.option("-o", "--output", required=True, help="Results: .jsonl, .csv, .parquet, also .gz or .zst."),
            click.option("--input-format", help="jsonl, json, text, csv, tsv or parquet (default: from the name)."),
            click.option("--id-column", metavar="NAME", help="Column that holds the id (default: custom_id or id)."),
            click.option("--answer-column", default=answer, show_default=True, help="Column of the result."),
        ]
        for option in reversed(options):
            function = option(function)
        return function

    return add


@click.command("embed", cls=GroupedCommand, context_settings=HELP, epilog="More: docs/vectors.md.")
@_file_options("embedding")
@click.option("--text-column", metavar="NAME", help="Column that holds the text (default: text or prompt).")
@click.option("--template", metavar="TEXT", help="Text with {{column}} for values of the row.")
@click.option(
    "--dimensions", type=click.IntRange(min=1), metavar="N", help="Of a vector, where the model has a choice."
)
@server_options
@output_options
@run_options
def embed(**options: Any) -> int:
    """Give every row of INPUT (- is standard input) the vector of its text; Parquet holds them as lists of floats.

    Run the same command again to continue after any interruption. Exit codes are those of `corral batch run`.
    """
    from corral.use.batch.input.recipe import Recipe

    recipe = Recipe(
        task="embed", template=options["template"], id_column=options["id_column"],
        prompt_column=options["text_column"], dimensions=options["dimensions"], kind="plain",
    )  # fmt: skip
    return run_rows({**options, **_FIXED}, recipe)


@click.command("rerank", cls=GroupedCommand, context_settings=HELP, epilog="More: docs/vectors.md.")
@_file_options("ranking")
@click.option("--query", metavar="TEXT", help="Query of all rows (default: each row's column `query`).")
@click.option("--documents-column", metavar="NAME", help="Column with the list of texts (default: documents).")
@click.option("--top-n", type=click.IntRange(min=1), metavar="N", help="Only the N best of each row.")
@server_options
@output_options
@run_options
def rerank(**options: Any) -> int:
    """Rank the documents of every row of INPUT (- is standard input) by how well they answer its query.

    The result is a list of index and score, the best first. Run the same command again to continue after any
    interruption. Exit codes are those of `corral batch run`.
    """
    from corral.use.batch.input.recipe import Recipe

    recipe = Recipe(
        task="rerank", query=options["query"], id_column=options["id_column"],
        documents_column=options["documents_column"], top_n=options["top_n"], kind="plain",
    )  # fmt: skip
    return run_rows({**options, **_FIXED}, recipe)

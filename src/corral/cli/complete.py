"""`corral complete`: the continuation of a text, with the probabilities of its tokens where asked."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, cast

import click

from corral.base.errors import DataError, EngineError, UsageError
from corral.base.files import read_text
from corral.cli.options import endpoint_options, sampling_options, taken_sampling
from corral.lab.report.tables import room

if TYPE_CHECKING:
    from corral.client.reply import Choice, Reply


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 118})
@click.argument("prompt", required=False)
@click.option("-f", "--file", "file", metavar="FILE", help="Read the prompt from a file; - is standard input.")
@endpoint_options
@sampling_options
@click.option(
    "--schema", metavar="FILE", help="The answer is JSON of the schema in this file, and is checked to be JSON."
)
@click.option("--json", "as_json", is_flag=True, help="The server's JSON response, untouched.")
def command(prompt: str | None, file: str | None, schema: str | None, as_json: bool, **given: Any) -> None:
    """Continue PROMPT. The text goes to stdout as it is made.

    With --logprobs or --prompt-logprobs each token is shown with its probability, its rank and the alternatives.
    """
    from corral.serve.resolve import resolve
    from corral.use.llm.llm import LLM, request_for

    text = _prompt(prompt, file)
    if not text:
        raise UsageError("the prompt is empty.", 'For example: corral complete "San Francisco is a"')
    sampling = taken_sampling(given)
    if schema is not None:
        sampling = _with_schema(sampling, schema)
    path, body = request_for(text, sampling)
    endpoint = resolve(given["name"], url=given["url"], key_file=given["key_file"], model=given["model"])
    reply: Reply | None
    with LLM(endpoint) as llm:
        if as_json:
            if "return_token_ids" not in (sampling.get("extra") or {}):
                body.pop("return_token_ids", None)  # it was not asked for
            reply = llm.aio.client.request_sync(path, body)
            click.echo(reply.raw)
        elif "logprobs" in sampling or "prompt_logprobs" in sampling:
            reply = _show_tokens(llm, text, sampling)
        elif (sampling.get("n") or 1) > 1:
            reply = llm.complete(text, **sampling)
            for choice in reply.choices:
                _show_choice(choice, len(reply.choices))
        else:
            reply = _stream(llm, text, sampling)
    if schema is not None and reply is not None:
        for choice in reply.choices:
            _check_json(choice, reply)


def _with_schema(sampling: dict[str, Any], path: str) -> dict[str, Any]:
    from corral.client.json_schema import read_schema, schema_format
    from corral.client.sampling import STRUCTURED

    extra = sampling.get("extra") or {}
    if others := [f"--{name.replace('_', '-')}" for name in STRUCTURED if name in sampling]:
        raise UsageError(f"--schema and {others[0]} both say the answer's form.", "Give one of them.")
    return {**sampling, "extra": {**extra, "response_format": schema_format(read_schema(path))}}


def _check_json(choice: Choice, reply: Reply) -> None:
    """Refuse an answer that is not JSON: cut off, or from a server that does not enforce schemas."""
    try:
        json.loads(choice.text)
    except (ValueError, RecursionError) as error:
        if choice.finish_reason == "length":
            spent = reply.usage.completion_tokens if reply.usage else "its"
            raise EngineError(
                f"the answer is not whole JSON: it was cut at {spent} tokens.", "Raise --max-tokens."
            ) from None
        raise EngineError(
            f"the answer is not JSON: {error}.", "Does the server enforce `response_format`? vLLM does."
        ) from None


def _prompt(prompt: str | None, file: str | None) -> str:
    if prompt is not None and file is not None:
        raise UsageError("both a prompt and a file were given.", "Give one of them.")
    if prompt is None and file is None:
        if sys.stdin.isatty():
            raise UsageError("there is no prompt.", 'For example: corral complete "San Francisco is a"')
        file = "-"
    if file is None:
        assert prompt is not None
        return prompt
    if file != "-":
        return read_text(file)
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not UTF-8 (byte {error.start}).", "Convert it with iconv.") from None


def _stream(llm: Any, text: str, sampling: dict[str, Any]) -> Reply | None:
    stream, begun = llm.stream(text, **sampling), False
    try:
        for piece in stream:
            click.echo(shown(piece.text), nl=False)
            sys.stdout.flush()
            begun = True
    except BaseException:
        if begun:
            click.echo()  # an error begins on a line of its own
        raise
    click.echo()
    if stream.reply is not None:
        _note_end(stream.reply.finish_reason, stream.reply)
    reply: Reply | None = stream.reply
    return reply


def shown(text: str) -> str:
    """The text as it is for files and pipes, and without control characters for a terminal."""
    from corral.use.llm.token_view import harmless

    return harmless(text) if sys.stdout.isatty() else text


def _note_end(reason: str, reply: Any) -> None:
    if reason == "length" and sys.stderr.isatty():
        made = reply.usage.completion_tokens if reply.usage else "its"
        click.echo(click.style(f"(ended at {made} tokens; --max-tokens sets the limit)", dim=True), err=True)


def _show_choice(choice: Any, of: int) -> None:
    """One answer, under its number where there are several."""
    if of > 1:
        click.echo(click.style(f"[{choice.index + 1}]", dim=True), err=True)
    click.echo(shown(choice.text))


def _show_tokens(llm: Any, text: str, sampling: dict[str, Any]) -> Reply:
    from corral.client.client import wait

    views, reply = wait(llm.aio.explained(text, **sampling))
    show_views(views, reply)
    return cast("Reply", reply)


def show_views(views: list[Any], reply: Any) -> None:
    """Each answer with the probabilities of its tokens."""
    for view, choice in zip(views, reply.choices, strict=True):
        _show_choice(choice, len(views))
        click.echo()
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            click.echo(view.ansi() + "\n")
        click.echo(view.table(room()).rstrip())

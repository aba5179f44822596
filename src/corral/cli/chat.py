"""`corral chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corral.base.errors import CorralError, NotFoundError
from corral.base.wording import counted
from corral.cli.complete import show_views
from corral.cli.options import deployment_argument, sampling_options, server_options, taken_sampling
from corral.lab.report.screen import explain_error

if TYPE_CHECKING:
    from corral.client.endpoint import Endpoint
    from corral.client.reply import Reply
    from corral.use.llm.conversation import Conversation
    from corral.use.llm.llm import LLM


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 118})
@deployment_argument
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--load", metavar="FILE", help="Go on with a conversation that /save wrote.")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A picture for the first message (PNG, JPEG, GIF or WebP); repeatable.",
)
@click.option("--thoughts", is_flag=True, help="Show what the model thinks before it answers.")
@server_options
@sampling_options
def command(
    name: str | None, system: str | None, load: str | None, images: tuple[Path, ...], thoughts: bool, **given: Any
) -> None:
    """Talk with NAME, or with the only model that is ready.

    /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the conversation. Without a terminal, every line of
    standard input is one message.
    """
    from corral.use.llm.conversation import Conversation, check_chat
    from corral.use.llm.llm import LLM

    sampling = taken_sampling(given)
    check_chat(sampling)
    talk = Conversation(system=system, sampling=sampling)
    if load:
        talk.enter(f"/load {load}")
        talk.system = system or talk.system
    endpoint = _resolved(name, url=given["url"], key_file=given["key_file"], model=given["model"])
    with LLM(endpoint) as llm:
        talk.only_text = partial(_reads_only_text, llm)
        for image in images:
            talk.add_image(image)
        if sys.stdin.isatty():
            click.echo(click.style(f"{endpoint.model} at {endpoint.root}    /help, Ctrl-D ends", dim=True), err=True)
        _talk(llm, talk, thoughts)


def _resolved(name: str | None, **server: Any) -> Endpoint:
    """The server that is meant; where there is none, a terminal is offered to start one."""
    from corral.serve.resolve import resolve

    try:
        return resolve(name, **server)
    except NotFoundError as error:
        if error.details.get("deployments") != [] or not sys.stdin.isatty():
            raise
        if not click.confirm("No model is served yet. Start one now, as `corral up` does?", err=True):
            raise
    from corral.cli import root

    root.main(["up"], prog_name="corral", standalone_mode=False, obj=("up",))
    return resolve(name, **server)


def _reads_only_text(llm: LLM) -> bool:
    """Whether the plan of the deployment says so; of other servers and of fleets nothing is known."""
    from corral.deploy.lifecycle.deployments import plan_of
    from corral.lab.bench.fingerprint import find_folder

    folder = find_folder(llm.aio.client)
    plan = plan_of(folder) if folder else None
    return plan is not None and plan.model.only_text


def _talk(llm: LLM, talk: Conversation, show_thoughts: bool) -> None:
    while True:
        try:
            line = _read_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo(click.style("\n(Ctrl-D or /quit ends the conversation)", dim=True), err=True)
            continue
        try:
            turn = talk.enter(line)
        except CorralError as error:
            explain_error(error)
            continue
        if turn.say:
            click.echo(click.style(turn.say, dim=True), err=True)
        if turn.end:
            return
        if turn.ask:
            _answer(llm, talk, show_thoughts)


def _read_line() -> str:
    """A line of the user; one that ends in a backslash goes on in the next."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
    parts: list[str] = []
    while True:
        mark = ("… " if parts else "› ") if interactive else ""
        line = input(_bright(mark)) if interactive else _piped()
        if not line.endswith("\\"):
            return "\n".join([*parts, line])
        parts.append(line[:-1])


def _bright(mark: str) -> str:
    # \001 and \002 keep readline from counting the colour as columns
    return mark if os.environ.get("NO_COLOR") else f"\001\033[1;36m\002{mark}\001\033[0m\002"


def _piped() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _answer(llm: LLM, talk: Conversation, show_thoughts: bool) -> None:
    if talk.sampling.get("logprobs") is not None:
        _answer_with_probabilities(llm, talk)
    else:
        _stream_answer(llm, talk, show_thoughts)


def _answer_with_probabilities(llm: LLM, talk: Conversation) -> None:
    from corral.client.client import wait

    try:
        views, reply = wait(llm.aio.explained(talk.to_send(), **talk.sampling))
    except CorralError as error:
        talk.unanswered()
        explain_error(error)
        return
    show_views(views, reply)
    talk.answered(reply.text)


_SHORTEST_S = 0.01  # between first and last token; in less, the network's reads are seen, not the model's pace


def _speed(reply: Reply) -> str:
    """How many tokens an answer has, and how many a second came after the first, where that can be measured."""
    tokens, chunk_ns = (reply.usage and reply.usage.completion_tokens) or 0, reply.timing.chunk_ns
    seconds = (chunk_ns[-1] - chunk_ns[0]) / 1e9 if chunk_ns else 0.0
    if tokens < 2 or seconds < _SHORTEST_S:
        return f"({counted(tokens, 'token')})"
    return f"({tokens:,} tokens, {(tokens - 1) / seconds:,.1f} tok/s)"


def _stream_answer(llm: LLM, talk: Conversation, show_thoughts: bool) -> None:
    from corral.client.client import CHAT
    from corral.client.sampling import request_fields
    from corral.lab.report.answer import AnswerScreen
    from corral.use.llm.llm import Stream

    screen, broken = AnswerScreen(show_thoughts), True
    usage = {"include_usage": True, "continuous_usage_stats": True}  # how long a thought is
    fields = request_fields(talk.sampling, chat=True)
    stream = Stream(llm.aio.client.stream_sync(CHAT, {"messages": talk.to_send(), **fields, "stream_options": usage}))
    try:
        for piece in stream:
            screen.add(piece)
        broken = False
    except KeyboardInterrupt:
        stream.close()
        screen.end(broken)
        click.echo(click.style("(stopped)", dim=True), err=True)
    except CorralError as error:
        screen.end(broken)
        explain_error(error)
    else:
        screen.end()
        _note_end(stream.reply)
    if screen.texts or (screen.calls and not broken):
        talk.answered("".join(screen.texts), () if broken else screen.calls)
    else:
        talk.unanswered()


def _note_end(reply: Reply | None) -> None:
    if reply is not None and sys.stdin.isatty():
        click.echo(click.style(_speed(reply), dim=True), err=True)
    if reply is not None and reply.finish_reason == "length":
        click.echo(click.style("(stopped at the token limit)", dim=True), err=True)

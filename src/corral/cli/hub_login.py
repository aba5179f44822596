"""Asking for the hub's token where a gated model needs one: at a terminal, unseen, and once."""

from __future__ import annotations

import contextlib
import getpass
import sys
from collections.abc import Callable
from typing import TypeVar

import click

from corral.base.errors import AccessError, UnreachableError

T = TypeVar("T")


def with_token(work: Callable[[], T]) -> T:
    """The work's result; where the hub wants a token and there is none, the user is asked and it is done again."""
    try:
        return work()
    except AccessError as error:
        repo = error.details.get("needs_token")
        if not repo or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        _ask(repo)
    return work()


def _ask(repo: str) -> None:
    """Ask for a token, try it, and keep it; one that the hub refuses is not kept."""
    from corral.plan.models.hub import check_repository
    from corral.plan.models.token import checked_token, keep_token

    click.echo(
        f"{repo} is gated. Request access at https://huggingface.co/{repo}, and make a token with the right to read\n"
        "at https://huggingface.co/settings/tokens.",
        err=True,
    )
    try:
        token = checked_token(getpass.getpass("Token (not shown while you type or paste it): "))
    except EOFError:
        token = checked_token("")
    with contextlib.suppress(UnreachableError):  # the nodes may reach what this machine does not
        check_repository(repo, token)
    click.echo(f"kept in {keep_token(token)}", err=True)

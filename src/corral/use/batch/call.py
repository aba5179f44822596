"""`corral.batch`: a file of prompts through a model, from Python, with the promises of `corral batch`."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from corral.client.sampling import request_fields
from corral.deploy.lifecycle.lines import Lines
from corral.use.batch.batch import Result, carry_out
from corral.use.batch.core.run import Quiet
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.job import BatchOrder
from corral.use.batch.serving import Offline, Where


def batch(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    deployment: str | None = None,
    url: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
    start: str | None = None,
    context: int | None = None,
    chat: bool = False,
    system: str | None = None,
    prompt_template: str | None = None,
    prompt_column: str | None = None,
    concurrency: int | None = None,
    offline: bool = False,
    skip_bad: bool = False,
    force: bool = False,
    quiet: bool = False,
    **params: Any,
) -> Result:
    """Run every row of a file and write the answers; called again after anything, it continues.

    It uses the named deployment, the server at an address, or the only ready one; with `start` it starts that model
    and stops it at the end. With `offline` rows go into the process of an engine on this machine, without HTTP.
    Sampling parameters for all rows are keyword arguments: `max_tokens=64, temperature=0`.
    """
    request_fields(params, chat=True)  # a misspelt name is an error, as it is for one prompt
    params |= params.pop("extra", None) or {}
    recipe = Recipe(template=prompt_template, chat=chat, system=system, params=params, prompt_column=prompt_column)
    order = BatchOrder(str(input), str(output), recipe, skip_bad=skip_bad, force=force)
    where = Where(
        (deployment,) if deployment else (),
        (url,) if url else (),
        str(key_file) if key_file else None,
        Offline(start, context) if start else None,
        offline,
    )
    settings = RunnerSettings(concurrency=concurrency)
    return _apart(lambda signals: carry_out(order, where, settings, Quiet(), reporter=Lines(quiet), signals=signals))


def _apart(work: Callable[[bool], Result]) -> Result:
    """Here, where Ctrl-C ends a batch in order; in a thread where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work(threading.current_thread() is threading.main_thread())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, False).result()

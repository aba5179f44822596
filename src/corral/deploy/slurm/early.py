"""Whether the runtime is there, before a job waits in the queue for hours: asked in the cheapest way that answers.

First on the login node, which costs a second: an environment on the shared file system answers there as it would on
a node. Where it does not answer, a node of the same partition is asked, with one processor and for two minutes at
most; such a job mostly starts at once. Where no node is to be had in a minute, the login node's word counts if it is
about the environment itself; that it lacks a command (conda, module) says nothing about the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from corral.base.errors import CorralError, EngineError
from corral.base.shell import Completed, run
from corral.deploy.slurm.commands import ask
from corral.engines.runtimes.base import NodeCheck

HERE_S = 60.0
WAIT_S = 60  # for a node to become free
NODE_S = 240.0
NO_COMMAND = 127
REACHED = "corral-reached-a-node"


def refuse_lacking(checks: Sequence[NodeCheck], where: Sequence[str]) -> None:
    """Raise what a check found; `where` are the options that lead to the partition of the job."""
    for check in checks:
        if not check.light:
            continue
        here = _checked_here(check)
        if here is not None and here.code == 0:
            continue
        there = on_a_node(check.light, where)
        if there is not None and there.code == 0:
            continue
        if there is not None:
            raise EngineError(f"{check.what}, asked on a node: {_words(there)}", check.remedy)
        if here is not None and here.code != NO_COMMAND:
            raise EngineError(f"{check.what}: {_words(here)}", check.remedy)


def _checked_here(check: NodeCheck) -> Completed | None:
    try:
        return run(check.light, HERE_S)
    except CorralError:
        return None


def on_a_node(argv: Sequence[str], where: Sequence[str], wait_s: int = WAIT_S) -> Completed | None:
    """What a command says on a node; None where none was to be had."""
    small = ["--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=1G", "--time=2", f"--immediate={wait_s}"]
    mark = ["sh", "-c", f'echo {REACHED}; exec "$@"', "corral-early", *argv]
    try:
        done = ask(["srun", "--quiet", "--job-name=corral-check", *small, *where, *mark], NODE_S)
    except CorralError:
        return None
    return done if REACHED in done.stdout else None


def _words(done: Completed) -> str:
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    said = [line for line in said if not line.startswith("srun: ")] or ["it said nothing"]
    return said[-1][:300]

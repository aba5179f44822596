"""Remedies name only options that help: of every verb that can show them, or of the verb that they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import click
import pytest

from corral.cli import VERBS, root
from tests.unit.test_messages import SOURCE, known_errors, parsed, words
from tests.unit.test_messages import _last as last_name

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# other programs' options: Ray's, SLURM's, conda's, pip's, Docker's, and vLLM's own flags
FOREIGN = re.compile(
    r"(ray start|squeue|conda create|uv pip install|python3|docker ps|Docker|vLLM's|Say|unless)\b[^`,;)]*"
)

USES = ("complete", "chat", "score", "top", "batch run", "batch serve", "bench run", "bench search", "bench sweep")
STARTS = ("up", "batch run")  # whatever starts a model
BATCH = ("batch run", "batch resume", "batch in-job")
# who can show the messages of a module; those of cli/VERB.py are that verb's. What became of a deployment is shown by
# others, too (status, wait, ps): its remedy is for the verb that starts it again
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "use/batch/batch.py": ("batch run",),
    "use/batch/core/runner.py": BATCH,
    "use/batch/input/rows.py": ("batch run", "batch check", "score"),
    "use/batch/spec.py": BATCH,
    "use/batch/jobs.py": ("batch run", "batch resume"),
    "use/batch/ray_run.py": ("batch run",),
    "use/batch/service/app.py": ("batch serve",),
    "use/batch/shared.py": BATCH,
    "lab/bench/metrics.py": ("bench run", "bench sweep", "bench search"),
    "lab/bench/series.py": ("bench search",),
    "lab/bench/spec.py": ("bench run", "bench sweep", "bench search"),
    "lab/bench/store.py": ("bench run", "bench sweep", "bench search"),
    "cli/__init__.py": ("",),
    "lab/report/batch.py": ("batch check",),
    "cli/options.py": STARTS,
    "client/endpoint.py": USES,
    "client/errors.py": USES,
    "client/sampling.py": ("complete", "chat", "batch run"),
    "deploy/deployment/diagnosis.py": STARTS,
    "deploy/deployment/signatures.py": STARTS,
    "deploy/doctor/judge.py": ("doctor",),
    "deploy/doctor/readiness.py": ("doctor",),
    "engines/flags.py": ("up",),
    "plan/hardware/fabric.py": ("up", "batch run", "doctor"),
    "deploy/launch/links.py": STARTS,
    "deploy/lifecycle/bringup.py": STARTS,
    "deploy/lifecycle/decision.py": STARTS,
    "deploy/lifecycle/deployments.py": STARTS,
    "deploy/lifecycle/distant.py": ("tunnel",),
    "serve/resolve.py": USES,
    "serve/fleet/chain.py": STARTS,
    "use/llm/conversation.py": ("chat",),
    "plan/models/store.py": ("up",),
    "plan/settings.py": ("plan", *STARTS),
    "serve/gateway/process.py": ("proxy",),
    "engines/runtimes/container.py": (*STARTS, "doctor"),
    "use/score/job.py": ("score",),
    "use/score/score.py": ("score",),
    "deploy/slurm/cluster.py": STARTS,
    "deploy/slurm/commands.py": STARTS,
    "deploy/slurm/states.py": STARTS,
    "deploy/targets/local.py": STARTS,
    "deploy/targets/slurm.py": STARTS,
    "deploy/targets/ssh.py": STARTS,
    "deploy/transfer/courier.py": ("pull", *STARTS),
    "deploy/transfer/pull.py": ("pull",),
    "deploy/transfer/spread.py": ("pull", *STARTS),
}  # fmt: skip
# those of a module that fewer verbs show
FEWER: dict[str, tuple[str, ...]] = {
    "End the output in .jsonl, ": ("batch run",),
    "Give --request-rate and ": ("bench run",),
    "Name a folder on shared storage ": ("pull",),
    "Name a folder on the nodes' own disks ": ("pull",),
    "Say which, by its name: ": tuple(verb for verb in USES if verb not in ("chat", "top")),  # they take a name
    "Say which: --model ": ("complete", "chat", "score", "batch run", "bench run", "bench search", "bench sweep"),
}
# remedies that are no error's: tables of diagnoses, of SLURM's words, of flags
TABLES = (
    "deploy/deployment/diagnosis.py",
    "deploy/deployment/signatures.py",
    "deploy/doctor/judge.py",
    "engines/flags.py",
    "deploy/slurm/states.py",
    "deploy/slurm/commands.py",
)


@cache  # asked for every remedy; walking all commands takes as long as reading the source
def options() -> dict[str, set[str]]:
    """Every verb, and every one below it, with its options; the program itself as "" ."""

    def walk(command: click.Command, name: str) -> Iterator[tuple[str, set[str]]]:
        found = {word for one in command.params for word in (*one.opts, *one.secondary_opts) if word[:2] == "--"}
        yield name, found | {"--help"}
        if isinstance(command, click.Group):
            for below in command.list_commands(context):
                inner = command.get_command(context, below)
                if inner is not None and below not in VERBS:
                    yield from walk(inner, f"{name} {below}".strip())

    context = click.Context(root)
    known = dict(walk(root, ""))
    for verb in VERBS:
        command = root.get_command(context, verb)
        assert command is not None
        known |= dict(walk(command, verb))
    return known


def remedies() -> Iterator[tuple[str, str]]:
    """Every remedy of an error, and every text of the tables, with its module."""
    known = known_errors()
    for path, tree in parsed().items():
        module = str(path.relative_to(SOURCE))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and last_name(node.func) in known and len(node.args) > 1:
                yield module, words(node.args[1])
            elif module in TABLES and id(node) not in said and _is_sentence(node):
                yield module, words(node)


def _is_sentence(node: ast.AST) -> TypeGuard[ast.Constant]:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and " " in text and bool(OPTION.search(text))


def named_verbs(text: str, known: dict[str, set[str]]) -> list[str]:
    """The verbs that a text names: `corral VERB …`, also `corral VERB SUB …`."""
    said = [found.split() for found in re.findall(r"corral ((?:[a-z-]+ ?){1,2})", text)]
    tried = [" ".join(one[:count]) for one in said for count in (1, 2) if len(one) >= count]
    return [verb for verb in tried if verb in known]


def wrong_options(text: str, shown_by: tuple[str, ...], known: dict[str, set[str]]) -> list[str]:
    """Options that neither a named verb has nor every verb that shows the text."""
    own = FOREIGN.sub("", text)
    allowed = set[str]().union(*(known[verb] for verb in named_verbs(own, known)))
    return [option for option in OPTION.findall(own) if option not in allowed
            and not all(option in known[verb] for verb in shown_by)]  # fmt: skip


def shown_by(module: str) -> tuple[str, ...]:
    verb = Path(module).stem.replace("_", "-")
    known = options()
    below = tuple(name for name in known if name == verb or name.startswith(f"{verb} "))
    return SHOWN_BY.get(module) or (below if module.startswith("cli/") else ())


def test_every_option_in_a_remedy_is_one_that_the_user_has() -> None:
    known = options()
    wrong = []
    for module, text in remedies():
        if not OPTION.search(FOREIGN.sub("", text)):
            continue
        verbs = next((few for start, few in FEWER.items() if text.startswith(start)), None) or shown_by(module)
        if module in SHOWN_BY:
            bad = wrong_options(text, verbs, known)
        else:  # of a verb of its own, or of several: one of them has it
            some = set[str]().union(*(known[verb] for verb in (verbs or known)))
            bad = wrong_options(text, ("",), {**known, "": some})
        wrong += [f"{module}: {', '.join(bad)} ({', '.join(verbs)}): {text}"] if bad else []
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "verbs", "wrong"),
    [
        ("Use --link native.", ("up", "batch run"), ["--link"]),
        ("Use --link native of `corral up`.", ("up", "batch run"), []),
        ("Use `corral plan --gpus 1xH100 --nodes 2`.", ("up",), []),
        ("Use `corral batch run IN --skip-bad`.", ("plan",), []),
        ("Use --skip-bad.", ("plan",), ["--skip-bad"]),
        ("Look with `squeue --me`.", ("up",), []),
        ("Use --no-such-thing of `corral up`.", ("up",), ["--no-such-thing"]),
    ],
)
def test_the_rule_itself(text: str, verbs: tuple[str, ...], wrong: list[str]) -> None:
    assert wrong_options(text, verbs, options()) == wrong

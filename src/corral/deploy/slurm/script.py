"""The batch script: short, readable, with no secret in it; all logic is in the agents. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from corral.base.errors import UsageError
from corral.base.wording import time_limit_text
from corral.deploy.slurm.options import SlurmOptions

NOT_SEEN = 66  # the exit code of a job whose node does not see the deployment's folder
RESERVE_S = 30  # between the end of draining and the time limit: the engine ends, files are written


@dataclass(frozen=True)
class BatchJob:
    """A job as the script asks for it: `options` are settled, and what is empty is left to the cluster."""

    deployment: str
    title: str
    folder: str  # of the deployment, on the shared file system
    options: SlurmOptions
    renewer: str = ""  # the command that submits a successor or keeps a fleet, where one is wanted
    renews: bool = True  # it is called once more when the engine has ended


def batch_script(job: BatchJob) -> str:
    """The script as sbatch gets it."""
    options = job.options
    shell = "#!/bin/bash -l" if options.modules else "#!/bin/bash"  # a login shell knows `module`
    drain_s = max(1, options.signal_s - RESERVE_S, options.signal_s // 2)
    srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label"]
    if options.cpus_per_task:  # srun does not inherit it from sbatch
        srun.append(f"--cpus-per-task={options.cpus_per_task}")
    lines = [
        shell,
        *(f"#SBATCH {option}" for option in _sbatch_options(job)),
        f"# {_plain(job.title)}, for the deployment {_plain(job.deployment)}; one agent of Corral's per node",
        "umask 077",
        f"folder={shlex.quote(job.folder)}",
        f'[ -f "$folder/node/slurm_start.py" ] || exit {NOT_SEEN}  # not on a file system that this node shares',
        *(_drain(options.signal_s, drain_s) if not options.runner else _signal_runner(options.signal_s)),
        *(f"module load {shlex.quote(module)}" for module in options.modules),
        *_renew(job),
        f'{shlex.join(srun)} {shlex.quote(options.python)} -I "$folder/node/slurm_start.py" "$folder" &',
        "agents=$!",
        *(
            _run(options.runner, drain_s)
            if options.runner
            else _wait("agents", "break" if job.renewer else 'exit "$code"')
        ),
    ]
    if job.renewer:  # an engine that died early has a successor as well
        lines += [
            'kill "$renewer"; wait "$renewer"',
            *([f'{job.renewer} --once >>"$folder/renewal.log" 2>&1'] if job.renews else []),
            'exit "$code"',
        ]
    return "\n".join(lines) + "\n"


def _drain(signal_s: int, drain_s: int) -> list[str]:
    return [
        f"# {signal_s} s before the end: no new requests; running ones have {drain_s} s",
        f"trap 'echo {drain_s} >\"$folder/rank0/drain\"' USR1",
    ]


def _signal_runner(signal_s: int) -> list[str]:
    return [
        f"# {signal_s} s before the end: the runner finishes what is under way and submits the next job",
        "trap 'kill -USR1 \"$runner\" 2>/dev/null' USR1",
    ]


def _run(runner: tuple[str, ...], drain_s: int) -> list[str]:
    """The job ends with its runner, and takes the agents down."""
    return [
        f'CORRAL_AGENTS="$agents" CORRAL_DRAIN_S={drain_s} {shlex.join(runner)} &',
        "runner=$!",
        *_wait("runner", "break"),
        'for rank in "$folder"/rank*; do : >"$rank/stop"; done',
        'wait "$agents"',
        'exit "$code"',
    ]


def _wait(whom: str, then: str) -> list[str]:
    return [
        f"while true; do  # the signal ends a wait, not the {whom}",
        f'    wait "${whom}"',
        "    code=$?",
        f'    kill -0 "${whom}" 2>/dev/null || {then}',
        "done",
    ]


def _renew(job: BatchJob) -> list[str]:
    if not job.renewer:
        return []
    return [
        "# submits a successor early enough to be loaded before the end"
        if job.renews
        else "# keeps the fleet while no other keeper does",
        f'{job.renewer} --while $$ >>"$folder/renewal.log" 2>&1 &',
        "renewer=$!",
    ]


def _sbatch_options(job: BatchJob) -> list[str]:
    options = job.options
    values: dict[str, Any] = {
        "job-name": options.job_name or "corral-" + re.sub(r"[^\w.-]+", "-", job.deployment, flags=re.ASCII),
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "reservation": options.reservation,
        "constraint": options.constraint,
        "nodes": options.nodes or 1,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus_per_node or "",
        "cpus-per-task": options.cpus_per_task or "",
        "mem": options.mem,
        "exclusive": options.exclusive,
        "time": time_limit_text(options.time_s) if options.time_s else "",
        "signal": f"B:USR1@{options.signal_s}",
        "requeue": options.requeue is True,
        "no-requeue": options.requeue is False,
        "open-mode": "append",
        "output": options.output or f"{job.folder}/job.log".replace("%", "%%"),
        "error": options.error,
    }
    values |= options.extra
    return [_option(name, value) for name, value in values.items() if value not in ("", False, None)]


def _option(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    text = str(value)
    if not text.isprintable() or '"' in text:  # what follows a line break would be a line of the script
        raise UsageError(
            f"--{name} of the batch script cannot be {text!r}: it must be one line without quotes.",
            "Correct the option, or the path of Corral's home (CORRAL_HOME).",
        )
    return f'--{name}="{text}"' if re.search(r"[\s'#\\$;&|<>*?()`]", text) else f"--{name}={text}"


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)

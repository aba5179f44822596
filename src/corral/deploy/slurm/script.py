"""The batch script: short, readable, with no secret in it; all logic is in the agents. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.base.errors import UsageError

NOT_SEEN = 66  # the exit code of a job whose node does not see the deployment's folder
RESERVE_S = 30  # between the end of draining and the time limit: the engine ends, files are written


@dataclass(frozen=True)
class BatchJob:
    """Everything the script says; what is empty is not said."""

    deployment: str
    title: str
    folder: str  # of the deployment, on the shared file system
    nodes: int
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    mem: str = ""
    exclusive: bool = False
    time_s: float | None = None
    signal_s: int = 120
    requeue: bool | None = None
    job_name: str = ""
    output: str = ""
    error: str = ""
    modules: tuple[str, ...] = ()
    python: str = "python3"
    runner: tuple[str, ...] = ()  # a command that uses the deployment; the job ends with it, and with its code
    extra: Mapping[str, Any] = field(default_factory=dict)
    renewer: str = ""  # the command that submits a successor, where one is wanted


def clock(time_s: float) -> str:
    """Seconds as SLURM writes a time limit."""
    minutes, secs = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{secs:02}" if days else f"{hours}:{minutes:02}:{secs:02}"


def batch_script(job: BatchJob) -> str:
    """The script as sbatch gets it."""
    shell = "#!/bin/bash -l" if job.modules else "#!/bin/bash"  # a login shell knows `module`
    drain_s = max(1, job.signal_s - RESERVE_S, job.signal_s // 2)
    srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label"]
    if job.cpus_per_task:  # srun does not take it over from sbatch
        srun.append(f"--cpus-per-task={job.cpus_per_task}")
    lines = [
        shell,
        *(f"#SBATCH {option}" for option in _options(job)),
        f"# {_plain(job.title)}, for the deployment {_plain(job.deployment)}; one agent of Corral's per node",
        "umask 077",
        f"folder={shlex.quote(job.folder)}",
        f'[ -f "$folder/node/slurm_start.py" ] || exit {NOT_SEEN}  # not on a file system that this node shares',
        *(_drain(job.signal_s, drain_s) if not job.runner else _hand_on(job.signal_s)),
        *(f"module load {shlex.quote(module)}" for module in job.modules),
        *_renew(job),
        f'{shlex.join(srun)} {shlex.quote(job.python)} -I "$folder/node/slurm_start.py" "$folder" &',
        "agents=$!",
        *(_run(job.runner, drain_s) if job.runner else _wait("agents", "break" if job.renewer else 'exit "$code"')),
    ]
    if job.renewer:  # an engine that died early has a successor as well
        lines += [
            'kill "$renewer"; wait "$renewer"',
            f'{job.renewer} --once >>"$folder/renewal.log" 2>&1',
            'exit "$code"',
        ]
    return "\n".join(lines) + "\n"


def _drain(signal_s: int, drain_s: int) -> list[str]:
    return [
        f"# {signal_s} s before the end: no new requests; running ones have {drain_s} s",
        f"trap 'echo {drain_s} >\"$folder/rank0/drain\"' USR1",
    ]


def _hand_on(signal_s: int) -> list[str]:
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
        "# submits a successor early enough to be loaded before the end",
        f'{job.renewer} --while $$ >>"$folder/renewal.log" 2>&1 &',
        "renewer=$!",
    ]


def _options(job: BatchJob) -> list[str]:
    given: dict[str, Any] = {
        "job-name": job.job_name or "corral-" + re.sub(r"[^\w.-]+", "-", job.deployment, flags=re.ASCII),
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "reservation": job.reservation,
        "constraint": job.constraint,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or "",
        "cpus-per-task": job.cpus_per_task or "",
        "mem": job.mem,
        "exclusive": job.exclusive,
        "time": clock(job.time_s) if job.time_s else "",
        "signal": f"B:USR1@{job.signal_s}",
        "requeue": job.requeue is True,
        "no-requeue": job.requeue is False,
        "open-mode": "append",
        "output": job.output or f"{job.folder}/job.log".replace("%", "%%"),
        "error": job.error,
    }
    given |= job.extra
    return [_option(name, value) for name, value in given.items() if value not in ("", False, None)]


def _option(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    text = str(value)
    if not text.isprintable() or '"' in text:  # the next line would be one of the script's own
        raise UsageError(
            f"--{name} of the batch script cannot be {text!r}: it must be one line without quotes.",
            "Correct the option, or the path of Corral's home (CORRAL_HOME).",
        )
    return f'--{name}="{text}"' if re.search(r"[\s'#\\$;&|<>*?()`]", text) else f"--{name}={text}"


def _plain(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)

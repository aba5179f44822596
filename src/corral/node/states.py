"""The states of a deployment, the reasons for its end, and which state may follow which.

State and Reason are separate, so that "failed, out of memory" and "failed, killed" stay distinct. `UNKNOWN` is only
ever computed by a reader (the node cannot be asked); it is never written. An agent writes only the `TRANSITIONS`.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

from __future__ import annotations

import enum
from typing import Dict, FrozenSet


class _Word(str, enum.Enum):
    """An enum whose members are their own text, in JSON and in messages."""

    def __str__(self) -> str:
        return str(self.value)


class State(_Word):
    STAGING = "staging"
    QUEUED = "queued"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Reason(_Word):
    """Why a deployment is stopped or failed."""

    REQUESTED = "requested"
    MACHINE_RESTARTED = "machine_restarted"
    INTERRUPTED = "interrupted"
    ENGINE_EXITED = "engine_exited"
    ENGINE_HUNG = "engine_hung"
    STALLED = "stalled"
    NOT_ADVANCING = "not_advancing"
    AGENT_KILLED = "agent_killed"
    NOT_GUARDED = "not_guarded"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    CONTEXT_TOO_LONG = "context_too_long"
    PORT_TAKEN = "port_taken"
    BAD_ARGUMENT = "bad_argument"
    BAD_PARALLELISM = "bad_parallelism"
    GATED_MODEL = "gated_model"
    MODEL_INCOMPLETE = "model_incomplete"
    MODEL_UNSUPPORTED = "model_unsupported"
    ENGINE_BROKEN = "engine_broken"
    NO_RUNTIME = "no_runtime"
    NO_IMAGE = "no_image"
    NAME_TAKEN = "name_taken"
    NO_SPACE = "no_space"
    NO_GPU = "no_gpu"
    NETWORK = "network"
    NODE_LOST = "node_lost"
    WALLTIME = "walltime"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    BOOT_FAILED = "boot_failed"
    JOB_FAILED = "job_failed"
    JOB_ENDED = "job_ended"
    JOB_FORGOTTEN = "job_forgotten"
    CANNOT_START = "cannot_start"
    HOME_NOT_SHARED = "home_not_shared"


_END = {State.STOPPED, State.FAILED}
# a job can return to its queue from every state but the last, and a restart begins from any of them
_AGAIN = {State.QUEUED, State.STARTING}
TRANSITIONS: Dict[State, FrozenSet[State]] = {
    State.STAGING: frozenset({State.QUEUED, State.STARTING} | _END),
    State.QUEUED: frozenset({State.STARTING} | _END),
    State.STARTING: frozenset({State.LOADING, State.READY, State.DRAINING} | _AGAIN | _END),
    State.LOADING: frozenset({State.READY, State.DRAINING} | _AGAIN | _END),
    State.READY: frozenset({State.DRAINING} | _AGAIN | _END),
    State.DRAINING: frozenset(_AGAIN | _END),
    State.STOPPED: frozenset(),
    State.FAILED: frozenset(),
    State.UNKNOWN: frozenset(),
}

ENDED = frozenset(_END)


def may_follow(before: State, after: State) -> bool:
    """Whether a deployment in `before` may next be in `after`."""
    return after in TRANSITIONS[before]

"""Why does a start take so long? What an engine's log says while it works, before anything has failed.

The same kind of table as `diagnosis`, asked while a phase lasts longer than usual, and when a start is given up
because it does not advance. Each row has a test with lines as vLLM writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from corral.deploy.deployment.diagnosis import LET_THE_PLAN_CHOOSE, Diagnosis, Signature
from corral.deploy.deployment.state import Reason

SLOW: tuple[Signature, ...] = (
    Signature(
        Reason.NOT_ADVANCING,
        r"mkldnn_\w*(?:matmul|linear|gemm)\w*[^\n]*(?:needs? the cpu support|not supported|refused)"
        r"|Failed to create oneDNN linear, fallback to torch linear",
        "this CPU has no fast arithmetic for the chosen number format (bf16 or fp16), so the engine multiplies in a"
        " reference loop, many times slower",
        LET_THE_PLAN_CHOOSE,
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"[Pp]lacement group|No available node types can fulfill|VLLM_HOST_IP",
        "Ray cannot place the ranks: a node did not join, or reports another address than the one Ray knows",
        "Compare the nodes' addresses (`corral doctor`), and see the other ranks' logs: corral logs {name} --rank N.",
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"client socket has (?:timed out|failed to connect)|connectFullMesh|failed to connect to \S+"
        r"|\[c10d\][^\n]*retry",
        "a rank cannot reach the others over the network",
        "`corral doctor` shows the interfaces that all nodes share; name one with --interface.",
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"No available shared memory broadcast block|Waiting for \d+ (?:local|remote)|still waiting"
        r"|waiting for .*engine",
        "a rank waits for another one that does not answer",
        "See what the other ranks say: corral logs {name} --rank N.",
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"Filesystem type for checkpoints: (NFS\d*|LUSTRE|FUSE\w*|CIFS|SMB\w*|9P)",
        "the weights are read over a network file system ({found}), piece by piece",
        "Bring them to the nodes' own disks first (`corral pull`), or read them ahead:"
        " -- --safetensors-load-strategy prefetch.",
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"flashinfer[^\n]*(?:JIT|ninja|compil)|(?:nvcc|ninja) ",
        "kernels are being built on this machine for the first time",
        "Wait: the next start finds them.",
    ),
)


def explain_slow(lines: Iterable[str], name: str, phase: str = "") -> Diagnosis | None:
    """The likely cause of a start that takes too long, from what the engine said; None when no line tells."""
    text = "\n".join(lines)
    for row in SLOW:
        if match := re.search(row.pattern, text, re.IGNORECASE):
            found = next(iter(match.groups()), None) or ""
            return Diagnosis(row.reason, row.cause.format(found=found), row.remedy.format(name=name), match.group(0))
    if phase in ("compiling", "warming", "starting"):
        return Diagnosis(
            Reason.NOT_ADVANCING,
            "the machine is busy with other work, or this is the first start of its kind, which compiles",
            "`uptime` shows how busy it is; a second start finds the compiled code.",
        )
    return None

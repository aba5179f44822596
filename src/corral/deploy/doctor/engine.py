"""The engine on the nodes: whether the runtime is there, its versions, and whether its ranks can all-reduce.

Everything runs inside the runtime, wrapped as a rank would be, so that a container, an environment module or a conda
environment is tested as it will be used.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.bundle import bundle
from corral.base.errors import CorralError
from corral.base.record import from_json
from corral.base.shell import Completed
from corral.base.ssh import Ssh, each
from corral.base.untrusted import last_object, plain
from corral.deploy.doctor.finding import Finding, fatal, ok, warning
from corral.deploy.doctor.judge import judge_versions
from corral.engines.runtimes.base import EngineCommand, NodeCheck, Runtime
from corral.plan.hardware.fabric import Fabric
from corral.plan.hardware.survey import Here, NodeFacts

LARGE_MIB = 16
MOST = 1e15  # bytes per second, or seconds
MOST_LINES, LONGEST_LINE = 20_000, 2000  # of NCCL's output
ROOM_BYTES = 2 << 30  # what NCCL and a CUDA context need on a GPU that others may use


def _last_line(done: Completed) -> str:
    return done.last_line[:200] or "it said nothing"


def check_runtime(
    ssh: Ssh | Here, hosts: Sequence[str], runtime: Runtime, timeout_s: float
) -> tuple[list[Finding], dict[str, dict[str, str]]]:
    """Whether the runtime can run on each host, and the versions it has there."""
    checks, until = runtime.check(), time.monotonic() + timeout_s

    def task(host: str) -> tuple[list[Finding], dict[str, str]]:
        failed, parts = [], {}
        for check in checks:
            finding, value = _one_check(ssh, host, runtime, check, until - time.monotonic())
            if finding:
                failed.append(finding)
            elif check.reports:
                parts[check.reports] = value
        if not failed:
            parts |= _versions(ssh, host, runtime, until - time.monotonic())
        return failed, parts

    findings: list[Finding] = []
    versions = {}
    for host, answer in each(hosts, task, width=len(hosts)).items():
        if isinstance(answer, CorralError):
            findings.append(fatal("runtime", answer.message, answer.remedy, host))
            continue
        findings += answer[0]
        if not answer[0]:
            versions[host] = answer[1]
    if not findings:
        findings = [ok("runtime", f"{runtime.name}: {runtime.engine}")]
    return [*findings, *judge_versions(versions)], versions


def _one_check(
    ssh: Ssh | Here, host: str, runtime: Runtime, check: NodeCheck, timeout_s: float
) -> tuple[Finding | None, str]:
    done = ssh.run(host, check.argv, timeout_s=max(1.0, min(check.timeout_s, timeout_s)))
    if done.code == 0:
        lines = done.stdout.strip().splitlines()
        return None, lines[-1].strip() if lines else ""
    if runtime.carried and isinstance(ssh, Here) and not Path(check.argv[0]).exists():
        return ok("runtime", f"{check.what} is not installed yet; `corral up` installs it"), ""
    # what Corral, or the node's own daemon, installs at the start need not be there yet
    kind = warning if runtime.carried or check.details.get("pulled_at_start") else fatal
    return kind("runtime", f"{check.what}: {_last_line(done)}", check.remedy, host), ""


def _versions(ssh: Ssh | Here, host: str, runtime: Runtime, timeout_s: float) -> dict[str, str]:
    try:
        done = _inside(ssh, host, runtime, "versions.py", {}, max(1.0, timeout_s))
        versions = last_object(done.stdout, f"the answer of {host}")
    except CorralError:
        return {}
    return {name: plain(str(value), 100) for name, value in versions.items()}


def _inside(
    ssh: Ssh | Here,
    host: str,
    runtime: Runtime,
    script: str,
    env: Mapping[str, str],
    timeout_s: float,
    rank: int = 0,
    gpus: bool = False,
) -> Completed:
    """Run one of Corral's scripts in the runtime's Python on a node."""
    job = EngineCommand(
        deployment="doctor",
        launch_id=secrets.token_hex(8),
        rank=rank,
        argv=(*runtime.python, "-c", bundle(f"node/{script}")),
        env=env,
        cwd="/tmp",  # noqa: S108 - nothing is written there
        gpus=gpus,
        fabric=bool(env),
    )
    wrapped = runtime.wrap(job)
    assignments = [f"{name}={value}" for name, value in wrapped.env.items()]
    try:
        return ssh.run(host, ["env", *assignments, *wrapped.argv], timeout_s=timeout_s)
    finally:
        for argv in wrapped.cleanup:
            ssh.run(host, argv, timeout_s=4)


@dataclass(frozen=True)
class AllReduce:
    """The all-reduce as one rank measured it."""

    ok: bool
    small_s: float = 0.0
    large_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


def run_all_reduce(
    ssh: Ssh | Here, facts: Sequence[NodeFacts], fabric: Fabric, runtime: Runtime, timeout_s: float
) -> dict[str, dict[str, Any]]:
    """All-reduce with one rank per node, over NCCL where every node has a GPU with room, else over Gloo."""
    nccl = all(any(gpu.memory_bytes - gpu.used_bytes > ROOM_BYTES for gpu in node.gpus[:1]) for node in facts)
    order = {
        "world": len(facts),
        "master": fabric.addresses[facts[0].host],
        "port": facts[0].free_ports[1],
        "backend": "nccl" if nccl else "gloo",
        "mib": LARGE_MIB,
        "limit_s": max(5.0, timeout_s - 8),
    }
    ranks = {node.host: rank for rank, node in enumerate(facts)}

    def task(host: str) -> dict[str, Any]:
        env = {**fabric.env(host), "CORRAL_ALL_REDUCE": json.dumps({**order, "rank": ranks[host]})}
        if nccl:
            env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
        done = _inside(ssh, host, runtime, "all_reduce.py", env, timeout_s, ranks[host], gpus=nccl)
        return read_all_reduce(done, str(order["backend"]))

    answers = each(list(ranks), task, width=len(ranks)).items()
    return {
        host: {"ok": False, "error": one.message} if isinstance(one, CorralError) else one for host, one in answers
    }


def read_all_reduce(done: Completed, backend: str) -> dict[str, Any]:
    """The script's last line, and the network that NCCL used."""
    try:
        result = from_json(AllReduce, last_object(done.stdout, "the answer"), "the answer")
    except CorralError:
        result = AllReduce(False, error=_last_line(done))
    if not all(0 <= number < MOST for number in (result.small_s, result.large_s, result.bytes_per_s)):
        result = AllReduce(False, error="its measurement is impossible")
    output = "\n".join(
        line[:LONGEST_LINE].rstrip() for line in (done.stdout + done.stderr).splitlines()[-MOST_LINES:]
    )
    used = re.findall(r"NCCL INFO[^\n]*Using network (\S[^\n]*)$", output, re.MULTILINE)
    adapters = re.findall(r"NET/IB : Using ([^\n]*?)(?:; OOB[^\n]*)?$", output, re.MULTILINE)
    return {**vars(result), "backend": backend, "network": used[-1] if used else "", "adapters": adapters[-1:]}


def judge_all_reduce(results: Mapping[str, Mapping[str, Any]], fabric: Fabric) -> list[Finding]:
    errors = {host: str(row.get("error", "")) for host, row in results.items() if not row.get("ok")}
    if errors:
        host, why = next(iter(errors.items()))
        text = f"{len(errors)} of {len(results)} ranks failed; {host}: {why}"
        remedy = "The ranks of a model would fail the same way: try another --interface, or NCCL_DEBUG=INFO by hand."
        return [fatal("all-reduce", text, remedy)]
    slowest = max(results.values(), key=lambda row: float(row["large_s"]))
    through = f" over {slowest['network']}" if slowest.get("network") else ""
    text = (
        f"{slowest['backend']}{through}: {LARGE_MIB} MiB in {slowest['large_s'] * 1e3:.0f} ms "
        f"({slowest['bytes_per_s'] / 1e9:.2f} GB/s), 4 KiB in {slowest['small_s'] * 1e3:.2f} ms"
    )
    if slowest.get("network") == "Socket" and any(fabric.hcas.values()):
        remedy = "NCCL did not take the RDMA adapters: NCCL_DEBUG=INFO shows why; containers must see them."
        return [warning("all-reduce", text, remedy)]
    return [ok("all-reduce", text)]

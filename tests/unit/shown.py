"""What the screens are drawn from: a measured run, a sweep, a deployment, a batch, nodes; as long as real ones."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from corral.base.processes import Identity
from corral.client.endpoint import Endpoint
from corral.client.reply import Token
from corral.deploy.deployment.start_times import Expected
from corral.deploy.deployment.state import Reason, State
from corral.deploy.doctor.finding import Finding, Level, Report
from corral.deploy.doctor.judge import judge_facts
from corral.deploy.lifecycle.deployments import HeldJob, RankMember, Status, Timings
from corral.deploy.targets.base import JobState
from corral.lab.bench.compare import Side, compare
from corral.lab.bench.fingerprint import Fingerprint
from corral.lab.bench.gate import Problem
from corral.lab.bench.limit import Limit, TokenCost
from corral.lab.bench.metrics import RequestRow, summarise
from corral.lab.bench.server_metrics import ServerDelta
from corral.lab.bench.spec import LoadShape, Slo, Spec, Workload
from corral.lab.bench.store import Run, Series
from corral.lab.report.batch import status_lines as batch_status_lines
from corral.lab.report.batch import summary_lines
from corral.lab.report.bench import comparison_lines, run_lines, series_lines
from corral.lab.report.doctor import report_lines
from corral.lab.report.status import start_rows, status_facts, status_lines
from corral.plan.hardware.fabric import choose_fabric
from corral.plan.hardware.inventory import GIB
from corral.plan.hardware.survey import Disk, GpuFacts, GpuProcess, Interface, NodeFacts
from corral.plan.measured import Difference, Differences
from corral.use.batch.batch import BatchResult
from corral.use.batch.core.run import BatchState, RunSummary
from corral.use.batch.inspect import BatchStatus, Blocks
from corral.use.batch.jobs import QueuedState
from corral.use.llm.token_view import TokenView

FOLDER = Path("/home/mia/.local/share/corral/bench/20260916-101500-concurrency-16")
LIMIT = Limit(
    decode_share=0.61,
    prefill_share=0.44,
    compute_share=0.12,
    roof_tokens_per_s=2_310.0,
    limited_by="memory bandwidth",
    advice="--max-num-seqs 64 would likely help: the queue was never empty",
    basis="vendor's rates of H100-SXM",
)


def rows_of(seed: int, places: int = 16, count: int = 400) -> list[RequestRow]:
    """Requests as a server under a steady load answers them."""
    chance, made, clock = random.Random(seed), [], [0] * places
    for n in range(count):
        place = min(range(places), key=clock.__getitem__)
        asked = clock[place]
        first = asked + int(chance.lognormvariate(-2.3, 0.5) * 1e9)
        chunks = [first]
        for _ in range(63):
            chunks.append(chunks[-1] + int(chance.gauss(0.011, 0.001) * 1e9))
        clock[place] = chunks[-1]
        made.append(RequestRow(n, asked, asked, asked + 40_000, chunks[-1], chunks, 512, 64, 512, 64))
    return made


def run_of(seed: int, places: int = 16, problems: tuple[Problem, ...] = ()) -> tuple[Run, list[RequestRow]]:
    rows = rows_of(seed, places)
    levels = (Slo("ttft", "p99", 200.0), Slo("tpot", "p99", 50.0))
    spec = Spec(Workload(input_len=512, output_len=64), LoadShape(concurrency=places), goodput=levels)
    length_s = max(row.done_ns for row in rows) / 1e9
    found = Run(
        version=1,
        created_s=0.0,
        spec=spec,
        fingerprint=Fingerprint({"model": "meta-llama/Llama-3.1-70B-Instruct", "deployment": "llama-3.1-70b-instruct",
                                 "engine": "cuda-0.32.0"}),
        summary=summarise(rows, length_s, spec.percentiles, levels),
        verdict="invalid" if any(p.severity == "invalid" for p in problems) else "caution" if problems else "valid",
        problems=problems,
        notes=("prompts are words: the server has no /tokenize",),
        server=ServerDelta(3, 0.02, 204_800, 25_600, 400, 5, 16, 0.43, 0),
        limit=LIMIT,
        cost=TokenCost(8, 1.92, 0.21, 2.5, 4.8, 0.53),
    )  # fmt: skip
    return found, rows


FEW = Problem("few_samples", "caution", "P99 needs 500 requests for 5 beyond it; 400 were answered")
CACHED = Problem("prefix_cache", "invalid", "12% of prompt tokens came from the prefix cache, and none should have")


def bench_run(columns: int | None) -> Iterator[str]:
    return iter(run_lines(*run_of(1, problems=(FEW,)), FOLDER, columns))


def bench_series(columns: int | None) -> Iterator[str]:
    runs = [run_of(1, 1)[0], run_of(2, 4, (FEW,))[0], run_of(3, 16)[0], run_of(4, 256, (FEW, CACHED))[0]]
    series = Series(1, "sweep", 0.0, ("p01", "p02", "p03", "p04"), {"found": "the knee lies at about 16 requests"})
    return iter(series_lines(series, runs, FOLDER, columns))


def bench_compare(columns: int | None) -> Iterator[str]:
    sides = [Side((run.summary,), (tuple(rows),)) for run, rows in (run_of(1), run_of(2, 12))]
    changed = [
        ("server.engine", "cuda-0.31.1", "cuda-0.32.0"),
        ("flags", "--max-num-seqs 256 --max-num-batched-tokens 8192", "--max-num-seqs 128 --enable-chunked-prefill"),
    ]
    names = ("20260916-101500-concurrency-16", "20260917-093000-concurrency-12")
    return iter(comparison_lines(names, compare(*sides), changed, False, columns))


def node(number: int) -> NodeFacts:
    host = f"holygpu8a1{number:02d}.rc.example.edu"
    return NodeFacts(
        host,
        hostname=host,
        python="3.11.7",
        cores=96,
        memory_bytes=1510 * GIB,
        memory_available_bytes=1402 * GIB,
        interfaces=(Interface("ib0", ipv4=(f"10.31.14.{number + 1}/16",), speed_mbps=400_000),),
        default_interface="ib0",
        free_ports=(15001, 15002),
        gpus=tuple(GpuFacts(i, "NVIDIA H100 80GB HBM3", f"GPU-{i}", 80 * GIB, 0, "570.1") for i in range(4)),
        cuda_driver="12.8",
        disks={"~": Disk(900 * GIB, 800 * GIB)},
        shm=Disk(500 * GIB, 500 * GIB),
    )


def doctor(_: int | None) -> Iterator[str]:
    nodes = [node(number) for number in range(3)]
    nodes[1] = dataclasses.replace(nodes[1], gpu_processes=(GpuProcess(0, 4711, "eve", "python train.py", GIB),))
    findings = (
        *judge_facts(nodes, (8000,)),
        Finding(
            Level.FATAL, "ssh", "holygpu8a199 cannot be reached: No route to host.", "holygpu8a199",
            "Is the node up, and does `ssh holygpu8a199 true` work without a password?",
        ),
        Finding(Level.FATAL, "docker", "there is no container runtime", nodes[2].host, "Install one.",
                ("sudo apt-get install -y docker.io",)),
    )  # fmt: skip
    hosts = (*(one.host for one in nodes), "holygpu8a199")
    return report_lines(Report(hosts, findings, tuple(nodes), choose_fabric(nodes), seconds=3.2))


READY = Status(
    name="llama-3.1-405b-instruct",
    state=State.READY,
    reason=None,
    text="",
    remedy="",
    phase="ready",
    done=None,
    total=None,
    model="llama-3.1-405b-instruct",
    engine="cuda-0.32.0",
    target="slurm",
    created_s=0.0,
    since_s=0.0,
    endpoint=Endpoint("http://127.0.0.1:8000/v1", "llama", key_file="/home/mia/.corral/deployments/llama/key"),
    timings=Timings(30.0, 1260.0),
    restarts=1,
)
FAILED = dataclasses.replace(
    READY,
    state=State.FAILED,
    reason=Reason.OUT_OF_MEMORY,
    text="holygpu8a101: the GPU ran out of memory while the KV cache was made: 1.2 GiB more were asked for than free",
    remedy="Give --context 65536, or --set gpu_memory_utilization=0.88.",
    endpoint=None,
)
LOADING = dataclasses.replace(
    READY, state=State.LOADING, phase="loading weights", done=12, total=30, endpoint=None, timings=Timings(30.0),
    expected=Expected(840.0, remembered=True),
)  # fmt: skip
COMPARED = Differences(
    "H100-SXM", "0.32.0", "llama-3.1-405b", "fp8", "TP8",
    (
        Difference("weights_gib", 47.8, 47.61, 0.4),
        Difference("kv_tokens", 168_512, 171_904, -2.0),
        Difference("load_s", 412.0, 388.2, 6.1),
    ),
    0.2,
    None,
)  # fmt: skip


TOOK = {"starting": 41.0, "initialising": 95.2, "loading": 388.2, "compiling": 620.4, "warming": 140.0}
USUAL = {"compiling": Expected(61.0, remembered=True), "warming": Expected(20.0)}  # the second by the plan alone


def status(columns: int | None) -> Iterator[str]:
    now = time.time()
    for number, found in enumerate((READY, LOADING, FAILED)):
        waits = found is LOADING
        found = dataclasses.replace(found, since_s=now - 8_000, phase_since_s=now - 200)
        ranks = tuple(RankMember(rank, f"holygpu8a10{rank}", 4, rank == 0 or not waits) for rank in range(2))
        facts = status_facts(found, None, ranks, HeldJob("48211937", now + 9_000.5))
        facts += start_rows(TOOK, USUAL) if not number else []
        facts += [("followed by", "llama-3.1-405b-instruct~2 (queued)")] if not number else []
        yield from ("", *status_lines(facts, COMPARED if not number else None, columns))


RUNNING = BatchStatus(
    output="/n/holylabs/mia/runs/answers.jsonl",
    errors="/n/holylabs/mia/runs/answers.jsonl.errors.jsonl",
    state=BatchState.RUNNING,
    reason="",
    rows=1_000_000,
    fine=123_444,
    failed=12,
    model="llama-3.1-70b-instruct",
    input="/n/holylabs/mia/prompts/news-2026.jsonl.zst",
    created_s=0.0,
    holder=None,
    runners=(Identity(4711, "holygpu8a101", "", 1), Identity(811, "holygpu8a102", "", 1)),
    blocks=Blocks(4096, 245, 30, 4),
    jobs=(
        QueuedState("48211937", "b-1", JobState.QUEUED, "job 48211937 waits: Priority; expected to start in 3 h",
                    "a shorter --time starts sooner", False, True),
    ),
)  # fmt: skip


def batch_status(columns: int | None) -> Iterator[str]:
    now = time.time()
    running = dataclasses.replace(RUNNING, created_s=now - 4_000)
    left = dataclasses.replace(
        running,
        state=BatchState.STOPPED,
        jobs=(),
        runners=(),
        blocks=None,
        reason="the server stayed away",
    )
    yield from batch_status_lines(running, columns)
    yield from ("", *batch_status_lines(left, columns))


def batch_summary(columns: int | None) -> Iterator[str]:
    done = RunSummary(BatchState.DONE, 1_000_000, 240_000, 759_988, 12, 0, 4_312.0, 193_002_112, 80_113_024,
                      98_112_441, 7, 0, 0, 0, {"length": 9, "refused": 3})  # fmt: skip
    cut = dataclasses.replace(done, state=BatchState.STOPPED, fine=123_456, left=636_532, errors={})
    for summary in (done, cut):
        result = BatchResult(summary, RUNNING.output, RUNNING.errors, RUNNING.model, 8, 9.582, 23.96)
        yield from ("", *summary_lines(result, columns))


def tokens(columns: int | None) -> Iterator[str]:
    """`complete --logprobs 5`: tokens with five alternatives each."""
    words = (" San", " Francisco", " is", " an", " unbelievably", " foggy", " city", "\n", "東", ".")
    found = []
    for number, word in enumerate(words):
        top = tuple(Token(other, -0.2 - rank * 1.7, rank + 1, 100 + rank, tuple(other.encode()))
                    for rank, other in enumerate((word, *(one for one in words if one != word))[:5]))  # fmt: skip
        found.append(Token(word, -0.2 * (number + 1), 1, 30000 + number, tuple(word.encode()), top))
    return iter(TokenView(tuple(found[:2]), tuple(found[2:])).table(columns).rstrip().splitlines())


SCREENS: dict[str, Callable[[int | None], Iterator[str]]] = {
    "bench_run": bench_run,
    "bench_series": bench_series,
    "bench_compare": bench_compare,
    "doctor": doctor,
    "status": status,
    "batch_status": batch_status,
    "batch_summary": batch_summary,
    "tokens": tokens,
}

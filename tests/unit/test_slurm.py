"""SLURM without SLURM: its commands are small fakes on PATH; scripts are compared with kept ones and shellchecked."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from corral.base import shell, ssh
from corral.base.errors import CorralError, DoesNotFitError, NotFoundError, UnreachableError, UsageError
from corral.base.processes import own_identity
from corral.base.record import dump_json, load_json
from corral.base.shell import answering_soon
from corral.base.wording import time_limit_s, time_limit_text
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle import deployments, rendering
from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.slurm import cluster, commands
from corral.deploy.slurm import preflight as shared_home
from corral.deploy.slurm.commands import SlurmJob
from corral.deploy.slurm.options import SlurmOptions, mebibytes
from corral.deploy.slurm.script import BatchJob, batch_script
from corral.deploy.slurm.states import NOT_KNOWN, STATES, WAITS, job_verdict
from corral.deploy.targets import slurm_job
from corral.deploy.targets.base import JobState
from corral.deploy.targets.slurm import SlurmTarget
from corral.deploy.targets.slurm_job import Submitted
from corral.node import slurm_start
from corral.node.files import write_atomic, write_json
from corral.node.sockets import free_ports
from corral.node.states import Reason, State
from corral.plan.hardware.inventory import GPUS
from tests.fake_slurm import NODES, PARTITIONS, print_text
from tests.unit.conftest import Shellcheck
from tests.until import until

GOLDEN = Path(__file__).parent / "golden"
KEMPNER: dict[str, object] = {
    "partition": "kempner_h100",
    "account": "kempner_lab",
    "exclusive": True,
    "mem": 0,
    "gpus_per_node": 4,
    "cpus_per_task": 96,
    "time": "4:00:00",
    "modules": ["python/3.12.5-fasrc01"],
    "hardware": {"gpus": "4xH100", "link": "ib-ndr", "cpu_cores": 96, "memory_gib": 1500},
}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    commands._cache.clear()
    commands._silent.clear()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a command on PATH: a shell body; what it was called with is kept in NAME.called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        called = tmp_path / f"{name}.called"
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>"{called}"\n{body}\n')
        (programs / name).chmod(0o755)
        return called

    return make


# --------------------------------------------------------------------------------------------------------- states
def test_slurms_states_are_told_apart() -> None:
    ended = {name: job_verdict(SlurmJob("7", name)) for name in STATES if job_verdict(SlurmJob("7", name)).ended}
    reasons = {name: found.reason for name, found in ended.items()}
    assert reasons["TIMEOUT"] is Reason.WALLTIME
    assert reasons["NODE_FAIL"] is Reason.NODE_LOST
    assert reasons["OUT_OF_MEMORY"] is Reason.OUT_OF_HOST_MEMORY
    assert reasons["PREEMPTED"] is Reason.PREEMPTED
    assert reasons["CANCELLED"] is Reason.CANCELLED
    told = ["TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "CANCELLED", "BOOT_FAIL", "DEADLINE", "FAILED"]
    assert len({reasons[name] for name in told}) == len(told)
    assert all(found.text.startswith("job 7 ") and found.remedy for found in ended.values())
    assert not [found for found in ended.values() if any(token in found.text for token in ("BY", "CODE", "NODES"))]


@pytest.mark.parametrize("word", ["", "SOMETHING_OF_A_LATER_VERSION", "RUNNING|x"])
def test_a_state_nobody_knows_is_unknown(word: str) -> None:
    found = job_verdict(SlurmJob("7", word))
    assert found.state is State.UNKNOWN
    assert not found.ended


def test_waiting_is_told_with_its_reason_and_the_expected_start() -> None:
    noon = time.mktime((2026, 11, 15, 12, 0, 0, 0, 0, -1))
    found = job_verdict(SlurmJob("7", "PENDING", "Priority", start_s=noon + 3600), now_s=noon)
    assert found.text == (
        "job 7 waits in the queue: jobs of higher priority come first (Priority); expected to start at 13:00"
    )
    again = job_verdict(SlurmJob("7", "PENDING", "BeginTime", restarts=1), now_s=noon).text
    assert again.startswith("job 7, again, waits in the queue")
    odd = job_verdict(SlurmJob("7", "PENDING", "SomethingNew"), now_s=noon)
    assert odd.text == "job 7 waits in the queue: SLURM says SomethingNew"
    assert "--account" in job_verdict(SlurmJob("7", "PENDING", "InvalidAccount"), now_s=noon).remedy
    held = job_verdict(SlurmJob("7", "PENDING", "JobHeldUser"), now_s=noon)
    assert "`scontrol release 7`" in held.remedy
    for reason in WAITS:
        assert job_verdict(SlurmJob("7", "PENDING", reason), now_s=noon).state is State.QUEUED


def test_who_cancelled() -> None:
    assert "cancelled by alice" in job_verdict(SlurmJob("7", "CANCELLED", cancelled_by="alice")).text
    assert "by you or by an administrator" in job_verdict(SlurmJob("7", "CANCELLED")).text


def test_names_that_look_like_words_of_a_sentence_stay_as_they_are() -> None:
    lost = job_verdict(SlurmJob("7", "NODE_FAIL", nodes="STANDBY01,NODES02"))
    assert lost.text == "job 7 lost a node of STANDBY01,NODES02"
    failed = job_verdict(SlurmJob("7", "FAILED", exit_code="1:0"), "/home/JOB/{job}/CATALOG/job.log")
    assert failed.remedy == "Its output: `/home/JOB/{job}/CATALOG/job.log`."
    assert job_verdict(SlurmJob("7", "CANCELLED", cancelled_by="{nodes}")).text == "job 7 was cancelled by {nodes}"
    assert "{by} on BY01" in job_verdict(SlurmJob("7", "PENDING", "{by} on BY01")).text
    told = [job_verdict(SlurmJob("7", name)) for name in STATES]
    assert not any("{" in one.text + one.remedy for one in told)


# ------------------------------------------------------------------------------------------------------- commands
@pytest.mark.parametrize(
    ("text", "number"),
    [("30", 1800), ("4:00:00", 14400), ("5:30", 330), ("2-12", 216000), ("1-00:00:00", 86400), ("1-2:30", 95400),
     ("UNLIMITED", None), ("NONE", None), ("", None), ("4h", None), ("INVALID", None)],
)  # fmt: skip
def test_times(text: str, number: float | None) -> None:
    assert time_limit_s(text) == number
    if number:
        assert time_limit_s(time_limit_text(number)) == number


def test_memory() -> None:
    assert [mebibytes(text) for text in ("0", "64G", "500000", "1T", "2048K", "x")] == [
        0,
        65536,
        500000,
        1 << 20,
        2,
        None,
    ]


def test_one_call_for_all_jobs_and_not_too_often(fake: Any) -> None:
    called = fake(
        "squeue",
        print_text(
            "12|RUNNING|None|2026-11-15T18:50:03|2026-11-15T19:50:03|59:00|n[1-2]|0|0|\n"
            "13|PENDING|Resources|N/A|NONE|4:00:00||2|0|\n"
            "a line of the site's own\n"
            "14|PENDING|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
            "|N/A|N/A|1-00:00:00||0|0|"
        ),
    )
    found = commands.jobs()
    assert list(found) == ["12", "13", "14"]
    assert (found["12"].nodes, found["12"].left_s, found["12"].reason) == ("n[1-2]", 3540, "")
    assert found["12"].end_s - found["12"].start_s == 3600  # type: ignore[operator]
    assert (found["13"].restarts, found["13"].start_s) == (2, None)
    assert "down, drained" in job_verdict(found["14"]).text
    assert commands.jobs() is found
    assert len(called.read_text().splitlines()) == 1
    assert f"--user={os.getuid()} --states=all" in called.read_text()
    commands.forget_answers()
    commands.jobs()
    assert len(called.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "body",
    ["echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
     "echo 'squeue: error: Socket timed out on send/recv operation' >&2; exit 1", "sleep 60"],
)  # fmt: skip
def test_a_controller_that_does_not_answer_is_unreachable(
    fake: Any, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands.jobs, "__defaults__", (0.3, float("-inf")))
    called = fake("squeue", body)
    for _ in range(3):
        with pytest.raises(UnreachableError, match="controller"):
            commands.jobs()
    assert len(called.read_text().splitlines()) == 1  # one wait for a whole list of deployments


def test_many_deployments_read_at_once_are_one_question(fake: Any) -> None:
    called = fake("squeue", "sleep 0.2\n" + print_text("7|RUNNING|None|N/A|N/A|1:00:00|n1|0|0|"))
    for number in range(8):
        record = deployments.Record(
            f"d{number}", "l1", "m", "m", "slurm", time.time(), own_identity(), target_options={"partition": "gpu"}
        )
        folder = deployments.claim(record, lambda _: None)
        folder.rank(0).path.mkdir()
        write_atomic(folder.job, dump_json(Submitted("7", time.time(), 3600.0)))
        write_atomic(folder.rank(0).agent, dump_json(own_identity()))
    assert {one.state for one in deployments.statuses()} == {State.STARTING}
    assert len(called.read_text().splitlines()) == 1


def test_a_command_that_answers_soon_gives_a_slow_controller_less_time(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.base.shell.SOON_S", 0.0)
    fake("squeue", "sleep 60")
    with answering_soon(), pytest.raises(UnreachableError, match=r"did not answer `squeue` within 0\.2 s"):
        commands.jobs()


def test_no_slurm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CorralError, match="not a login node"):
        commands.jobs()


def test_ended_jobs_come_from_the_accounting_or_the_completion_log(fake: Any) -> None:
    fake("squeue", "exit 0")
    body = "CANCELLED by 0|0:15|n1|2026-11-15T18:50:03|2026-11-15T18:50:13"
    fake("sacct", print_text(body))
    found = commands.find_job("12")
    assert found is not None
    assert (found.state, found.cancelled_by) == ("CANCELLED", "root")
    none = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
    fake("sacct", f'case "$*" in *-c*) {print_text("NODE_FAIL|0:0|n1|Unknown|Unknown")}\n;; *) {none};; esac')
    found = commands.find_job("12")
    assert found is not None
    assert found.state == "NODE_FAIL"
    fake("sacct", none)
    assert commands.find_job("12") is None


def test_submitting_keeps_secrets_and_outer_jobs_out(fake: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x1y2z3")
    monkeypatch.setenv("OPENAI_API_KEY", "sk_x1y2z3")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    fake("sbatch", f'env >"{tmp_path}/env"; umask >>"{tmp_path}/env"; echo "Welcome to the cluster"; echo "42;test"')
    assert commands.submit(tmp_path / "job.sh") == "42"
    env = (tmp_path / "env").read_text()
    assert not [line for line in env.splitlines() if "x1y2z3" in line]
    assert "SLURM_JOB_ID" not in env
    assert "SLURM_CONF=/etc/slurm.conf" in env
    assert "SBATCH_ACCOUNT=lab" in env
    assert env.endswith("0077\n")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [("sbatch: error: invalid partition specified: nope", "--partition"),
     ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
      "--account"),
     ("sbatch: unrecognized option '--partiton=gpu'", "KEY=VALUE"), ("sbatch: error: odd", "man sbatch"),
     ("sbatch: option '--hold' doesn't allow an argument", "`--slurm hold`"),
     ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/"
      "QOS policy (job submit limit, user's size and/or time limits)", "no more jobs in the queue")],
)  # fmt: skip
def test_what_sbatch_refuses(fake: Any, tmp_path: Path, said: str, remedy: str) -> None:
    fake("sbatch", f"exec >&2\n{print_text(said)}\nexit 1")
    with pytest.raises(UsageError) as caught:
        commands.submit(tmp_path / "job.sh")
    assert said.split(": ")[-1] in caught.value.message
    assert remedy in caught.value.remedy


def test_an_interrupt_while_submitting_leaves_no_job(fake: Any, tmp_path: Path) -> None:
    fake("sbatch", "sleep 0.3; kill -ALRM $PPID; sleep 0.1; echo 42")
    called = fake("scancel", "exit 0")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            commands.submit(tmp_path / "job.sh")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert called.read_text() == "42\n"


def test_cancelling_what_is_gone_is_no_error(fake: Any) -> None:
    fake("scancel", "echo 'scancel: error: Kill job error on job id 7: Invalid job id specified' >&2; exit 1")
    commands.cancel("7")
    fake("scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
    with pytest.raises(CorralError, match="permission"):
        commands.cancel("7")


# -------------------------------------------------------------------------------------------------------- cluster
def test_what_a_cluster_has() -> None:
    found = cluster.read_cluster(PARTITIONS, NODES)
    gpu = found.partition("gpu_h100")
    shape = gpu.shapes[0]
    assert (shape.gpu, shape.gpus, shape.cpus, shape.nodes) == ("nvidia_h100_80gb_hbm3", 4, 96, 3)
    assert (shape.usable_nodes, shape.idle_nodes, shape.idle_gpus) == (2, 1, 5)
    assert (gpu.max_time_s, gpu.default_time_s, gpu.max_nodes) == (259200, 3600, 8)
    assert found.partition("cpu").accounts == ("lab", "other")
    assert found.partition("").name == "gpu_h100"  # the default has no GPUs
    assert found.partition("", gpus=False).name == "cpu"
    with pytest.raises(NotFoundError, match="no partition 'gpu'"):
        found.partition("gpu")


def test_inventories_for_the_planner() -> None:
    found = cluster.read_cluster(PARTITIONS, NODES)
    partition, _, whole = found.inventory(cluster.Want(nodes=2))
    assert (partition.name, whole.gpu, whole.gpus_per_node, whole.nodes) == ("gpu_h100", "H100-SXM", 4, 2)
    assert whole.memory_bytes_per_gpu == GPUS["H100-SXM"].memory_bytes
    _, _, half = found.inventory(cluster.Want(gpus_per_node=2))
    assert (half.cpu_cores, half.host_memory_bytes >> 20) == (48, 750000)
    _, _, none = found.inventory(cluster.Want(gpus_per_node=0, cpus_per_task=8, memory_mib=16000))
    assert (none.gpu, none.cpu_cores, none.host_available_bytes >> 20) == (None, 8, 16000)
    for want, says in (
        (cluster.Want("gpu_h100", nodes=4), "has 3 nodes with anything; 4 were requested"),
        (cluster.Want("gpu_h100", gpus_per_node=8), "no node with 8 GPUs"),
        (cluster.Want("gpu_h100", gpu="A100"), "no node with A100"),
        (cluster.Want("gpu_h100", constraint="rome"), "no node with feature rome"),
    ):
        with pytest.raises(DoesNotFitError, match=says):
            found.inventory(want)
    assert not whole.note
    assert (
        "has 2 of 3 such nodes up, and 3 were requested" in found.inventory(cluster.Want("gpu_h100", nodes=3))[2].note
    )
    with pytest.raises(UsageError, match="does not say which GPUs"):
        found.inventory(cluster.Want("odd"))
    assert found.inventory(cluster.Want("odd", gpu="A40"))[2].gpu == "A40"
    assert found.inventory(cluster.Want(gpu="A40", gpus_per_node=2))[0].name == "odd"  # the first that may have them
    assert found.inventory(cluster.Want("odd", gpu_memory_gib=24))[2].memory_bytes_per_gpu == 24 << 30


def test_one_node_is_a_number_and_nodes_that_differ_a_little_make_one_job() -> None:
    found = cluster.read_cluster(
        PARTITIONS, NODES + NODES.splitlines()[0].replace("h1 ", "h4 ").replace("1500000", "1400000")
    )
    (shape,) = found.partition("cpu").shapes
    assert json.loads(dump_json(shape))["usable_nodes"] == 1
    assert type(shape.usable_nodes) is type(shape.idle_nodes) is int
    _, taken = found.shape(cluster.Want("gpu_h100", nodes=4))
    assert (taken.nodes, taken.memory_mib) == (4, 1400000)


def test_the_user_is_believed_where_gres_has_names_of_its_own() -> None:
    named = cluster.read_cluster(PARTITIONS, NODES.replace("nvidia_h100_80gb_hbm3", "hopper"))
    assert named.inventory(cluster.Want("gpu_h100", gpu="H100"))[2].gpu == "H100-SXM"


def test_a_profiles_hardware_is_held_against_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.deploy.slurm.preflight.discover", lambda: cluster.read_cluster(PARTITIONS, NODES))
    own: dict[str, object] = {**KEMPNER, "partition": "gpu_h100"}
    fits = SlurmTarget.from_options({**own, "nodes": 2})
    assert fits.inventory().source == "profile"  # what the profile says is used, and only checked
    for request, says in (
        ({"nodes": 4}, "has 3 nodes with 4 H100-SXM, 96 CPUs; 4 were requested"),
        ({"cpus_per_task": 128}, "no node with 4 H100-SXM, 128 CPUs"),
        ({"gpus_per_node": 8}, "no node with 8 H100-SXM"),
    ):
        with pytest.raises(DoesNotFitError, match=says):
            SlurmTarget.from_options({**own, **request}).inventory()
    with pytest.raises(NotFoundError, match="no partition 'kempner_h100'"):
        SlurmTarget.from_options(KEMPNER).inventory()


def test_a_profile_needs_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> cluster.Cluster:
        raise UnreachableError("SLURM's controller does not answer.", "")

    monkeypatch.setattr("corral.deploy.slurm.preflight.discover", silent)
    assert SlurmTarget.from_options(KEMPNER).inventory().gpus_per_node == 4


# ------------------------------------------------------------------------------------------------------- options
def test_options_from_words_and_from_profiles() -> None:
    words = SlurmOptions.read({"exclusive": "true", "nodes": "2", "modules": "a,b", "mail-type": "END", "hold": True})
    assert (words.exclusive, words.nodes, words.modules) == (True, 2, ("a", "b"))
    assert words.extra == {"mail-type": "END", "hold": True}
    assert SlurmOptions.read({"hold": "true", "spread-job": "false"}).extra == {"hold": True, "spread-job": False}
    made = SlurmTarget.from_options(KEMPNER)
    assert SlurmTarget.from_options(made.options()).chosen == made.chosen  # as kept in the record
    assert json.loads(json.dumps(made.options())) == made.options()


@pytest.mark.parametrize(
    "given",
    [{"time": "soon"}, {"mem": "lots"}, {"nodes": 0}, {"nodes": "x"}, {"exclusive": "maybe"}, {"ntasks": 4},
     {"wrap": "x"}, {"partition": 'a" --wrap="x'}, {"comment": "a\nb"}, {"bad option": "x"}, {"link": "string"}],
)  # fmt: skip
def test_options_that_cannot_be(given: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SlurmOptions.read(given)


# --------------------------------------------------------------------------------------------------------- script
@pytest.mark.parametrize(
    ("model", "nodes", "tensor"), [("llama-3.1-70b", 1, 4), ("llama-3.1-405b", 4, 16)], ids=["70b", "405b"]
)
def test_kempners_documented_deployments(
    model: str, nodes: int, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_HOME", "/n/holylabs/corral")
    monkeypatch.setenv("PATH", "/nonexistent")  # a dry run from a profile asks no cluster
    request = DeployRequest(
        model=model,
        target="slurm",
        target_options={**KEMPNER, "nodes": nodes},
        fixed={"tensor": tensor, "pipeline": 1},
    )
    spec = rendering.dry_run(request)[1]
    expected = GOLDEN / f"kempner_{model.rpartition('-')[2]}.sh"
    if os.environ.get("CORRAL_GOLDEN"):
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(spec.script)
    assert spec.script == expected.read_text()
    for option in ("--gpus-per-node=4", "--cpus-per-task=96", "--mem=0", "--exclusive", "--time=4:00:00"):
        assert f"#SBATCH {option}\n" in spec.script  # as the guide has them
    assert len(spec.ranks) == nodes
    assert spec.base_url == ""
    head = " ".join(spec.ranks[0].argv)
    assert f"--tensor-parallel-size {tensor}" in head
    assert "--port @PORT@" in head
    if nodes > 1:
        assert "--nnodes 4 --node-rank 0 --master-addr @ADDRESS0@ --master-port @MASTER_PORT@" in head
        assert "--headless" in spec.ranks[3].argv
        assert spec.ranks[3].env["VLLM_HOST_IP"] == "@ADDRESS3@"


@pytest.mark.parametrize("kept", sorted(GOLDEN.glob("*.sh")), ids=lambda path: path.stem)
def test_kept_scripts_are_clean(kept: Path, shellcheck: Shellcheck) -> None:
    shellcheck(kept.read_text())


def test_as_many_nodes_as_the_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    spec = rendering.dry_run(DeployRequest(model="llama-3.1-405b", target="slurm", target_options=KEMPNER))[1]
    assert len(spec.ranks) > 1
    assert f"#SBATCH --nodes={len(spec.ranks)}\n" in spec.script


def test_gpus_need_not_be_typed(fake: Any) -> None:
    fake("scontrol", f'case "$*" in *partition*) {print_text(PARTITIONS)}\n;; *) {print_text(NODES)}\n;; esac')
    tested = fake("sbatch", "exit 0")
    spec = rendering.dry_run(DeployRequest(model="llama-3.1-70b", target="slurm", fixed={"tensor": 4}))[1]
    said = [line.removeprefix("#SBATCH --") for line in spec.script.splitlines() if line.startswith("#SBATCH")]
    for option in ("partition=gpu_h100", "nodes=1", "gpus-per-node=4", "cpus-per-task=96", "mem=0", "time=1:00:00"):
        assert option in said
    assert "--tensor-parallel-size 4" in " ".join(spec.ranks[0].argv)
    assert "--test-only" in tested.read_text()
    fake("sbatch", "echo 'sbatch: error: Invalid account or account/partition combination specified' >&2; exit 1")
    with pytest.raises(UsageError, match="Invalid account"):  # before an engine or a model is fetched
        rendering.dry_run(DeployRequest(model="llama-3.1-70b", target="slurm", target_options={"account": "x"}))
    fake("sbatch", "echo 'allocation failure: Requested reservation is invalid' >&2; exit 1")
    with pytest.raises(UsageError, match="reservation is invalid"):
        rendering.dry_run(DeployRequest(model="llama-3.1-70b", target="slurm", target_options={"reservation": "x"}))
    with pytest.raises(DoesNotFitError, match="gives a job 3 d, and 4 d were requested"):
        rendering.dry_run(DeployRequest(model="llama-3.1-70b", target="slurm", target_options={"time": "4-00:00:00"}))


HOSTILE = ["plain", "it's", "a b", 'quo"te', "$(touch x)", "back`tick", "semi;colon", "100%", "ünïcode", "-rf", "a#b"]


def hostile_script(name: str) -> str:
    folder = DeploymentFolder.of(name)
    return batch_script(
        BatchJob(name, name, str(folder.path), SlurmOptions(modules=("a b",), extra={"comment": "a b"}))
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_scripts_with_hostile_names_are_clean(name: str, shellcheck: Shellcheck) -> None:
    shellcheck(hostile_script(name))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_words(name: str) -> None:
    folder = DeploymentFolder.of(name)
    script = hostile_script(name)
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert not [line for line in options if "$(" in line or "`" in line]
    quoted = next(line for line in script.splitlines() if line.startswith("folder="))
    shown = subprocess.run(
        ["bash", "-c", f'{quoted}; printf %s "$folder"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == str(folder.path)


def test_loading_longer_than_the_job_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    options = {**KEMPNER, "nodes": 4, "time": "3:00"}
    with pytest.raises(DoesNotFitError) as caught:
        rendering.dry_run(DeployRequest(model="llama-3.1-405b", target="slurm", target_options=options))
    assert "loading takes about" in caught.value.message
    assert "the job has 3 min" in caught.value.message
    assert caught.value.details["time_s"] == 180


# ------------------------------------------------------------------------------------------------------- the target
@pytest.fixture
def deployed() -> DeploymentFolder:
    record = deployments.Record(
        "d", "l1", "m", "m", "slurm", time.time(), own_identity(), target_options={"partition": "gpu"}
    )
    folder = deployments.claim(record, lambda _: None)
    folder.rank(0).path.mkdir()
    write_atomic(folder.job, dump_json(Submitted("7", time.time(), 3600.0)))
    return folder


def queue(fake: Any, state: str, reason: str = "None", restarts: int = 0, code: str = "0") -> None:
    fake("squeue", print_text(f"7|{state}|{reason}|N/A|N/A|1:00:00|n1|{restarts}|{code}|") if state else "exit 0")
    fake("sacct", "exit 1")
    commands._cache.clear()
    commands._silent.clear()


def agent_says(folder: DeploymentFolder, state: str, reason: str = "", attempt: str = "7.0") -> None:
    rank = folder.rank(0)
    rank.agent.write_text(dump_json(own_identity()))
    rank.heartbeat.write_text("{}")
    rank.address.write_text(json.dumps({"attempt": attempt}))
    body = {"t": time.time(), "kind": "state", "rank": 0, "state": state, **({"reason": reason} if reason else {})}
    with rank.events.open("a") as file:
        file.write(json.dumps(body) + "\n")


def test_a_life_through_the_queue(fake: Any, deployed: DeploymentFolder) -> None:
    queue(fake, "PENDING", "Resources")
    assert deployments.status(deployed).state is State.QUEUED
    queue(fake, "RUNNING")
    found = deployments.status(deployed)
    assert found.state is State.STARTING
    assert "its agents are starting" in found.text
    agent_says(deployed, "ready")
    assert deployments.status(deployed).state is State.READY
    agent_says(deployed, "stopped", "requested")  # what TERM makes of it
    queue(fake, "COMPLETING")
    assert deployments.status(deployed).state is State.DRAINING
    queue(fake, "PENDING", "BeginTime", restarts=1)
    found = deployments.status(deployed)
    assert found.state is State.QUEUED
    assert found.endpoint is None
    queue(fake, "CONFIGURING", restarts=1)
    assert deployments.status(deployed).state is State.STARTING
    queue(fake, "RUNNING", restarts=1)
    assert deployments.status(deployed).state is State.STARTING  # the files are of the earlier life
    agent_says(deployed, "ready", attempt="7.1")
    assert deployments.status(deployed).state is State.READY
    queue(fake, "SIGNALING", restarts=1)
    assert deployments.status(deployed).state is State.READY


@pytest.mark.parametrize(
    ("word", "state", "reason"),
    [("CANCELLED", "stopped", "cancelled"), ("TIMEOUT", "failed", "walltime"), ("PREEMPTED", "failed", "preempted"),
     ("NODE_FAIL", "failed", "node_lost"), ("OUT_OF_MEMORY", "failed", "out_of_host_memory"),
     ("COMPLETED", "stopped", "requested")],
)  # fmt: skip
def test_what_slurm_caused_is_not_what_was_asked_for(
    fake: Any, deployed: DeploymentFolder, word: str, state: str, reason: str
) -> None:
    agent_says(deployed, "ready")
    agent_says(deployed, "stopped", "requested")
    queue(fake, word)
    found = deployments.status(deployed)
    assert (found.state, found.reason) == (state, reason)
    fake("squeue", "exit 1")  # what has ended is not asked for again
    commands._cache.clear()
    assert deployments.status(deployed).reason == reason


def test_a_remedy_keeps_the_names_in_it(fake: Any, deployed: DeploymentFolder) -> None:
    """Only Corral's own templates take the deployment's name; a path that has NAME in it is a path."""
    queue(fake, "FAILED")
    deployed.job_log.write_text("")
    moved = DeploymentFolder(deployed.path.rename(deployed.path.with_name("NAMEs")))
    record = load_json(deployments.Record, moved.record)
    write_atomic(moved.record, dump_json(replace(record, name="my model")))
    assert deployments.status(moved).remedy == f"Its output: `{moved.job_log}`."
    agent_says(moved, "failed", "stalled")
    assert deployments.status(moved).remedy.startswith("`corral logs 'my model'` shows")


def test_an_end_that_slurm_brought_waits_for_its_reason(fake: Any, deployed: DeploymentFolder) -> None:
    """The agents were told to end, by scancel or srun, and SLURM still shows the job as running."""
    agent_says(deployed, "loading")
    agent_says(deployed, "stopped", "requested")
    queue(fake, "RUNNING")
    found = deployments.status(deployed)
    assert (found.state, found.text) == (State.DRAINING, "job 7 is ending")
    queue(fake, "FAILED", "NonZeroExitCode", code="35072")
    found = deployments.status(deployed)
    assert (found.state, found.reason) == (State.FAILED, Reason.JOB_FAILED)
    assert found.text == "job 7 failed because signal 9 ended it"


def test_an_end_that_was_asked_for_stays_so(fake: Any, deployed: DeploymentFolder) -> None:
    kept = load_json(Submitted, deployed.job)
    write_atomic(deployed.job, dump_json(replace(kept, stop_asked=True)))
    agent_says(deployed, "ready")
    agent_says(deployed, "stopped", "requested")
    for word in ("RUNNING", "FAILED"):
        queue(fake, word)
        assert deployments.status(deployed).reason is Reason.REQUESTED


def test_an_agent_that_was_killed_is_named(fake: Any, deployed: DeploymentFolder) -> None:
    agent_says(deployed, "ready")
    address = deployed.rank(0).address
    address.write_text(json.dumps({**json.loads(address.read_text()), "name": "n1"}))
    (deployed.rank(0).path / ".heartbeat.json.n1.5.abcd.tmp").write_text("{")
    queue(fake, "FAILED", "NonZeroExitCode", code="35072")
    found = deployments.status(deployed)
    assert found.reason is Reason.AGENT_KILLED
    assert found.text.startswith("the agent of rank 0 on n1 disappeared without writing why")
    assert not list(deployed.path.rglob("*.tmp"))


def test_what_runs_on_a_node_that_slurm_lost_is_told_to_end(fake: Any, deployed: DeploymentFolder) -> None:
    """Its slurmd is gone, its agent may not be: it reads the shared folder."""
    agent_says(deployed, "ready")
    queue(fake, "NODE_FAIL")
    assert deployments.status(deployed).reason is Reason.NODE_LOST
    assert deployed.rank(0).stop.exists()


@pytest.mark.parametrize(("reason", "code"), [("JobLaunchFailure", "4021"), ("NonZeroExitCode", str(66 << 8))])
def test_a_job_that_finds_none_of_its_files(fake: Any, deployed: DeploymentFolder, reason: str, code: str) -> None:
    queue(fake, "FAILED", reason, code=code)
    found = deployments.status(deployed)
    assert found.reason is Reason.HOME_NOT_SHARED
    assert f"the nodes do not see {deployed.path}" in found.text
    assert "CORRAL_HOME" in found.remedy


def test_a_job_that_failed_before_its_agents_gives_its_last_words(fake: Any, deployed: DeploymentFolder) -> None:
    deployed.job_log.write_text("0: corral: no network joins all nodes of this job\n\n")
    queue(fake, "FAILED", "NonZeroExitCode", code="256")
    text = "job 7 failed with exit code 1; its last line: 0: corral: no network joins all nodes of this job"
    assert deployments.status(deployed).text == text


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [("DependencyNeverSatisfied", "scancel 7"), ("PartitionNodeLimit", "--nodes"), ("PartitionConfig", "partitions"),
     ("AssocMaxWallDurationPerJobLimit", "--time"), ("QOSMaxGRESPerJob", "gpus_per_node"),
     ("BadConstraints", "constraint"), ("QOSMaxNodePerJobLimit", "--nodes"),
     ("InvalidAccount", "--account"), ("QOSMinCpuNotSatisfied", "qos"),
     ("AssocMaxGRESPerNode", "gpus_per_node")],
)  # fmt: skip
def test_what_never_clears_ends_the_wait(fake: Any, deployed: DeploymentFolder, reason: str, remedy: str) -> None:
    queue(fake, "PENDING", reason)
    *_, found = deployments.watch(deployed)
    assert isinstance(found, deployments.Status)
    assert (found.state, found.reason) == (State.QUEUED, Reason.CANNOT_START)
    assert f"({reason})" in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize(
    "reason", ["Resources", "Priority", "Dependency", "QOSMaxJobsPerUserLimit", "AssocGrpGRES", "JobHeldUser", "None"]
)
def test_what_may_clear_is_waited_for(reason: str) -> None:
    assert job_verdict(SlurmJob("7", "PENDING", reason)).reason is None


def test_a_home_that_nodes_do_not_see_is_refused(tmp_path: Path, fake: Any) -> None:
    home = tmp_path / "corral"
    calls = tmp_path / "calls"
    fake("srun", f"echo x >>{calls}; echo corral-reached-a-node; exit 1")
    with pytest.raises(UsageError, match="the nodes do not see Corral's home"):
        shared_home.refuse_unseen(home, ["--partition=gpu"])
    fake("srun", f"echo x >>{calls}; echo 'srun: error: no node' >&2; exit 1")  # nobody could be asked
    shared_home.refuse_unseen(home, [])
    fake("srun", f"echo x >>{calls}; echo corral-reached-a-node")
    for _ in range(2):  # asked once
        shared_home.refuse_unseen(home, [])
    assert calls.read_text().count("x") == 3
    assert [path.name for path in home.iterdir()] == [shared_home.MARK]


def test_the_kind_of_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\ntmpfs {tmp_path}/o\\040k tmpfs rw 0 0\n"
    )
    (tmp_path / "o k").mkdir()
    assert shared_home._kind(tmp_path / "o k", mounts) == "tmpfs"
    assert shared_home._kind(tmp_path / "other", mounts) == "nfs4"
    assert shared_home._kind(Path("/usr"), mounts) == "ext4"


def test_a_drained_job_stays_drained_whatever_slurm_made_of_it(fake: Any, deployed: DeploymentFolder) -> None:
    agent_says(deployed, "ready")
    agent_says(deployed, "stopped", "walltime")
    queue(fake, "TIMEOUT")  # the controller was away when the job ended
    assert deployments.status(deployed).state is State.STOPPED


def test_unknown_is_never_failed(fake: Any, deployed: DeploymentFolder) -> None:
    queue(fake, "PENDING", "Priority")
    deployments.status(deployed)
    fake("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    commands._cache.clear()
    found = deployments.status(deployed)
    assert found.state is State.UNKNOWN
    assert "last seen pending" in found.text
    queue(fake, "RUNNING")
    agent_says(deployed, "ready")
    assert deployments.status(deployed).state is State.READY
    fake("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    commands._cache.clear()
    assert deployments.status(deployed).state is State.READY  # its heartbeat is fresh
    old = time.time() - 300
    os.utime(deployed.rank(0).heartbeat, (old, old))
    commands._silent.clear()
    assert deployments.status(deployed).state is State.UNKNOWN
    queue(fake, "NOVEL_STATE")
    assert deployments.status(deployed).state is State.UNKNOWN


def test_a_forgotten_job(fake: Any, deployed: DeploymentFolder) -> None:
    queue(fake, "RUNNING")
    deployments.status(deployed)
    queue(fake, "")
    found = deployments.status(deployed)
    assert (found.state, found.reason) == (State.FAILED, Reason.JOB_FORGOTTEN)
    assert "last seen running" in found.text


def test_a_kept_answer_says_nothing_of_a_job_that_is_younger(fake: Any, deployed: DeploymentFolder) -> None:
    """A successor was read as failed, and never looked at again, because the queue had been asked just before it."""
    queue(fake, "")
    assert commands.jobs() == {}
    kept = commands._cache[os.getuid()]
    queue(fake, "RUNNING")
    commands._cache[os.getuid()] = kept  # as if no time had passed
    kept.at_s = time.monotonic()
    found = commands.find_job("7")
    assert found
    assert found.state == "RUNNING"


def once(flag: Path, before: str, after: str) -> str:
    """A fake that says something else once a file is there."""
    return f'if [ -e "{flag}" ]; then {print_text(after)}\nelse {print_text(before)}\nfi'


def test_stopping_asks_the_agents_first(fake: Any, deployed: DeploymentFolder, tmp_path: Path) -> None:
    queue(fake, "RUNNING")
    agent_says(deployed, "ready")
    ended = tmp_path / "ended"
    line = "7|{}|None|N/A|N/A|1:00:00|n1|0|0|"
    body = once(ended, line.format("RUNNING"), line.format("COMPLETED"))
    fake("squeue", body)
    called = fake("scancel", f'touch "{ended}"')
    found = deployments.stop(deployed)
    assert called.read_text() == "--signal=TERM 7\n"
    assert deployed.rank(0).stop.exists()
    assert (found.state, found.reason) == (State.STOPPED, Reason.REQUESTED)


def test_stopping_without_an_answer_of_the_queue_is_seen_by_the_agents_end(
    fake: Any, deployed: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    agent_says(deployed, "ready")
    fake("squeue", silent)
    ending = json.dumps({"t": time.time(), "kind": "state", "rank": 0, "state": "stopped", "reason": "requested"})
    called = fake("scancel", f"echo '{ending}' >>'{deployed.rank(0).events}'")
    found = deployments.stop(deployed)
    assert called.read_text() == "7\n"
    assert (found.state, found.reason) == (State.STOPPED, Reason.REQUESTED)
    agent_says(deployed, "ready")
    fake("scancel", silent)
    monkeypatch.setattr(slurm_job, "UNSEEN_S", 0.0)
    with pytest.raises(UnreachableError, match="whether job 7 has ended is not known") as refused:
        deployments.stop(deployed)
    assert "Run the same `corral down` again" in refused.value.remedy


def test_stopping_what_waits_cancels_it(fake: Any, deployed: DeploymentFolder, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    line = "7|{}|None|N/A|N/A|1:00:00||0|0|"
    body = once(ended, line.format("PENDING"), line.format("CANCELLED"))
    fake("squeue", body)
    fake("sacct", "exit 1")
    called = fake("scancel", f'touch "{ended}"')
    found = deployments.stop(deployed)
    assert called.read_text() == "7\n"
    assert (found.state, found.reason) == (State.STOPPED, Reason.REQUESTED)


def test_stopping_does_not_wait_until_slurm_gives_up_a_lost_node(
    fake: Any, deployed: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents say that a node is lost; the job stays in the queue until SLURM has given the node up."""
    monkeypatch.setattr(slurm_job, "LOST_PATIENCE_S", 0.0)
    queue(fake, "RUNNING")
    agent_says(deployed, "failed", "node_lost")
    called = fake("scancel", "exit 0")
    with pytest.raises(UnreachableError, match="job 7 on n1 is cancelled, but a node does not answer"):
        deployments.stop(deployed)
    assert called.read_text() == "7\n"


def test_a_node_lost_while_it_stops_ends_the_wait(
    fake: Any, deployed: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "LOST_PATIENCE_S", 0.0)
    queue(fake, "RUNNING")
    agent_says(deployed, "ready")
    event = json.dumps({"t": time.time(), "kind": "state", "rank": 0, "state": "failed", "reason": "node_lost"})
    called = fake("scancel", f"echo '{event}' >> {deployed.rank(0).events}")
    with pytest.raises(UnreachableError, match="does not answer"):
        deployments.stop(deployed)
    assert called.read_text() == "--signal=TERM 7\n7\n"


def test_a_status_waits_less_for_the_controller_than_down_and_both_say_so(
    fake: Any, deployed: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(fake, "PENDING")
    told: list[str] = []
    waited: list[float] = []
    real = shell.run

    def slow(argv: Any, timeout_s: float, *rest: Any) -> Any:
        waited.append(timeout_s)
        until(lambda: told, "it is said for whom it waits")
        if argv[0] in ("squeue", "scancel"):
            raise UnreachableError("no answer", "")
        return real(argv, timeout_s, *rest)

    monkeypatch.setattr(commands, "run", slow)
    monkeypatch.setattr(slurm_job, "UNSEEN_S", 0.0)
    monkeypatch.setattr(ssh, "ANNOUNCE_AFTER_S", 0.0)
    token = ssh.WAITING.set(told.append)
    try:
        assert deployments.status(deployed).state is State.UNKNOWN
        with pytest.raises(UnreachableError, match="controller did not answer"):
            deployments.stop(deployed)
    finally:
        ssh.WAITING.reset(token)
    assert waited == [commands.LOOK_S, slurm_job.CANCEL_S]
    assert told[0] == "waiting for SLURM's controller (`squeue`)"


# ----------------------------------------------------------------------------------------------------- on the nodes
def rank(name: str, *candidates: tuple[str, str]) -> dict[str, Any]:
    found = [
        {"interface": i, "address": a, "network": str(ip_network(f"{a}/24", strict=False))} for i, a in candidates
    ]
    return {"attempt": "7.0", "name": name, "named": "", "candidates": found}


def test_all_ranks_on_one_network() -> None:
    ranks = [
        rank("a", ("ib0", "10.1.0.1"), ("eth0", "10.0.0.1")),
        rank("b", ("eth0", "10.0.0.2"), ("ib0", "10.1.0.2")),
    ]
    assert [one["address"] for one in slurm_start.choose_network(ranks)] == ["10.1.0.1", "10.1.0.2"]
    ranks.append(rank("c", ("eth3", "10.0.0.3")))
    assert [one["interface"] for one in slurm_start.choose_network(ranks)] == ["eth0", "eth0", "eth3"]
    with pytest.raises(SystemExit, match=r"interface ib0 joins all nodes.*c has eth3 10\.0\.0\.3"):
        slurm_start.choose_network(ranks, "ib0")
    with pytest.raises(SystemExit, match="no network joins"):
        slurm_start.choose_network([rank("a", ("eth0", "10.0.0.1")), rank("b")])


def test_the_nodes_own_interfaces_and_ports() -> None:
    for found in slurm_start.interfaces():
        assert found["interface"] != "lo"
        assert ip_address(found["address"]) in ip_network(found["network"])
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert all(15000 <= port < 32000 for port in ports)


def at(interface: str, address: str, network: str) -> dict[str, object]:
    return {"interface": interface, "address": address, "network": network}


def test_a_network_per_rack_and_addresses_that_are_the_same_everywhere() -> None:
    usb = at("usb0", "192.168.9.2", "192.168.9.0/24")  # a management port with one address on every node
    racks = [
        {
            "name": f"n{number}",
            "named": f"10.{number}.0.5",
            "candidates": [usb, at("ib0", f"10.{number}.0.5", f"r{number}")],
        }
        for number in (1, 2)
    ]
    assert [one["address"] for one in slurm_start.choose_network(racks)] == ["10.1.0.5", "10.2.0.5"]
    assert [one["address"] for one in slurm_start.choose_network(racks, "ib0")] == ["10.1.0.5", "10.2.0.5"]
    with pytest.raises(SystemExit, match="usb0"):
        slurm_start.choose_network(racks, "usb0")


def port(device: str, layer: str = "infiniband", rate: float = 400.0, netdev: str = "") -> dict[str, Any]:
    return {
        "device": device, "port": 1, "state": "active", "link_layer": layer, "rate_gbps": rate, "netdev": netdev
    }  # fmt: skip


def test_adapters_are_found_on_the_jobs_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = rank("a", ("eth0", "10.0.0.1")), rank("b", ("eth0", "10.0.0.2"))
    both = [port("mlx5_0"), port("mlx5_1"), port("mlx5_bond", rate=100.0)]
    ranks = [{**one, "rdma": both, "default": "eth0"}, {**two, "rdma": both, "default": "eth0"}]
    assert slurm_start.adapters(ranks) == {"hcas": ["mlx5_0:1,mlx5_1:1"] * 2, "sockets_only": False}
    ranks[1]["rdma"] = []
    assert slurm_start.adapters(ranks) == {"hcas": [], "sockets_only": True}
    assert "b has no active InfiniBand ports" in capsys.readouterr().out
    ranks[0]["rdma"] = []
    assert slurm_start.adapters(ranks) == {"hcas": [], "sockets_only": False}


def test_the_spec_is_filled_in(tmp_path: Path) -> None:
    template = {
        "argv": ["serve", "--port", "@PORT@", "--master-addr", "@ADDRESS0@", "user@host", "@OTHER@"],
        "env": {
            "VLLM_HOST_IP": "@ADDRESS1@",
            "NCCL_SOCKET_IFNAME": "=@INTERFACE1@",
            "GLOO_SOCKET_IFNAME": "mine",
            "NCCL_IB_HCA": "=@HCA1@",
            "NCCL_IB_DISABLE": "@NO_RDMA@",
        },
        "serve": {"host": "0.0.0.0", "port": 0, "model": "m", "key_file": "/k"},
        "gang": {"names": ["rank0", "rank1"], "head": "@ADDRESS0@", "port": 0, "token_file": "/t"},
    }
    meeting = {
        "names": ["n1", "n2"], "addresses": ["10.0.0.1", "10.0.0.2"], "interfaces": ["eth0", "eth1"],
        "ports": {"serve": 1, "master": 2, "gang": 3}, "sockets_only": False,
        "hcas": ["mlx5_0:1", "mlx5_0:1,mlx5_1:1"],
    }  # fmt: skip
    spec = slurm_start.complete(template, meeting)
    assert spec["argv"] == ["serve", "--port", "1", "--master-addr", "10.0.0.1", "user@host", "@OTHER@"]
    assert spec["env"]["VLLM_HOST_IP"] == "10.0.0.2"
    assert spec["env"]["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert spec["env"]["GLOO_SOCKET_IFNAME"] == "mine"
    assert spec["env"]["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert "NCCL_IB_DISABLE" not in spec["env"]
    bare = slurm_start.complete(template, {**meeting, "hcas": [], "sockets_only": True})
    assert "NCCL_IB_HCA" not in bare["env"]  # nothing was found: NCCL chooses
    assert bare["env"]["NCCL_IB_DISABLE"] == "1"
    assert spec["gang"] == {
        "names": ["n1", "n2"], "head": "10.0.0.1", "port": 3, "token_file": "/t"
    }  # fmt: skip
    own = {"named": "10.0.0.1", "candidates": [{"address": "10.1.0.1"}, {"address": "10.0.0.1"}]}
    assert slurm_start.endpoint(spec, own)["base_url"] == "http://10.0.0.1:1/v1"


def test_an_earlier_life_is_set_aside(tmp_path: Path) -> None:
    for name in ("events.jsonl", "stop", "drain", "template.json"):
        (tmp_path / name).write_text("old")
    slurm_start.set_aside(str(tmp_path), "7.0")
    assert (tmp_path / "events.jsonl").exists()  # nothing ran here yet
    write_json(str(tmp_path / "address.json"), {"attempt": "7.0"})
    slurm_start.set_aside(str(tmp_path), "7.1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt-7.0", "template.json"]
    assert (tmp_path / "attempt-7.0" / "stop").exists()


def test_what_the_nodes_write_is_private(tmp_path: Path) -> None:
    write_json(str(tmp_path / "spec.json"), {})
    assert stat.S_IMODE((tmp_path / "spec.json").stat().st_mode) == 0o600


EVIL = "x\n#SBATCH --uid=0\ntouch /tmp/owned"


def job_with(name: str, value: Any) -> BatchJob:
    job = BatchJob("d", "t", "/f", SlurmOptions(nodes=1))
    return (
        replace(job, **{name: value})
        if hasattr(job, name)
        else replace(job, options=replace(job.options, **{name: value}))
    )


@pytest.mark.parametrize(
    "name", ["partition", "account", "mem", "output", "error", "constraint", "job_name", "folder"]
)
def test_a_newline_in_a_value_is_no_line_of_the_script(name: str) -> None:
    """Also in values that no option was read from: what SLURM says of a partition, the path of Corral's home."""
    with pytest.raises(UsageError, match="one line"):
        batch_script(job_with(name, EVIL))


@pytest.mark.parametrize("name", ["title", "deployment", "python", "modules"])
def test_a_newline_elsewhere_stays_where_it_is(name: str, shellcheck: Shellcheck) -> None:
    value = (EVIL,) if name == "modules" else EVIL
    text = batch_script(job_with(name, value))
    done = subprocess.run(
        ["bash", "-nv"], input=text, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 0
    outside = text.replace(EVIL, "")
    assert "touch /tmp/owned" not in [line.strip() for line in outside.splitlines()]
    assert not any(line.startswith("#SBATCH --uid") for line in outside.splitlines())


@pytest.mark.parametrize("name", ["partition", "mem", "python", "modules", "home", "comment"])
def test_options_with_a_newline_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        SlurmOptions.read({name: EVIL})


def test_every_state_of_slurm_is_a_state_of_a_job() -> None:
    assert {JobState(row[0]) for row in [*STATES.values(), NOT_KNOWN]} == {*JobState} - {JobState.RUNNING}

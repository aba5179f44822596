"""Batches as jobs of a real SLURM: time limits, a cancelled job, a lost node, several jobs; the engine is a fake.

The batch that must run into its time limit is started first and looked at last, so that nobody waits for it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import corral as package
from tests.stand_in import install_stand_in
from tests.testbed import missing
from tests.testbed.hosts import Hosts, wait_for
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))

ENGINE = Path(__file__).parent.parent / "fake_engine.py"
SOURCE = Path(package.__file__).parent.parent
SMALL = ("--partition", "gpu", "--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=2", "--slurm", "mem=4G")
ROWS = 3000


@dataclass
class Login:
    """The login host, as its user has it."""

    hosts: Hosts
    slurm: Slurm
    folder: Path
    model: Path

    def env(self, rate: int) -> dict[str, str]:
        return {"CORRAL_HOME": str(self.folder / "corral"), "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1",
                "FAKE_RATE": str(rate), "XDG_CONFIG_HOME": str(self.folder / "config")}  # fmt: skip

    def corral(self, *arguments: str, rate: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        return self.hosts.exec("login", command, env=self.env(rate), check=False, timeout=240)

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "corral", *arguments]
        return self.hosts.popen("login", command, env={**self.env(0), **env})

    def rows(self, name: str, count: int = ROWS) -> tuple[str, Path]:
        path = self.folder / f"{name}.in.jsonl"
        path.write_text("".join(json.dumps({"id": n, "prompt": f"Row {n}"}) + "\n" for n in range(count)))
        return str(path), self.folder / f"{name}.jsonl"

    def batch(self, name: str, *arguments: str, rate: int, time_limit: str = "10:00", count: int = ROWS) -> Path:
        given, output = self.rows(name, count)
        for left in self.folder.glob(f"{output.name}*"):  # of a first try of the same test
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        words = ["batch", given, "-o", str(output), "--start", str(self.model), *SMALL, "--time", time_limit]
        done = self.corral(*words, "--concurrency", "32", *arguments, rate=rate)
        assert done.returncode == 0, done.stderr
        assert "queued: job" in done.stderr
        return output

    def status(self, output: Path) -> Any:
        done = self.corral("batch", "status", str(output), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait(self, output: Path, good: Callable[[Any], bool], timeout_s: float = 120) -> Any:
        found: list[Any] = [None]

        def look() -> bool:
            found[0] = self.status(output)
            return good(found[0])

        try:
            wait_for(look, timeout_s, output.name)
        except TimeoutError:
            logs = [
                path.read_text()[-2000:] for path in self.folder.glob(f"corral/deployments/*{output.stem}*/job.log")
            ]
            raise AssertionError(f"{output.name} stands at {found[0]}: {logs}") from None
        return found[0]

    def complete(self, output: Path, count: int = ROWS) -> None:
        """Every row once."""
        ids = [json.loads(line)["id"] for line in output.read_text().splitlines()]
        assert len(ids) == count
        assert sorted(ids) == list(range(count))

    def over(self, id: str) -> bool:
        return self.slurm.run("squeue", "-h", "-j", id, check=False).stdout == ""

    def exit_code(self, id: str) -> str:
        found = self.slurm.run("scontrol", "show", "job", id).stdout
        return next(word.partition("=")[2] for word in found.split() if word.startswith("ExitCode="))


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    folder = tmp_path_factory.mktemp("batch")
    folder.parent.chmod(0o755)
    with Hosts(folder / "hosts", ("login", "n1", "n2", "n3"), shared=[folder]) as hosts, Slurm(hosts) as slurm:
        install_stand_in(folder / "corral", ENGINE, source=SOURCE)
        found = Login(hosts, slurm, folder, make_tiny_llama(folder / "tiny"))
        # loading is planned with 30 s: one minute leaves room for this signal
        found.batch("limit", "--slurm", "signal_s=25", "--slurm", "nodelist=n1", time_limit="1:00", rate=40)
        yield found
        for output in folder.glob("*.jsonl.corral"):
            found.corral("batch", "cancel", str(output.with_suffix("")))
        found.corral("down", "--all")


def test_what_cannot_work_is_refused_before_it_is_queued(login: Login) -> None:
    given, output = login.rows("refused", 10)
    words = ["batch", given, "-o", str(output), "--start", str(login.model), *SMALL]
    done = login.corral(*words, "--time", "0:30")
    assert done.returncode == 5
    assert "it would end before it answers" in done.stderr
    Path(given).write_text('{"prompt": 5}\n')
    done = login.corral(*words, "--time", "10:00")
    assert done.returncode == 10, done.stderr
    assert not Path(f"{output}.corral").exists()


def test_two_jobs_share_a_batch_and_end_themselves(login: Login) -> None:
    output = login.batch("pair", "--jobs", "2", "--slurm", "exclude=n1", rate=20, count=1200)
    now = login.wait(output, lambda now: len(now["runners"]) == 2 and now["fine"] > 0)
    assert [job["state"] for job in now["jobs"]] == ["running", "running"]
    again = login.corral("batch", "resume", str(output), "--jobs", "2")
    assert again.returncode == 4
    assert "runs on" in again.stderr
    login.wait(output, lambda now: now["state"] == "done")
    login.complete(output, 1200)
    ids = [job["id"] for job in now["jobs"]]
    wait_for(lambda: all(login.over(id) for id in ids), 60, "the jobs' end")
    assert [login.exit_code(id) for id in ids] == ["0:0", "0:0"]
    assert "already complete" in login.corral("batch", "resume", str(output)).stderr


def test_a_profile_says_where_and_one_may_wait(login: Login) -> None:
    profile = login.folder / "config" / "corral" / "profiles" / "small.toml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    table = 'partition = "gpu"\ngpus_per_node = 0\ncpus_per_task = 2\nmem = "4G"\ntime = "10:00"\n'
    profile.write_text(f'target = "slurm"\n[slurm]\n{table}[defaults]\nmodel = "{login.model}"\n')
    given, output = login.rows("profile", 200)
    done = login.corral("batch", given, "-o", str(output), "--on", "small", "--slurm", "exclude=n1", "--wait")
    assert done.returncode == 0, done.stderr
    login.complete(output, 200)
    record = json.loads(Path(f"{output}.corral/job.json").read_text())
    assert record["start_model"]["more"]["target_options"]["exclude"] == "n1"


def test_over_ssh_the_model_runs_there_and_the_batch_here(login: Login) -> None:
    given, output = login.rows("ssh", 200)
    env = {**os.environ, "CORRAL_HOME": str(login.folder / "corral"), "HOME": str(login.folder), "FAKE_RATE": "0",
           "PYTHONPATH": str(SOURCE), "CORRAL_SSH": " ".join(login.hosts.ssh_command)}  # fmt: skip
    words = ["batch", given, "-o", str(output), "--start", str(login.model), "--hosts", "n2"]
    command = [sys.executable, "-m", "corral", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    login.complete(output, 200)
    assert not [line for _, line in login.hosts.processes("n2") if "fake_engine" in line and "batch-ssh" in line]


def test_a_cancelled_job_says_how_to_go_on(login: Login) -> None:
    output = login.batch("cancelled", "--slurm", "nodelist=n2", rate=8)  # on a busy machine 30 was over too soon
    now = login.wait(output, lambda now: now["fine"] > 50)
    login.slurm.run("scancel", now["jobs"][0]["id"])
    now = login.wait(output, lambda now: now["jobs"][0]["ended"] and not now["runners"])
    assert now["state"] in ("stopped", "interrupted", "failed")
    assert "was cancelled" in now["reason"]
    kept = now["fine"]
    shown = login.corral("batch", "status", str(output)).stdout
    assert f"continue  corral batch resume {output}" in shown
    done = login.corral("batch", "resume", str(output), "--wait", rate=2000)
    assert done.returncode == 0, done.stderr
    assert kept > 50
    login.complete(output)


def test_a_killed_runner_is_told_as_such(login: Login) -> None:
    output = login.batch("shot", "--slurm", "exclude=n1", rate=20)
    now = login.wait(output, lambda now: bool(now["runners"]) and now["fine"] > 0)
    found = [
        pid for node in login.slurm.nodes for pid, line in login.hosts.processes(node) if f"in-job {output}" in line
    ]
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    now = login.wait(output, lambda now: now["jobs"][-1]["ended"])
    assert now["jobs"][-1]["reason"] == "job_failed"
    assert "because signal 9 ended it" in now["jobs"][-1]["text"]
    told = json.loads(login.corral("status", now["jobs"][-1]["deployment"], "--json").stdout)
    assert (told["state"], told["reason"]) == ("failed", "job_failed")


def test_a_lost_node_costs_nothing_but_time(login: Login) -> None:
    output = login.batch("lost", "--slurm", "exclude=n1", rate=100)
    now = login.wait(output, lambda now: now["fine"] > 100)
    node = now["jobs"][0]["text"].rpartition(" ")[2]
    login.hosts.power_off(node)
    try:
        now = login.wait(output, lambda now: now["state"] == "done", 200)
    finally:
        login.slurm.restart_node(node)
    assert len(now["jobs"]) == 1  # SLURM put it back by itself
    login.complete(output)


def test_the_time_limit_in_the_middle_is_passed_over_to_the_next_job(login: Login) -> None:
    output = login.folder / "limit.jsonl"
    now = login.wait(output, lambda now: now["state"] == "done", 240)
    assert len(now["jobs"]) >= 2
    login.complete(output)
    log = next(login.folder.glob("corral/deployments/batch-limit*/job.log")).read_text()
    assert "goes on when this one is over (2 of at most 10)" in log
    assert "SIGUSR1: finishing what is under way" in log
    for job in now["jobs"]:
        assert login.exit_code(job["id"]) == "0:0"


def test_trials_of_a_tuning_run_are_jobs_side_by_side(login: Login) -> None:
    words = ["tune", str(login.model), *SMALL, "--time", "10:00", "--side-by-side", "2", "--budget", "60s", "--name",
             "beside", "--measure", "1s", "--input-len", "16", "--output-len", "8", "--concurrency", "4"]  # fmt: skip
    done = login.corral(*words, "--json")
    assert done.returncode in (0, 1), done.stderr  # 1: a budget so small decides little
    trials = json.loads(done.stdout)["trials"]
    assert sum(one["score"] is not None for one in trials) >= 2, trials
    jobs = {
        json.loads((login.folder / "corral" / "deployments" / name / "job.json").read_text())["id"]
        for name in ("tune-beside", "tune-beside+2")
    }
    assert len(jobs) == 2
    # what ran at once takes less of the run's time than of its own
    assert sum(one["spent_s"] for one in trials) < sum(one["took_s"] for one in trials)
    assert all(login.over(job) for job in jobs)

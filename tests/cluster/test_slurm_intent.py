"""Jobs without a record, with a real controller: `up` is killed before sbatch answers; a hand-over on a full disk.

The home is a file system of its own, so that it can be full; results are written elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator

import pytest

from corral.deploy.slurm.commands import launch_in
from tests.cluster.test_slurm_batch import ENGINE, SMALL, SOURCE, Login
from tests.stand_in import install_stand_in
from tests.testbed import missing
from tests.testbed.disk import small_disk
from tests.testbed.hosts import Hosts, wait_for
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))

HOME_BYTES = 64 << 20
# submits, and keeps the answer to itself for as long as the one who asked is there
SLOW_SBATCH = """\
#!/bin/sh
case "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac
/usr/bin/sbatch "$@" >"{folder}/answer"
touch "{folder}/submitted"
while kill -0 "$PPID"; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    folder = tmp_path_factory.mktemp("intent")
    folder.parent.chmod(0o755)
    home = folder / "corral"
    with (
        small_disk(home, HOME_BYTES, 0o700),
        Hosts(folder / "hosts", ("login", "n1"), shared=[folder, home]) as hosts,
        Slurm(hosts) as slurm,
    ):
        install_stand_in(home, ENGINE, source=SOURCE)
        found = Login(hosts, slurm, folder, make_tiny_llama(folder / "tiny"))
        yield found
        found.corral("down", "--all")


def names(login: Login) -> dict[str, str]:
    """The names of the jobs in the queue."""
    lines = login.slurm.run("squeue", "-h", "-o", "%i %j").stdout.splitlines()
    return dict(line.split() for line in lines)


def up_killed(login: Login, name: str) -> str:
    """Kill `up` when its job is submitted and sbatch has not answered; the job's number."""
    place = login.folder / f"bin-{name}"
    place.mkdir()
    sbatch = place / "sbatch"
    sbatch.write_text(SLOW_SBATCH.format(folder=place))
    sbatch.chmod(0o755)
    path = f"{place}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    up = login.start("up", str(login.model), "--name", name, *SMALL, "--time", "10:00", PATH=path)
    try:
        wait_for((place / "submitted").exists, 60, "a job")
        for pid, line in login.hosts.processes("login"):
            if f"corral up {login.model} --name {name}" in line:
                os.kill(pid, signal.SIGKILL)
    finally:
        up.kill()
        up.wait()
    return (place / "answer").read_text().strip()


def test_the_job_of_a_killed_up_is_adopted_and_ended(login: Login) -> None:
    id = up_killed(login, "killed")
    folder = login.folder / "corral" / "deployments" / "killed"
    assert not (folder / "job.json").exists()
    record = json.loads((folder / "deployment.json").read_text())
    assert launch_in(names(login)[id]) == record["launch_id"]
    login.slurm.stop_controller()
    silent = login.corral("down", "killed")
    assert silent.returncode == 9, silent.stdout
    assert "not running" not in silent.stdout
    assert json.loads(login.corral("status", "killed", "--json").stdout)["state"] == "unknown"
    login.slurm.start_controller()
    waited = login.corral("wait", "killed")
    assert waited.returncode == 0, waited.stderr
    assert json.loads((folder / "job.json").read_text())["id"] == id
    done = login.corral("down", "killed")
    assert done.stdout == f"killed: stopped; job {id} had no record: found by its launch id\n"
    assert login.over(id)


def test_down_right_after_the_kill_ends_the_job(login: Login) -> None:
    id = up_killed(login, "ended")
    done = login.corral("down", "ended")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ended: stopped; job")
    wait_for(lambda: login.over(id), 30, "its end")


def test_a_hand_over_on_a_full_disk_loses_no_job(login: Login) -> None:
    output = login.batch("full", rate=20, count=600)
    now = login.wait(output, lambda now: bool(now["runners"]) and now["fine"] > 20)
    (first,) = (job["id"] for job in now["jobs"])
    filler = login.folder / "corral" / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    try:
        login.slurm.run("scancel", "--batch", "--signal=USR1", first)  # as at its time limit
        wait_for(lambda: len(names(login)) == 2, 60, "the next job")
        (second,) = names(login).keys() - {first}
    finally:
        filler.unlink()
    name = now["jobs"][0]["deployment"]
    told = json.loads((login.folder / "corral" / "deployments" / name / "job.json").read_text())
    assert told["id"] == first  # nobody could write down the other
    shown = json.loads(login.corral("status", name, "--json").stdout)
    assert shown["job"]["id"] == second, shown
    now = login.wait(output, lambda now: now["state"] == "done")
    assert [job["id"] for job in now["jobs"]] == [first, second]
    login.complete(output, 600)

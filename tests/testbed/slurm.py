"""SLURM on hosts: the controller on the first (the login host), one slurmd with an address of its own on each other.

Debian's SLURM, set to react in seconds: a lost node shows after `SlurmdTimeout` plus some 20 s, a requeue takes 6 s,
time limits are checked coarsely (a 1-minute limit ends after about 84 s). Each node claims 32 cores, 500 GB and four
H100, whose device files are copies of /dev/null. Every host has the configuration at `/etc/slurm` and a munged of its
own, so commands need no environment, through ssh neither.

With `accounting`, a private MariaDB and slurmdbd run on the login host, with the account `proj1` for root and all
users of the hosts; without it, `sacct` fails, as it does on many a small cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

from tests.testbed.hosts import Hosts, wait_for

DAEMONS = {"munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd"}
GPUS = 4


class Slurm:
    """A SLURM cluster on hosts that are up; a context manager."""

    def __init__(
        self,
        hosts: Hosts,
        *,
        accounting: bool = False,
        proctrack: str = "proctrack/linuxproc",
        settings: dict[str, str] | None = None,
    ) -> None:
        self.hosts = hosts
        self.login, *self.nodes = hosts.names
        self.folder = hosts.folder / "slurm"
        self.accounting = accounting
        self.proctrack = proctrack
        self.settings = settings or {}

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def env(self) -> dict[str, str]:
        """What commands on a host would need, were the configuration not where SLURM looks anyway."""
        return {"SLURM_CONF": "/etc/slurm/slurm.conf"}

    def run(self, *argv: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command on the login host."""
        return self.hosts.exec(self.login, argv, check=check, **options)

    def up(self) -> None:
        self._write_files()
        self.hosts.ignored |= DAEMONS
        try:
            for host in self.hosts.names:
                self._prepare(host)
            if self.accounting:
                self._start_accounting()
            self.start_controller()
            for node in self.nodes:
                self.hosts.exec(node, ["slurmd"])
            self.wait_idle()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Jobs and daemons go; the hosts stay."""
        stopped = ("scancel", "--user=root", *(f"--user={user}" for user in self.hosts.users))
        for argument in stopped[1:]:
            if self.hosts.pid(self.login):
                self.run("timeout", "3", stopped[0], argument, check=False)
        for host in self.hosts.names:
            if self.hosts.pid(host):
                steps = r"^(slurm.*|munged|mariadbd)$"
                self.hosts.exec(host, ["pkill", "-KILL", steps], check=False)  # this host's pid namespace alone
                self.hosts.exec(host, ["umount", "/etc/slurm"], check=False)

    def start_controller(self) -> None:
        self.run("slurmctld")
        wait_for(lambda: self.run("timeout", "2", "scontrol", "ping", check=False).returncode == 0, 20, "slurmctld")

    def stop_controller(self, *, saved: bool = True) -> None:
        """The controller goes; clients then hang. Unless `saved`, what it knew of the last seconds goes with it."""
        self.run("pkill", "-TERM" if saved else "-KILL", "-x", "slurmctld")
        wait_for(lambda: bool(self.run("pgrep", "-x", "slurmctld", check=False).returncode), 20, "slurmctld to end")

    def restart_node(self, host: str) -> None:
        """Boot the node when it is off, and start its daemons.

        One that was lost while a job was ending stays "completing" for up to two minutes, as with a real one.
        """
        if self.hosts.pid(host):
            self.hosts.exec(host, ["pkill", "-KILL", "-x", "slurmd"], check=False)
        else:
            self.hosts.power_on(host)
            self._prepare(host)
        self.hosts.exec(host, ["slurmd", "-b"])

    def wait_idle(self, timeout_s: float = 30) -> None:
        """Until every node is idle."""

        def all_idle() -> bool:
            done = self.run("timeout", "3", "sinfo", "-hN", "-p", "gpu", "-t", "idle", "-o", "%N %T", check=False)
            return sorted(done.stdout.split()) == sorted([*self.nodes, *["idle"] * len(self.nodes)])

        try:
            wait_for(all_idle, timeout_s, "idle nodes")
        except TimeoutError as error:
            told = [self.run("timeout", "3", *ask, check=False).stdout for ask in (["sinfo", "-R"], ["sinfo", "-Nl"])]
            raise TimeoutError("\n".join([str(error), *told])) from None

    def _write_files(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("etc", "state", "log", "dev", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for number in range(GPUS):
            os.mknod(self.folder / f"dev/nvidia{number}", 0o020666, os.makedev(1, 3))
        etc = self.folder / "etc"
        (etc / "slurm.conf").write_text(self._configuration())
        nodes = ",".join(self.nodes)
        devices = f"{self.folder}/dev/nvidia[0-{GPUS - 1}]"
        (etc / "gres.conf").write_text(f"NodeName={nodes} Name=gpu Type=h100 File={devices}\n")
        # named, for slurmd dies where it has to find out and no cgroup file system is mounted
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")

    def _configuration(self) -> str:
        place = self.folder
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{self.login}({self.hosts.address(self.login)})",
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": "socket=/run/munge/munge.socket.2,cred_expire=5",
            "CredType": "cred/munge",
            "ProctrackType": self.proctrack,
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "JobCompType": "jobcomp/filetxt",
            "JobCompLoc": f"{place}/log/jobcomp.txt",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=2,bf_interval=2,sched_min_interval=0",
            "SlurmdParameters": "config_overrides",
            "GresTypes": "gpu",
            "MpiDefault": "none",
            "ReturnToService": "2",
            "KillWait": "2",
            "SlurmdTimeout": "6",
            "MinJobAge": "3600",  # tests ask for jobs that ended long before, on a busy machine
            "SlurmctldTimeout": "10",
            "PropagateResourceLimits": "NONE",
            "TreeWidth": "64",
            "StateSaveLocation": f"{place}/state",
            "SlurmdSpoolDir": f"{place}/spool/%n",
            "SlurmctldPidFile": "/run/slurmctld.pid",
            "SlurmdPidFile": "/run/slurmd.pid",
            "SlurmctldLogFile": f"{place}/log/slurmctld.log",
            "SlurmdLogFile": f"{place}/log/slurmd.%n.log",
            "SlurmctldDebug": "verbose",
            "SlurmdDebug": "verbose",
        }
        if self.accounting:
            settings |= {
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageHost": self.hosts.address(self.login),
                "AccountingStoragePass": "/run/munge/munge.socket.2",
                "AccountingStorageEnforce": "associations,limits,qos",
                "AccountingStorageTRES": "gres/gpu,gres/gpu:h100",
            }
        settings |= self.settings
        gres = f"gpu:h100:{GPUS}"
        shape = f"Sockets=2 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=500000 Gres={gres} State=UNKNOWN"
        lines = [*(f"{name}={value}" for name, value in settings.items()), f"NodeName=DEFAULT {shape}"]
        lines += [f"NodeName={node} NodeAddr={self.hosts.address(node)}" for node in self.nodes]
        nodes = ",".join(self.nodes)
        lines += [
            f"PartitionName=gpu Nodes={nodes} Default=YES MaxTime=INFINITE DefMemPerCPU=1000",
            f"PartitionName=debug Nodes={nodes} MaxTime=00:05:00 DefMemPerCPU=1000",
        ]
        return "\n".join(lines) + "\n"

    def _prepare(self, host: str) -> None:
        """What every host of the cluster has: the configuration and a munged."""
        self.hosts.bind(host, self.folder / "etc", "/etc/slurm")
        self.hosts.exec(host, ["mkdir", "-p", "/run/munge"])
        log = self.folder / "log" / f"munged.{host}.log"
        key = f"--key-file={self.folder}/munge.key"
        self.hosts.exec(
            host,
            ["munged", "--force", key, f"--log-file={log}", "--seed-file=/run/munge/seed", "--num-threads=2"],
        )

    def _start_accounting(self) -> None:
        data, sock, log = self.folder / "mysql", "/run/mysql.sock", self.folder / "log"
        common = ["--no-defaults", "--user=root", f"--datadir={data}"]
        self.run(
            "mariadb-install-db", *common, "--auth-root-authentication-method=normal", "--skip-test-db", timeout=120
        )
        tuning = ["--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0", "--skip-networking"]
        with (log / "mariadbd.log").open("wb") as out:
            self.hosts.popen(
                self.login,
                ["setsid", "--fork", "mariadbd", *common, f"--socket={sock}", *tuning, "--pid-file=/run/mariadbd.pid",
                 "--innodb-lock-wait-timeout=900"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            ).wait()  # fmt: skip
        create = ["mariadb", "--no-defaults", "-uroot", f"-S{sock}", "-e", "create database slurm_acct_db"]
        wait_for(lambda: self.run(*create, check=False).returncode == 0, 30, "MariaDB")
        _write_private(self.folder / "etc" / "slurmdbd.conf", self._accounting_configuration())
        self.run("slurmdbd", env={**os.environ, "MYSQL_UNIX_PORT": sock})
        ask = ["timeout", "3", "sacctmgr", "-n", "-i", "show", "cluster"]
        wait_for(lambda: self.run(*ask, check=False).returncode == 0, 30, "slurmdbd")
        self.run("sacctmgr", "-i", "-Q", "add", "cluster", "test")
        self.run("sacctmgr", "-i", "-Q", "add", "account", "proj1", "Cluster=test")
        for user in ("root", *self.hosts.users):
            self.run("sacctmgr", "-i", "-Q", "add", "user", user, "Account=proj1", "DefaultAccount=proj1")

    def _accounting_configuration(self) -> str:
        settings = {
            "AuthType": "auth/munge",
            "AuthInfo": "socket=/run/munge/munge.socket.2",
            "DbdHost": self.login,
            "DbdAddr": self.hosts.address(self.login),
            "SlurmUser": "root",
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "localhost",
            "StorageUser": "root",
            "StorageLoc": "slurm_acct_db",
            "LogFile": f"{self.folder}/log/slurmdbd.log",
            "PidFile": "/run/slurmdbd.pid",
        }
        return "".join(f"{name}={value}\n" for name, value in settings.items())


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)

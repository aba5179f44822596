"""SLURM without SLURM: what a small cluster's `scontrol` prints, and commands with a queue of their own."""

from __future__ import annotations

from pathlib import Path

from corral.deploy.slurm import commands

__all__ = ["NODES", "PARTITIONS", "FakeSlurm", "print_text"]

PARTITIONS = """\
PartitionName=gpu_h100 AllowGroups=ALL AllowAccounts=ALL Default=NO DefaultTime=01:00:00 MaxNodes=8 MaxTime=3-00:00:00 Nodes=h[1-3] State=UP
PartitionName=cpu AllowGroups=ALL AllowAccounts=lab,other Default=YES DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=c1 State=UP
PartitionName=odd AllowGroups=ALL AllowAccounts=ALL Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=o1 State=UP
"""  # noqa: E501
NODES = """\
NodeName=h1 Arch=x86_64 CoresPerSocket=48  CPUAlloc=0 CPUTot=96 ActiveFeatures=h100,ib Gres=gpu:nvidia_h100_80gb_hbm3:4(S:0-1) GresUsed=gpu:nvidia_h100_80gb_hbm3:0(IDX:N/A) OS=Linux 5.14 #1 SMP  RealMemory=1500000 State=IDLE Partitions=gpu_h100
NodeName=h2 CPUAlloc=8 CPUTot=96 ActiveFeatures=h100,ib Gres=gpu:nvidia_h100_80gb_hbm3:4(S:0-1) GresUsed=gpu:nvidia_h100_80gb_hbm3:3(IDX:0-2) RealMemory=1500000 State=MIXED Partitions=gpu_h100
NodeName=h3 CPUAlloc=0 CPUTot=96 ActiveFeatures=h100,ib Gres=gpu:nvidia_h100_80gb_hbm3:4(S:0-1) GresUsed=gpu:0 RealMemory=1500000 State=IDLE+DRAIN Partitions=gpu_h100 Reason=bad fan = loud [root@2026-11-01T00:00:00]
NodeName=c1 CPUAlloc=0 CPUTot=64 ActiveFeatures=(null) Gres=(null) RealMemory=256000 State=IDLE Partitions=cpu
NodeName=o1 CPUAlloc=0 CPUTot=16 ActiveFeatures=(null) Gres=gpu:2,shard:8 RealMemory=64000 State=IDLE Partitions=odd
"""  # noqa: E501


def print_text(text: str) -> str:
    return f"cat <<'END'\n{text}\nEND"


class FakeSlurm:
    """SLURM's commands as scripts, with a file `ID` for each job that has its state and name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        for one in (self.bin, folder / "queue", folder / "ended"):
            one.mkdir(parents=True)
        silent = f'[ -e "{folder}/silent" ] && {{ echo "$0: Unable to contact slurm controller" >&2; exit 1; }}'
        self._command("sbatch.real", _SBATCH)
        self._command("sbatch", 'exec "$0.real" "$@"')
        self._command("squeue", f"{silent}\n{_SQUEUE}")
        self._command("scancel", f"{silent}\n{_SCANCEL}")
        self._command("sacct", _SACCT)
        shown = f'case "$*" in *partition*) {print_text(PARTITIONS)}\n;; *) {print_text(NODES)}\n;; esac'
        self._command("scontrol", shown)

    def _command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\ncd "{self.folder}"\necho "{name} $*" >>called\n{body}\n')
        path.chmod(0o755)

    def sbatch(self, body: str) -> None:
        """Another `sbatch`; "$0.real" is the one that queues."""
        self._command("sbatch", body)

    def silent(self, silent: bool) -> None:
        """Whether the controller does not answer; what this process remembers of that is forgotten."""
        commands._silent.clear()
        (self.folder / "silent").touch() if silent else (self.folder / "silent").unlink()

    def called(self) -> str:
        return (self.folder / "called").read_text()

    def jobs(self) -> dict[str, str]:
        """The names of the jobs in the queue."""
        return {path.name: path.read_text().split("|")[1].strip() for path in (self.folder / "queue").iterdir()}

    def state(self, id: str) -> str:
        return (self.folder / "queue" / id).read_text().split("|")[0]

    def set(self, id: str, state: str, code: str = "0") -> None:
        path = self.folder / "queue" / id
        path.write_text(f"{state}|{self.jobs()[id]}|{code}\n")

    def forget(self, id: str) -> None:
        """Only the accounting knows it from now on."""
        (self.folder / "queue" / id).rename(self.folder / "ended" / id)


_SBATCH = """\
id=$(($(ls queue ended | grep -c '[0-9]') + 1))
for word in "$@"; do case "$word" in --job-name=*) name=${word#--job-name=};; esac; done
echo "$word" >"script-$id"
echo "PENDING|$name|0" >"queue/$id"
echo "$id"
"""
_SQUEUE = """\
case "$*" in *Command*)
    for word in "$@"; do case "$word" in --jobs=*) cat "script-${word#--jobs=}";; esac; done
    exit;;
esac
for id in $(ls queue); do IFS='|' read -r state name code <"queue/$id"
    echo "$id|$state|None|N/A|N/A|1:00:00|n1|0|$code|$name|"
done
"""
_SCANCEL = """\
for id in "$@"; do :; done
IFS='|' read -r state name code <"queue/$id"
echo "CANCELLED|$name|0" >"queue/$id"
"""
_SACCT = """\
case "$*" in
*JobName*) for id in $(ls ended queue | grep '[0-9]'); do IFS='|' read -r state name code <"$(ls */"$id")"
    echo "$id|$name"; done;;
*) while [ "$1" != -j ]; do shift; done; IFS='|' read -r state name code <"$(ls */"$2")"
    echo "$state|0:0|n1|Unknown|Unknown";;
esac
"""

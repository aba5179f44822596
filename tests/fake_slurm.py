"""What a small cluster's `scontrol` prints, for stand-ins of SLURM's commands."""

from __future__ import annotations

__all__ = ["NODES", "PARTITIONS", "print_text"]

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

"""GPUs and who uses them, as `nvidia-smi` tells."""

import re
import shutil
from typing import Any, Dict, List

from .processes import command_of, owner_of
from .sources import number, run

Json = Dict[str, Any]
SMI_S = 10.0


def cells(text: str, count: int) -> List[List[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == count]


def gpus(_: Json) -> Json:
    smi = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/bin:/usr/local/bin:/usr/lib/wsl/lib")
    if not smi:
        return {"gpus": [], "gpu_processes": [], "cuda_driver": ""}
    form = "--format=csv,noheader,nounits"
    wanted = "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version"
    rows = [
        {
            "index": number(index),
            "name": name,
            "uuid": uuid,
            "memory_bytes": number(total) << 20,
            "used_bytes": number(used) << 20,
            "driver": driver,
        }
        for index, name, uuid, total, used, driver in cells(run([smi, wanted, form], SMI_S), 6)
    ]
    indices = {row["uuid"]: row["index"] for row in rows}
    processes = []
    text = run([smi, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", form], SMI_S)
    for uuid, pid, used, name in cells(text, 4):
        processes.append(
            {
                "gpu": indices.get(uuid, -1),
                "pid": number(pid),
                "user": owner_of(number(pid)),
                "command": command_of(number(pid)) or name,
                "used_bytes": number(used) << 20,
            }
        )
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", run([smi], SMI_S))
    return {"gpus": rows, "gpu_processes": processes, "cuda_driver": cuda.group(1) if cuda else ""}

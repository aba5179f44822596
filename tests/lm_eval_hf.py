"""lm-eval's own `hf` backend, in an engine's environment: `python this HARNESS-SITE MODEL DTYPE LENGTH FOLDER TASK…`.

FOLDER holds the files TASK.yaml and their data. Prints one JSON document: results and, by task, the items.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    site, model, dtype, length, folder, *tasks = sys.argv[1:]
    sys.path.append(site)  # behind the engine's own packages
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable

    os.chdir(folder)
    manager = TaskManager(include_path=folder, include_defaults=False)
    results = simple_evaluate(
        "hf",
        model_args={"pretrained": model, "dtype": dtype, "max_length": int(length)},
        tasks=list(tasks),
        task_manager=manager,
        batch_size=1,
        device="cpu",
        apply_chat_template=bool(os.environ.get("CHAT")),
    )
    assert results is not None
    json.dump({"results": results["results"], "samples": results["samples"]}, out, default=handle_non_serializable)


main()

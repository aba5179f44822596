"""A stand-in for docker, podman and apptainer: does what they do with a command, without any isolation.

    fake_container_client.py docker run … IMAGE WORD…

Every call is written down in $FAKE_CONTAINERS/calls.jsonl. `run` keeps a file per container while it lasts, and gives
the command only the variables that were named, as the real ones do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_CONTAINERS"])
WITH_VALUE = {"--name", "--workdir", "--label", "--env", "--mount", "--entrypoint", "--user", "--gpus", "--device",
              "--ulimit", "--init-path", "--bind", "--home", "--pwd"}  # fmt: skip
FROM_THE_IMAGE = ("PATH", "FAKE_CONTAINERS", "STUB_OPTIONS")


def split(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(options with values, the rest from the image on)."""
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, separator, value = word.partition("=")
        options.setdefault(name, []).append(words.pop(0) if word in WITH_VALUE else value if separator else "")
    return options, words


def run_container(words: list[str]) -> int:
    options, rest = split(words)
    image, command = rest[0], [*options.get("--entrypoint", []), *rest[1:]]
    if image.startswith("missing"):
        print(f"Unable to find image '{image}' locally", file=sys.stderr)
        print(f"docker: Error response from daemon: pull access denied for {image}, repository does not exist")
        return 125
    env = {name: os.environ[name] for name in FROM_THE_IMAGE if name in os.environ}
    for text in options.get("--env", []):
        name, separator, value = text.partition("=")
        if separator or name in os.environ:
            env[name] = value if separator else os.environ[name]
    labels = dict(label.split("=", 1) for label in options["--label"])
    container = STATE / f"{labels['corral.run']}.container"
    container.write_text(json.dumps({"pid": os.getpid(), "id": "f" * 64, "labels": labels}))
    try:
        return stay(command, env, options["--workdir"][0])
    finally:
        container.unlink(missing_ok=True)


def stay(command: list[str], env: dict[str, str], cwd: str) -> int:
    (STATE / "env.json").write_text(json.dumps(env))
    process = subprocess.Popen(command, env=env, cwd=cwd)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    return code if code >= 0 else 128 - code


def execute(words: list[str]) -> int:
    options, rest = split(words)
    env = {name: os.environ[name] for name in FROM_THE_IMAGE if name in os.environ}
    for name, value in os.environ.items():
        if name.startswith("APPTAINERENV_"):
            env[name.removeprefix("APPTAINERENV_")] = value
    env["HOME"] = options["--home"][0]
    return stay(rest[1:], env, options["--pwd"][0])


def containers(words: list[str]) -> list[dict[str, object]]:
    wanted = [word.removeprefix("label=").split("=", 1) for word in words if word.startswith("label=")]
    found = [json.loads(path.read_text()) for path in STATE.glob("*.container")]
    return [each for each in found if all(len(w) == 1 or each["labels"].get(w[0]) == w[1] for w in wanted)]


def main() -> int:
    client, verb, words = sys.argv[1], sys.argv[2], sys.argv[3:]
    with (STATE / "calls.jsonl").open("a") as file:
        file.write(json.dumps([client, verb, *words]) + "\n")
    if verb == "run":
        return run_container(words)
    if verb == "exec":
        return execute(words)
    if verb == "ps" and not any(word.startswith("status=") for word in words):
        for each in containers(words):
            print(each["id"])
    if verb == "inspect":
        for each in containers([]):
            print(each["pid"], each["id"])
    if verb == "image":
        print("sha256:0123")
    return 0


if __name__ == "__main__":
    sys.exit(main())

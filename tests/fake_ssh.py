"""An `ssh` for tests: every host is a folder with a home of its own on this machine; the command runs there.

Named by `CORRAL_SSH`. A host without a folder is
unknown, one whose folder holds a file `down` cannot be reached. Started processes are written to the
host's file `pids`, so that a test can pull the plug.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def make_fake_ssh(root: Path, hosts: list[str]) -> str:
    """Make the hosts, and the command to put into `CORRAL_SSH`."""
    for host in hosts:
        (root / host).mkdir(parents=True, exist_ok=True)
    script = root / "ssh"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{Path(__file__).resolve()}" "{root}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def main(arguments: list[str]) -> None:
    root, words = Path(arguments[0]), arguments[1:]
    if "-G" in words:
        return
    while words[0].startswith("-"):
        words = words[2:] if words[0] == "-o" else words[1:]
    host = root / words[0]
    command = words[2] if words[1] == "--" else words[1]
    if not host.is_dir():
        print(f"ssh: Could not resolve hostname {words[0]}: Name or service not known", file=sys.stderr)
        sys.exit(255)
    if (host / "down").exists():
        print(f"ssh: connect to host {words[0]} port 22: No route to host", file=sys.stderr)
        sys.exit(255)
    with (host / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    os.chdir(host)
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    env = {**keep, "HOME": str(host), "SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 22"}
    os.execvpe("sh", ["sh", "-c", f"exec {command}"], env)


if __name__ == "__main__":
    main(sys.argv[1:])

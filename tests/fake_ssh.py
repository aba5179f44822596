"""An `ssh` for tests: every host is a folder with a home of its own on this machine; the command runs there.

Named by `CORRAL_SSH`. A host without a folder is unknown, one whose folder holds a file `down` cannot be reached.
Started processes are written to the host's file `pids`, so that a test can pull the plug. It is a script for `sh`,
which starts in a tenth of the time of an interpreter: a pull to four hosts asks it a dozen times.
"""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["make_fake_ssh"]

SSH = """#!/bin/sh
root={root}
for word; do
    [ "$word" != -G ] || exit 0
done
while :; do
    case $1 in
        -o) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
name=$1 host=$root/$1
shift
[ "$1" != -- ] || shift
if [ ! -d "$host" ]; then
    echo "ssh: Could not resolve hostname $name: Name or service not known" >&2
    exit 255
fi
if [ -e "$host/down" ]; then
    echo "ssh: connect to host $name port 22: No route to host" >&2
    exit 255
fi
echo $$ >>"$host/pids"
cd "$host" || exit 255
exec env -i PATH="$PATH" ${{LANG+LANG="$LANG"}} HOME="$host" SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22' \\
    sh -c "exec $1"
"""


def make_fake_ssh(root: Path, hosts: list[str]) -> str:
    """Make the hosts, and the command to put into `CORRAL_SSH`."""
    for host in hosts:
        (root / host).mkdir(parents=True, exist_ok=True)
    script = root / "ssh"
    script.write_text(SSH.format(root=shlex.quote(str(root))))
    script.chmod(0o755)
    return str(script)

"""Where facts come from: small files of the kernel's, and other programs."""

import os
import subprocess
from typing import List


def number(text: str) -> int:
    """A whole number, or 0 for anything else: sysfs says -1 or an error where it does not know."""
    return int(text) if text.isdigit() else 0


def run(argv: List[str], limit_s: float) -> str:
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        check=False,
        env=dict(os.environ, LC_ALL="C"),
    )
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        raise OSError("%s: %s" % (argv[0], (text.strip().splitlines() or ["it said nothing"])[-1]))
    return text

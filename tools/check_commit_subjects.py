"""Commit subjects of at most 72 characters, from the commit on that introduced the rule; part of `make lint`.

    python tools/check_commit_subjects.py [SINCE]

Only commits after SINCE are checked: earlier subjects are longer, and history is not rewritten. Where that commit is
not there (a shallow clone, a source archive), nothing can be checked; that is said, and is no failure.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SINCE = "ad72a15"
LONGEST = 72


def git(*words: str) -> str | None:
    """What git prints, or None where it fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def too_long(log: str, longest: int = LONGEST) -> list[str]:
    """The lines of `git log --format='%h %s'` whose subject is too long, each with its length."""
    found = [line.partition(" ") for line in log.splitlines()]
    return [
        f"{commit} has {len(subject)} characters: {subject}" for commit, _, subject in found if len(subject) > longest
    ]


def main(since: str = SINCE) -> int:
    known = git("rev-parse", "--quiet", "--verify", f"{since}^{{commit}}") is not None
    log = git("log", "--no-merges", "--format=%h %s", f"{since}..HEAD") if known else None
    if log is None:
        print(f"lint: commit subjects are not checked: commit {since} is not in this clone")  # noqa: T201
        return 0
    long = too_long(log)
    for line in long:
        print(f"lint: a commit subject may have {LONGEST} characters; {line}", file=sys.stderr)  # noqa: T201
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))

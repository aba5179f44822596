"""Processes of other people: whose they are, and what they run, as far as it is nobody's secret."""

import os

from ..files import read_text as read


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command_of(pid: int) -> str:
    """The first words of a command: enough to know it, not so much that a secret in its arguments is shown."""
    words = read("/proc/%d/cmdline" % pid).rstrip("\0").split("\0")
    if not words[0]:
        return read("/proc/%d/comm" % pid)
    if len(words) == 1:  # it has written its own title: all its arguments in one
        words = words[0].split()
    shown = [os.path.basename(words[0])]
    for word in words[1:4]:
        if word.startswith("-") and word not in ("-m", "-c"):
            break
        shown.append(word if word != "-c" else "-c …")
        if word == "-c":
            break
    return " ".join(shown)[:80]


def owner_of(pid: int) -> str:
    try:
        return user_name(os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        return ""

"""Who else may have written what lies at a path, and which users are trusted.

Trusted are this user, root, and the users named in `CORRAL_TRUST_USERS` (names or numbers, with commas between), for
a server or a home that somebody else keeps.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TRUST_USERS = "CORRAL_TRUST_USERS"


def trusted_users() -> set[int]:
    users = {0, os.getuid(), os.geteuid()}
    for word in os.environ.get(TRUST_USERS, "").split(","):
        name = word.strip()
        if name.isascii() and name.isdigit():
            users.add(int(name))
        elif name:
            try:
                users.add(pwd.getpwnam(name).pw_uid)
            except KeyError:
                continue  # there is no such user
    return users


def user_name(uid: int) -> str:
    return _name(pwd.getpwuid, uid)


def foreign_owner(path: Path) -> str:
    """To whom what is at a path belongs, as a sentence; empty where that is a trusted user."""
    owners = [path.lstat().st_uid]
    with contextlib.suppress(OSError):  # a link that leads nowhere
        owners.append(path.stat().st_uid)
    return next((f"{path} belongs to {user_name(uid)}" for uid in owners if uid not in trusted_users()), "")


def writable_by_others(path: Path) -> str:
    """Who, besides trusted users, may have written what is at a path, as a sentence; empty where nobody may."""
    if owner := foreign_owner(path):
        return owner
    status = path.stat()
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write to {path}"
    if status.st_mode & stat.S_IWGRP and not _is_alone(status.st_gid):
        return f"the group {_name(grp.getgrgid, status.st_gid)} may write to {path}"
    return ""


def _is_alone(gid: int) -> bool:
    """Whether a group is this user's own, as many systems make one for each user: it has the user's name, and no
    other member.
    """
    try:
        me, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == me and set(group.gr_mem) <= {me}


def _name(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    """The name of a user or group; its number where it has none here."""
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)

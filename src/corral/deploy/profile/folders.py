"""Where profiles lie, and which files make up the profile of one name.

    .corral/profiles/NAME.toml            in the working directory, or in a parent up to the root of its repository
    ~/.config/corral/profiles/NAME.toml   the user's own (`XDG_CONFIG_HOME` moves it)
    shipped examples                      only where neither of the others has the name

A project's file lies over the user's file of the same name, key by key: a project can carry the shape of a cluster,
and each user the account.

A project's file may name commands that run as this user. It counts where nobody else may have written it: the
project, its `.corral` and the file belong to this user or root, and nobody else may write to them. Otherwise it is
refused, unless the user trusts the project (`corral profile trust`).
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from corral.base.errors import AccessError, NotFoundError, UsageError
from corral.base.files import make_private_dir, write_atomic
from corral.base.owners import foreign_owner, writable_by_others
from corral.base.record import nearest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ProfileFile:
    """One file of a profile."""

    kind: str  # project | user | example
    path: Path


def check_name(name: str) -> str:
    """The name, if a profile can have it."""
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise UsageError(
            f"{name!r} cannot be the name of a profile.",
            "Use letters, digits, dots, dashes and underscores, at most 64. Profiles go by name, not by path.",
        )
    return name


def user_folder() -> Path:
    """The user's own profiles."""
    chosen = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".config") / "corral" / "profiles"


def project_folders(start: Path | None = None) -> list[Path]:
    """Folders of a project's profiles, nearest first; outside a repository only the working directory's."""
    try:
        here = (start or Path.cwd()).absolute()
    except FileNotFoundError:  # the working directory was deleted
        return []
    chain = [here, *here.parents]
    root = next((number for number, folder in enumerate(chain) if (folder / ".git").exists()), 0)
    return [folder / ".corral" / "profiles" for folder in chain[: root + 1]]


def _example_folder() -> Path:
    return Path(str(resources.files("corral") / "data" / "profiles"))


def find(name: str) -> list[ProfileFile]:
    """The files of a profile, the strongest last."""
    check_name(name)
    user = [ProfileFile("user", user_folder() / f"{name}.toml")]
    project = [ProfileFile("project", folder / f"{name}.toml") for folder in project_folders()]
    files = [file for file in user if _exists(file.path)]
    files += [file for file in project if _exists(file.path)][:1]
    example = ProfileFile("example", _example_folder() / f"{name}.toml")
    if not files and _exists(example.path):
        files = [example]
    if not files:
        known = list(known_names())
        guess = nearest(name, known)
        hint = f"Did you mean {', '.join(guess)}? " if guess else ""
        raise NotFoundError(f"there is no profile {name!r}.", f"{hint}Known: {', '.join(known)}.", known=known)
    return files


def example(name: str) -> Path:
    """The file of a shipped example, whatever else has its name."""
    path = _example_folder() / f"{check_name(name)}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in _example_folder().glob("*.toml"))
        raise NotFoundError(f"there is no example {name!r}.", f"Known: {', '.join(known)}.", known=known)
    return path


def known_names() -> Iterator[str]:
    """Every name, sorted; also names of files that turn out to be broken."""
    names: set[str] = set()
    for folder in (*project_folders(), user_folder(), _example_folder()):
        with suppress(OSError):
            names |= {file.stem for file in folder.glob("*.toml") if _NAME.fullmatch(file.stem)}
    yield from sorted(names)


def refuse_foreign(file: ProfileFile) -> None:
    """Raise where somebody else may have written a project's profile, and the project is not trusted."""
    if file.kind != "project":
        return
    project = file.path.parents[2]
    for path in (project, file.path.parents[1], file.path.parent, file.path):
        try:
            sticky = (
                path == project and path.stat().st_mode & stat.S_ISVTX
            )  # nobody can replace another's files there
            problem = foreign_owner(path) if sticky else writable_by_others(path)
        except OSError:  # reading it says what is wrong
            continue
        if problem and str(project.resolve()) not in _trusted():
            raise AccessError(
                f"the profile {file.path} is not used, because it may be another user's: {problem}.",
                "Read it; then correct its owner or permissions (chmod go-w), or trust the profiles of that project:"
                f" corral profile trust {shlex.quote(str(project))}",
            )


def trust(project: Path) -> Path:
    """Use a project's profiles, whoever wrote them; returns the file that lists such projects."""
    if not (project / ".corral" / "profiles").is_dir():
        raise NotFoundError(f"{project} has no profiles.", "Name the folder that holds .corral/profiles.")
    file = _trust_file()
    make_private_dir(file.parent)
    write_atomic(file, "".join(f"{one}\n" for one in sorted({*_trusted(), str(project.resolve())})))
    return file


def _trust_file() -> Path:
    return user_folder().parent / "trusted-folders"


def _trusted() -> list[str]:
    try:
        return _trust_file().read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def _exists(path: Path) -> bool:
    """Whether anything is there, also what cannot be read: reading reports what is wrong with it."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True

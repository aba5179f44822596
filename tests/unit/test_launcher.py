"""The launcher's environments: one for each kind of host that shares a checkout, and none is ever cleared.

The Python that the launcher finds is a stand-in, a few lines of shell that "make" an environment and "install" into
it. Another host is the same checkout with another base Python, or without the first one's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

BASE = """#!/bin/bash
# a stand-in for Python: $0 is bin/python of an environment, or the base itself
while [[ $1 = -[IP] ]]; do shift; done
case "$*" in
    "-c import sys; print"*) echo python3.11 ;;
    "-c import sys, venv, ensurepip"*) exit 0 ;;
    "-m venv "*)
        mkdir -p "$3/bin"
        ln -s "$(readlink -f "$0")" "$3/bin/python"
        echo "#!$3/bin/python" >"$3/bin/tool"
        ;;
    "-m uv "* | "-m pip "*) [ ! -e "$FAIL" ] || exit 1; echo "$*" >>"$INSTALLS" ;;
    "-m compileall "*) ;;
    "-m corral"*) echo "ran by $0: ${*:3}" ;;
    "- "*) exec python3 "$@" ;;
esac
"""


LOCK = """click==8.5.1 \\
    --hash=sha256:aa
uv==0.13.8 \\
    --hash=sha256:bb \\
    --hash=sha256:cc
uvicorn==0.54.0 \\
    --hash=sha256:dd
"""


@dataclass
class Checkout:
    """A copy of the launcher, and the hosts that use it."""

    path: Path
    bases: Path

    def host(self, name: str) -> Path:
        base = self.bases / name / "python3.11"
        base.parent.mkdir(parents=True, exist_ok=True)
        base.write_text(BASE)
        base.chmod(0o755)
        return base

    def run(self, base: Path, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
        marker = self.bases / "fail"
        marker.touch() if fails else marker.unlink(missing_ok=True)
        env = {
            **os.environ,
            "CORRAL_PYTHON": str(base),
            "INSTALLS": str(self.bases / "installs"),
            "FAIL": str(marker),
        }
        command = [str(self.path / "corral"), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    def environments(self) -> list[str]:
        return sorted(path.name for path in self.path.glob(".venv*") if path.is_dir())

    def installs(self) -> int:
        return sum("--editable" in line for line in self.installed())

    def installed(self) -> list[str]:
        file = self.bases / "installs"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    path = tmp_path / "a check|out & more"
    path.mkdir()
    (path / "src").mkdir()
    shutil.copy2(ROOT / "corral", path / "corral")
    (path / "pyproject.toml").write_text("")
    (path / "tools").mkdir()
    (path / "tools/launcher.lock").write_text(LOCK)
    os.utime(path / "pyproject.toml", (1, 1))
    return Checkout(path, tmp_path / "bases")


def test_one_environment_that_later_runs_only_use(checkout: Checkout) -> None:
    base = checkout.host("login")
    first = checkout.run(base, "ps", "--all")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"ran by {checkout.path}/.venv/bin/python: ps --all\n"
    assert (checkout.path / ".venv/bin/tool").read_text() == f"#!{checkout.path}/.venv/bin/python\n"
    again = checkout.run(base, "ps")
    assert (again.returncode, again.stderr) == (0, "")
    assert checkout.installs() == 1
    assert checkout.environments() == [".venv"]


def test_nothing_is_installed_whose_hash_is_not_known(checkout: Checkout) -> None:
    checkout.run(checkout.host("login"))
    bare, locked, own = checkout.installed()
    assert (checkout.path / ".venv/uv.lock").read_text().splitlines() == LOCK.splitlines()[2:5]
    assert "--require-hashes" in bare
    assert "--require-hashes" in locked
    assert f"-r {checkout.path}/tools/launcher.lock" in locked
    assert "--offline" in own  # nothing is left to fetch


def test_the_lock_has_what_corral_needs() -> None:
    names = {re.split(r"[=\s;]", line)[0] for line in (ROOT / "tools/launcher.lock").read_text().splitlines()}
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[>=<;\s]", one)[0].replace("_", "-") for one in wanted} <= names


def test_a_host_without_the_first_ones_python_makes_its_own(checkout: Checkout) -> None:
    login, node = checkout.host("login"), checkout.host("node")
    checkout.run(login)
    before = sorted((checkout.path / ".venv").rglob("*"))
    login.rename(login.with_name("hidden"))  # the compute node's image has its Python elsewhere
    second = checkout.run(node)
    assert second.returncode == 0, second.stderr
    login.with_name("hidden").rename(login)
    name = f".venv-{os.uname().machine}-python3.11"
    assert checkout.environments() == [".venv", name]
    assert f"/{name}/bin/python" in second.stdout
    assert sorted((checkout.path / ".venv").rglob("*")) == before
    assert "/.venv/bin/python" in checkout.run(login).stdout
    assert checkout.installs() == 2


def test_the_same_path_that_leads_to_another_python_is_another_host(checkout: Checkout) -> None:
    login = checkout.host("login")
    checkout.run(login)
    other = checkout.host("newer")
    shown = checkout.path / ".venv/bin/python"
    shown.unlink()
    shown.symlink_to(other)  # as /usr/bin/python3 is 3.11 here and 3.12 there
    assert f"/.venv-{os.uname().machine}-python3.11/" in checkout.run(other).stdout


def test_an_environment_of_another_architecture_is_not_used(checkout: Checkout) -> None:
    login = checkout.host("login")
    checkout.run(login)
    stamp = checkout.path / ".venv/.corral-installed"
    stamp.write_text(stamp.read_text().replace(os.uname().machine, "riscv64"))
    assert "/.venv/bin/python" not in checkout.run(login).stdout
    assert (checkout.path / ".venv/bin/tool").exists()


def test_a_failed_install_leaves_what_was_there(checkout: Checkout) -> None:
    login, node = checkout.host("login"), checkout.host("node")
    failed = checkout.run(login, fails=True)
    assert failed.returncode == 7
    assert "package index" in failed.stderr
    assert checkout.environments() == []
    checkout.run(login)
    login.rename(login.with_name("hidden"))
    assert checkout.run(node, fails=True).returncode == 7
    assert checkout.environments() == [".venv"]
    assert (checkout.path / ".venv/bin/tool").exists()


def test_changed_requirements_are_installed_in_place(checkout: Checkout) -> None:
    login = checkout.host("login")
    checkout.run(login)
    (checkout.path / ".venv/theirs").touch()  # somebody is using it
    os.utime(checkout.path / "pyproject.toml", (4_000_000_000, 4_000_000_000))
    assert checkout.run(login).returncode == 0
    assert checkout.installs() == 2
    assert (checkout.path / ".venv/theirs").exists()
